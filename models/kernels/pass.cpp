// The functions that Python calls: to run the steps of a pass over rows of a decoder, to pack weights and copy slots in 4 bits,
// and to find the likeliest token.
//
// Between operations, values are rounded to the model's type where transformers' modules round them. A row is computed with the
// same operations in the same order whatever the other rows are; `dense.h` says how.
#include "attention_layer.h"
#include "ends.h"
#include "gguf.h"
#include "maps.h"
#include "mixers.h"
#include "mlps.h"

namespace {

// The index of the largest of n logits (of equal ones the first) and, unless `logprob` is null, its log probability; NaN if a
// logit is NaN.
template <class T> void likeliest(const T* scores, int64_t n, int64_t* token_id, double* logprob) {
    constexpr int N_SUMS = 4;  // independent sums, so that an addition need not wait for the one before
    const int64_t whole = n - n % LANES;
    T last[LANES];
    std::fill(last, last + LANES, rounded<T>(-INFINITY));
    memcpy(last, scores + whole, (n - whole) * sizeof(T));
    auto load_at = [&](int64_t i) { return load(i < whole ? scores + i : (const T*)last); };
    vf peak = splat(-INFINITY), sums[N_SUMS] = {};
    for (int64_t i = 0; i < n; i += LANES) peak = larger(load_at(i), peak);
    float top = peak[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, peak[i]);
    if (logprob) {
        for (int64_t i = 0; i < n; i += LANES) sums[i / LANES % N_SUMS] += exp(load_at(i) - top);
        *logprob = -std::log(double(sum(sums[0] + sums[1] + (sums[2] + sums[3]))));
    }
    *token_id = std::find_if(scores, scores + n, [&](T score) { return to_float(score) == top; }) - scores;
    if (*token_id == n) *token_id = 0;  // all logits are NaN
}

pthread_mutex_t pass_mutex = PTHREAD_MUTEX_INITIALIZER;  // passes share threads and memory, so only one runs at a time
pid_t owner_pid = getpid();

// Run f, which uses the team, while no other call does. Returns 0, or a Failure: memory ran out, or no thread could be started.
template <class F> int run_exclusive(F&& f) {
    if (getpid() != owner_pid) {  // in a forked process, the thread that held the lock does not exist
        owner_pid = getpid();
        pass_mutex = PTHREAD_MUTEX_INITIALIZER;
        team.forget_threads();
    }
    pthread_mutex_lock(&pass_mutex);
    const int failure = setjmp(failure_jump);
    if (failure == 0) f();
    pthread_mutex_unlock(&pass_mutex);
    return failure;
}

struct Repacking {
    const GgufType& type;
    const uint8_t* from;
    const int32_t* order;
    int n_out;
    Packed to;

    void run(int) {
        const int64_t row_bytes = int64_t(to.n_in / type.inputs) * type.bytes;
        team.parallel_for((n_out + OUTPUTS - 1) / OUTPUTS, 1, [&](int64_t block, int64_t) {
            const uint8_t* rows[OUTPUTS] = {};
            for (int o = 0; o < OUTPUTS && block * OUTPUTS + o < n_out; o++) {
                const int64_t output = block * OUTPUTS + o;
                rows[o] = from + (order ? order[output] : output) * row_bytes;
            }
            repack_block(type, rows, to, int(block));
        });
    }
};

struct Coding {  // copies units of a layer's slots in 4 bits
    const void *keys, *values;  // (n_heads, capacity, width)
    uint8_t* to;                // (n_heads, n_units) units
    int64_t capacity, n_units;
    int n_heads, width, first, last;
    bool is_bf16;

    template <class T> void run_as() {
        const int n = last - first;
        team.parallel_for(int64_t(n_heads) * n, 1, [&](int64_t item, int64_t) {
            const int64_t head = item / n, unit = first + item % n, at = (head * capacity + unit * PLACES) * width;
            code_unit((const T*)keys + at, (const T*)values + at, width, to + (head * n_units + unit) * unit_bytes(width));
        });
    }
    void run(int) {
        if (is_bf16) run_as<bf16>();
        else run_as<float>();
    }
};

}  // namespace

