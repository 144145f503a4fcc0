// What Python calls: one pass over rows of a decoder, as the steps that it lists, and what else the kernels do for it.
//
// Between two operations values are rounded to the model's type where transformers' own modules round them. Each row is
// computed by the same operations in the same order whatever rows are beside it; `dense.h` says how.
#include "attention_layer.h"
#include "ends.h"
#include "gguf.h"
#include "maps.h"
#include "mixers.h"
#include "mlps.h"

namespace {

// The first of the largest of `n` values and, if it is wanted, the logarithm of its share of the sum of their
// exponentials, NaN where one is no number.
template <class T> void likeliest(const T* scores, int64_t n, int64_t* token_id, double* logprob) {
    constexpr int TOGETHER = 4;  // sums, so that one need not wait for the other
    const int64_t whole = n - n % LANES;
    T last[LANES];
    std::fill(last, last + LANES, rounded<T>(-INFINITY));
    memcpy(last, scores + whole, (n - whole) * sizeof(T));
    auto at = [&](int64_t i) { return load(i < whole ? scores + i : (const T*)last); };
    vf most = splat(-INFINITY), sums[TOGETHER] = {};
    for (int64_t i = 0; i < n; i += LANES) most = larger(at(i), most);
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, most[i]);
    if (logprob) {
        for (int64_t i = 0; i < n; i += LANES) sums[i / LANES % TOGETHER] += exp(at(i) - top);
        *logprob = -std::log(double(sum(sums[0] + sums[1] + (sums[2] + sums[3]))));
    }
    *token_id = std::find_if(scores, scores + n, [&](T score) { return to_float(score) == top; }) - scores;
    if (*token_id == n) *token_id = 0;  // nothing is a number
}

pthread_mutex_t one_pass = PTHREAD_MUTEX_INITIALIZER;  // at a time: they share threads and memory
pid_t owner = getpid();

// Run f, which uses the team; returns 0, 1 where memory ran out, or 2 where no thread could be started.
template <class F> int alone(F&& f) {
    if (getpid() != owner) {  // a forked process: whoever held the lock is not here to give it back
        owner = getpid();
        one_pass = PTHREAD_MUTEX_INITIALIZER;
        team.forget_threads();
    }
    pthread_mutex_lock(&one_pass);
    const int failure = setjmp(failed);
    if (failure == 0) f();
    pthread_mutex_unlock(&one_pass);
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
        team.each((n_out + OUTPUTS - 1) / OUTPUTS, 1, [&](int64_t block, int64_t) {
            const uint8_t* rows[OUTPUTS] = {};
            for (int o = 0; o < OUTPUTS && block * OUTPUTS + o < n_out; o++) {
                const int64_t output = block * OUTPUTS + o;
                rows[o] = from + (order ? order[output] : output) * row_bytes;
            }
            repack_block(type, rows, to, int(block));
        });
    }
};

struct Coding {  // of units of a layer's slots
    const void *keys, *values;  // (n_heads, capacity, width)
    uint8_t* to;                // (n_heads, room) units
    int64_t capacity, room;
    int n_heads, width, first, last;
    bool is_bf16;

    template <class T> void run_as() {
        const int n = last - first;
        team.each(int64_t(n_heads) * n, 1, [&](int64_t item, int64_t) {
            const int64_t head = item / n, unit = first + item % n, at = (head * capacity + unit * PLACES) * width;
            code_unit((const T*)keys + at, (const T*)values + at, width, to + (head * room + unit) * unit_bytes(width));
        });
    }
    void run(int) {
        if (is_bf16) run_as<bf16>();
        else run_as<float>();
    }
};

}  // namespace

// Run a pass; returns as `alone`.
extern "C" int swiftopt_run(const Pass* pass, const Step* steps, int32_t n_steps) {
    return alone([&] {
        if (pass->is_bf16) Runner<bf16>(*pass, steps, n_steps);
        else Runner<float>(*pass, steps, n_steps);
    });
}

// Lay out a tensor of a GGUF file, `from`, (n_out, n_in) in blocks of its type, as the packed codes and scales of `to`.
// `order`: which row of the file each output is; null: they are in order. Returns as `alone`.
extern "C" int swiftopt_repack(int32_t number, const uint8_t* from, const int32_t* order, const Map* to, int32_t n_threads) {
    Repacking work{*gguf_type(number), from, order, to->n_out, packed_of(*to)};
    return alone([&] {
        team.run(n_threads, [](void* self, int thread) { ((Repacking*)self)->run(thread); }, &work);
    });
}

// Bytes of a unit of coded slots of heads of `width` values, 0: such heads have none; and the slots of a unit.
extern "C" int64_t swiftopt_coded_unit(int32_t width, int32_t* n_slots) {
    *n_slots = PLACES;
    return width % CHANNELS || width > WIDEST_HEAD ? 0 : unit_bytes(width);
}

// Code the units [first, last) of a layer's slots, for `Sequence`; see `Coding`. Returns as `alone`.
extern "C" int swiftopt_code_slots(
    const void* keys, const void* values, void* to, int64_t capacity, int64_t room, int32_t n_heads, int32_t width,
    int32_t first, int32_t last, int32_t is_bf16, int32_t n_threads) {
    Coding work{keys, values, (uint8_t*)to, capacity, room, n_heads, width, first, last, is_bf16 != 0};
    return alone([&] {
        team.run(n_threads, [](void* self, int thread) { ((Coding*)self)->run(thread); }, &work);
    });
}

// The weights of `n` outputs of a packed map as numbers, (n, n_in); `outputs` null: of the first ones.
extern "C" void swiftopt_numbers(const Map* map, const int64_t* outputs, int64_t n, float* to) {
    const Packed packed = packed_of(*map);
    by_kind(*map, [&](auto kind) {
        for (int64_t i = 0; i < n; i++) numbers_of<kind>(packed, outputs ? outputs[i] : i, to + i * packed.n_in);
    });
}

// Types of tensors of GGUF files, seven numbers each: as in files, bytes and inputs of a block, bits, group, type of scales,
// table of codes.
// Returns how many there are.
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

// `likeliest` of each of `n_rows` rows of `n` values; `logprobs` null: they are not wanted.
extern "C" void swiftopt_likeliest(
    const void* scores, int32_t is_bf16, int64_t n_rows, int64_t n, int64_t* token_ids, double* logprobs) {
    for (int64_t row = 0; row < n_rows; row++) {
        double* logprob = logprobs ? logprobs + row : nullptr;
        if (is_bf16) likeliest((const bf16*)scores + row * n, n, token_ids + row, logprob);
        else likeliest((const float*)scores + row * n, n, token_ids + row, logprob);
    }
}

// Bytes of the structures, which the Python side has to agree with: a library of another version must not be called.
extern "C" void swiftopt_sizes(int32_t* sizes) {
    sizes[0] = sizeof(Map), sizes[1] = sizeof(Norm), sizes[2] = sizeof(Attention), sizes[3] = sizeof(Mlp);
    sizes[4] = sizeof(Step), sizes[5] = sizeof(Rotation), sizes[6] = sizeof(Sequence), sizes[7] = sizeof(Pass);
    sizes[8] = sizeof(Mixture), sizes[9] = sizeof(Convolution), sizes[10] = sizeof(Recurrence);
    sizes[11] = sizeof(LayerEnd), sizes[12] = sizeof(LayerInputs);
}