// Run a pass; returns as `run_exclusive`.
extern "C" int swiftopt_run(const Pass* pass, const Step* steps, int32_t n_steps) {
    return run_exclusive([&] {
        if (pass->is_bf16) Runner<bf16>(*pass, steps, n_steps);
        else Runner<float>(*pass, steps, n_steps);
    });
}

// Pack a tensor of a GGUF file, (n_out, n_in) in blocks of its type, to the codes and scales of `to`. `order`: the row in the
// file of each output; null: they are in order. Returns as `run_exclusive`.
extern "C" int swiftopt_repack(int32_t number, const uint8_t* from, const int32_t* order, const Map* to, int32_t n_threads) {
    Repacking work{*gguf_type(number), from, order, to->n_out, packed_of(*to)};
    return run_exclusive([&] {
        team.run(n_threads, [](void* self, int thread) { ((Repacking*)self)->run(thread); }, &work);
    });
}

// Returns the bytes of a unit of coded slots for heads of `width` values, 0 if such heads are not supported. `n_slots`: set to
// the slots of a unit.
extern "C" int64_t swiftopt_coded_unit(int32_t width, int32_t* n_slots) {
    *n_slots = PLACES;
    return width % CHANNELS || width > MAX_HEAD_WIDTH ? 0 : unit_bytes(width);
}

// Copy units [first, last) of a layer's slots in 4 bits, for `Sequence`; see `Coding`. Returns as `run_exclusive`.
extern "C" int swiftopt_code_slots(
    const void* keys, const void* values, void* to, int64_t capacity, int64_t n_units, int32_t n_heads, int32_t width,
    int32_t first, int32_t last, int32_t is_bf16, int32_t n_threads) {
    Coding work{keys, values, (uint8_t*)to, capacity, n_units, n_heads, width, first, last, is_bf16 != 0};
    return run_exclusive([&] {
        team.run(n_threads, [](void* self, int thread) { ((Coding*)self)->run(thread); }, &work);
    });
}

// De-quantise the weights of n outputs of a packed map, (n, n_in). `outputs`: their indices; null: the first n.
extern "C" void swiftopt_dequantise(const Map* map, const int64_t* outputs, int64_t n, float* to) {
    const Packed packed = packed_of(*map);
    dispatch_kind(*map, [&](auto kind) {
        for (int64_t i = 0; i < n; i++) dequantise<kind>(packed, outputs ? outputs[i] : i, to + i * packed.n_in);
    });
}

// The supported types of tensors in GGUF files, seven numbers each: the type's number in files, bytes and inputs of a block,
// bits, group, type of scales, and table of codes. Returns the number of types.
extern "C" int swiftopt_gguf_types(int32_t* types) {
    int n = 0;
    for (const GgufType& type : GGUF_TYPES) {
        for (int32_t number :
             {type.number, type.bytes, type.inputs, type.bits, type.group, int(type.scale_type), int(type.table)})
            *types++ = number;
        n++;
    }
    return n;
}

// `likeliest` for each of n_rows rows of n logits. `logprobs` null: they are not computed.
extern "C" void swiftopt_likeliest(
    const void* scores, int32_t is_bf16, int64_t n_rows, int64_t n, int64_t* token_ids, double* logprobs) {
    for (int64_t row = 0; row < n_rows; row++) {
        double* logprob = logprobs ? logprobs + row : nullptr;
        if (is_bf16) likeliest((const bf16*)scores + row * n, n, token_ids + row, logprob);
        else likeliest((const float*)scores + row * n, n, token_ids + row, logprob);
    }
}

// The sizes in bytes of the structures. Python compares them with its own, so that it calls no library of another version.
extern "C" void swiftopt_sizes(int32_t* sizes) {
    sizes[0] = sizeof(Map), sizes[1] = sizeof(Norm), sizes[2] = sizeof(Attention), sizes[3] = sizeof(Mlp);
    sizes[4] = sizeof(Step), sizes[5] = sizeof(Rotation), sizes[6] = sizeof(Sequence), sizes[7] = sizeof(Pass);
    sizes[8] = sizeof(Mixture), sizes[9] = sizeof(Convolution), sizes[10] = sizeof(Recurrence);
    sizes[11] = sizeof(LayerEnd), sizes[12] = sizeof(LayerInputs);
}
