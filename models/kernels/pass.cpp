// One pass over rows of a decoder: what the Python side lists as steps, run by a team of threads.
//
// Between two operations values are rounded to the model's type where transformers' own modules round them. Each row is
// computed by the same operations in the same order whatever rows are beside it; `dense.h` says how.
#include <ctime>
#include "attention.h"
#include "gguf.h"
#include "mixture.h"
#include "team.h"

extern "C" {

struct Map {  // a linear map; `scales` null: `weight` is (n_out, n_in) of the model's type, else packed codes
    const void *weight, *bias, *scales;
    const int32_t* order;  // which of its inputs the codes are for, one after the other; null: they are in order
    int64_t stride;        // between the rows of `weight`
    int32_t n_in, n_out, bits, group, scale_type, table;
};

enum NormKind : int32_t { NO_NORM, RMS, RMS_PLUS_ONE, LAYER, RMS_WIDE };  // wide: rounded once, behind the weight
struct Norm {
    const void *weight, *bias;
    float eps;
    int32_t kind, step;  // `step`: between the weights of heads
};

enum HeadNorm : int32_t { BY_HEAD, WHOLE, ROTATED };  // before the rotation, head by head or all as one; or behind it
struct Attention {
    Norm before, after, query_norm, key_norm, inner;  // inner: of what the heads read
    Map projections[3], out;
    int32_t n_projections, n_heads, n_kv_heads, width;
    // In the projections' outputs, for each key head: its queries, which lie together, its key and its value.
    int32_t query_at, query_step, key_at, key_step, value_at, value_step;
    int32_t head_norm, gated;  // `gated`: behind each query lies a gate of its width
    float scaling, softcap, clip;  // bounds of scores and of what the projections give, 0: none
    float added_scale;             // of what the residual stream gets
    const void* sinks;             // (n_heads,) scores that take a share of attention and read nothing; null: none
};

struct Convolution {  // gated and short, in place of attention; `mixers.h`
    Norm before, after;
    Map into, out;            // to a gate, a second gate and values, one behind the other
    const float *taps, *bias;  // (n_taps, n_hidden), the newest token's last; bias null: none
    int32_t n_taps;
    float added_scale;
};

struct Delta {  // a gated delta rule in place of attention; `mixers.h`
    Norm before, after;
    Map projections[4], out;
    const int32_t *inputs, *gates, *places;    // where the first two lie in the projections' outputs, and heads in `out`'s
    const float *taps, *decay, *step_bias;     // (n_taps, convolved), the newest token's last; (n_heads,), (n_heads,)
    const void* norm;                          // (value_width,)
    float norm_eps;
    int32_t n_projections, n_heads, n_key_heads, key_width, value_width, n_taps;
    float added_scale;

    int n_convolved() const { return 2 * n_key_heads * key_width + n_heads * value_width; }
    int n_inputs() const { return n_convolved() + 2 * n_heads; }
};

enum Activation : int32_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, XIELU, CLAMPED };
struct Mlp {
    Norm before, after, inner;
    Map in[2], out;  // gate and up, or one map (of gate and then up where `gated`)
    int32_t n_in_maps, gated, n_inner, activation;
    // Of XIELU: factors of the squares and of the exponentials, of x, and the largest exponent. Of CLAMPED: the bound of both
    // halves, and the factor in the sigmoid.
    float curve[4];
    float added_scale;
};

struct Mixture {  // experts, of which each row takes some, in place of an MLP
    Norm before, after;
    const void* router;         // (n_experts, n_hidden), of floats where `wide_router`, else of the model's type
    const float *correction, *router_bias;  // (n_experts,) of scores where experts are chosen, of logits; null: none
    const Map *in, *out;        // of each expert, then of the shared ones: `n_in_maps` each (gate and up, or both as one)
    const void* shared_gate;    // (n_hidden,): the shared output is multiplied by the sigmoid of this product; null: 1
    Choosing choosing;
    int32_t has_shared, wide_router, rounded_logits;
    int32_t n_in_maps, n_inner, n_shared_inner;
    Mlp mlp;  // the activation of all of them; nothing else of it is used
    float shared_scale, added_scale;  // of the shared output, and of what the residual stream gets
};

enum StepKind : int32_t { ATTENTION, MLP, KEEP, LOGITS, MIXTURE, CONVOLUTION, DELTA };
struct Step {
    const void* part;                   // Attention, Mlp, Map, Mixture, Convolution or Delta
    int32_t kind, layer, window, rows;  // `rows`: which of the pass's lists of rows
    int32_t rotation;                   // which of the pass's tables, -1: none
    int32_t from_kept;                  // an MLP that reads what KEEP kept
};

struct Rotation {
    const void *cos, *sin;    // (positions, width), the sine of the first of each pair negated
    const void* query_scale;  // (positions,) of the model's type, null: 1
    int32_t width, pairs;     // `pairs`: neighbours; else values half of `width` apart
    int32_t wide;             // the tables are float, and products are not rounded
};

struct RowList {
    const int32_t* rows;  // null: all
    int64_t n;
};

struct Sequence {  // consecutive rows of a pass that have keys and values of their own
    const uint8_t* visible;             // (n_rows, first_slot + n_rows) or null
    // Per layer (kv_heads, capacity, width), inputs of a convolution, or the inputs and states of a recurrent layer.
    void *const *keys, *const *values;
    int32_t* roots;  // of states, (layers, 2); null: there are none
    int64_t head_stride;                // between the key/value heads of its buffer
    int32_t n_rows, first_slot;
    int32_t committed, n_kept, lag, is_text;  // see `RecurrentStates`
};

struct Pass {
    void* hidden;               // (n_rows, n_hidden), changed in place
    const int32_t* positions;   // (n_rows,)
    const Sequence* sequences;  // their rows in this order
    const RowList* lists;       // the rows of each in ascending order
    const Rotation* rotations;
    void* logits;  // (rows of the LOGITS step, n_out)
    const Norm* norm;  // before LOGITS, null: none
    double* seconds;  // null, or where the seconds of each kind of work are added
    ExpertCounts* experts;  // null, or where the counts of each mixture are added
    int32_t n_rows, n_hidden, n_sequences, n_lists, n_threads, is_bf16;
};
enum Work : int32_t { MAPS, SLOTS, REST };  // linear maps; attention over the slots; norms, rotations, rounding
}

namespace {

Team team;

Packed packed_of(const Map& map) {
    return {map.weight, map.scales, (map.n_in + map.group - 1) / map.group * map.group, map.group, map.scale_type};
}

// f(the kind of a map's codes), as a constant.
template <class F> void by_kind(const Map& map, F&& f) {
    const auto is = [&](auto kind) { return kind_of(map.bits, map.table) == kind && (f(kind), true); };
    is(std::integral_constant<int, 4>{}) || is(std::integral_constant<int, 5>{}) || is(std::integral_constant<int, 6>{}) ||
        is(std::integral_constant<int, 8>{}) || is(std::integral_constant<int, kind_of(4, E2M1)>{}) ||
        is(std::integral_constant<int, kind_of(4, IQ4)>{});
}

float gelu_erf(float x) {  // x * Phi(x); erf by Abramowitz and Stegun 7.1.26, off by at most 1.5e-7
    const float z = std::fabs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    const float poly = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    float e[LANES];
    store(e, exp(splat(-z * z)));
    const float erf = 1.0f - poly * e[0];
    return 0.5f * x * (1.0f + (x < 0 ? -erf : erf));
}

vf chosen(vi which, vf a, vf b) { return (vf)((which & (vi)a) | (~which & (vi)b)); }

vf smaller(vf a, vf b) { return chosen(a < b, a, b); }

vf activated(vf x, const Mlp& mlp) {
    const int32_t kind = mlp.activation;
    if (kind == SILU) return x / (exp(-x) + 1.0f);
    if (kind == GELU_TANH) {  // x * sigmoid(2 u): 0.5 (1 + tanh u)
        const vf u = (x + x * x * x * 0.044715f) * 1.5957691216f;
        return x / (exp(-u) + 1.0f);
    }
    if (kind == RELU || kind == RELU_SQUARED) {
        const vf positive = (vf)((x > 0.0f) & (vi)x);
        return kind == RELU ? positive : positive * positive;
    }
    if (kind == XIELU) {  // arXiv:2411.13010
        const float* c = mlp.curve;
        const vf low = exp(chosen(x < c[3], x, splat(c[3]))) - 1.0f - x;
        return chosen(x > 0.0f, x * x * c[0], low * c[1]) + x * c[2];
    }
    if (kind == CLAMPED) {
        const vf low = smaller(x, splat(mlp.curve[0]));
        return low / (exp(low * -mlp.curve[1]) + 1.0f);
    }
    float lanes[LANES];
    store(lanes, x);
    for (float& each : lanes) each = gelu_erf(each);
    return load((const float*)lanes);
}

// `n` values from `x` to `y`, vector by vector, the last of them padded.
template <class T, class F> void along(int n, const T* x, T* y, F&& f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, f(load(x + i), i));
    if (i < n) {
        T from[LANES] = {}, to[LANES];
        memcpy(from, x + i, (n - i) * sizeof(T));
        store(to, f(load((const T*)from), i));
        memcpy(y + i, to, (n - i) * sizeof(T));
    }
}

template <class T> void round_to(T* to, const float* from, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = rounded<T>(from[i]);
}

template <class T> void normed(const Norm& norm, const T* x, int n, T* y) {
    if (norm.kind == NO_NORM) {
        if (y != x) memcpy(y, x, n * sizeof(T));
        return;
    }
    const T *weight = (const T*)norm.weight, *bias = (const T*)norm.bias;
    float mean = 0;
    if (norm.kind == LAYER) {
        vf total = {};
        for (int i = 0; i < n; i += LANES) total += part_of(x, i, n);
        mean = sum(total) / float(n);
    }
    vf squares = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf d = load(x + i) - mean;
        squares = fma(d, d, squares);
    }
    float rest = 0;
    for (; i < n; i++) rest += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(n) + norm.eps);
    along(n, x, y, [&](vf v, int at) {
        const vf w = part_of(weight, at, n);
        if (norm.kind == RMS) return as_stored<T>(v * scale) * w;
        if (norm.kind == RMS_WIDE) return v * scale * w;
        if (norm.kind == RMS_PLUS_ONE) return v * scale * (w + 1.0f);
        const vf scaled = (v - mean) * scale * w;
        return bias ? scaled + part_of(bias, at, n) : scaled;
    });
}

// The first address at or behind one that a cache line begins at: stores across two lines take twice as long.
template <class P> P* on_line(P* from) { return (P*)((uintptr_t(from) + 63) / 64 * 64); }

struct Arena {  // pieces of memory for one pass
    List<List<char>> pieces;

    void* take(size_t bytes) {
        List<char>& piece = pieces.add();
        piece.reserve(bytes + 64);
        return on_line(piece.items);
    }
};

double clock_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

template <class T> class Runner {
  public:
    Runner(const Pass& pass, const Step* steps, int n_steps) : pass_(pass), steps_(steps), n_steps_(n_steps) {
        views_.clear(), places_.clear(), parts_.clear();
        const size_t rows = std::max(1, pass.n_rows);
        size_t wide = 1, inner = 1, head = 0, gates = 0, updates = 0, state = 0, path = 0;
        bool packed = false, ordered = false, keeps = false;
        Mixed mixed;  // the largest of the mixtures
        auto widest = [&](const Map& map) {
            wide = std::max<size_t>(wide, map.n_in);
            packed |= map.scales != nullptr, ordered |= map.order != nullptr;
        };
        for (int s = 0; s < n_steps; s++) {
            if (steps[s].kind == ATTENTION) {
                const auto& part = *(const Attention*)steps[s].part;
                size_t total = 0;
                for (int i = 0; i < part.n_projections; i++) widest(part.projections[i]), total += part.projections[i].n_out;
                widest(part.out), inner = std::max(inner, total);
                if (part.gated) gates = std::max<size_t>(gates, part.n_heads * part.width);
                head = std::max<size_t>(head, part.width);
                look_once(steps[s].window);
            } else if (steps[s].kind == MLP) {
                const auto& part = *(const Mlp*)steps[s].part;
                for (int i = 0; i < part.n_in_maps; i++) widest(part.in[i]);
                widest(part.out), inner = std::max<size_t>(inner, part.n_inner);
            } else if (steps[s].kind == LOGITS) {
                widest(*(const Map*)steps[s].part);
            } else if (steps[s].kind == MIXTURE) {
                mixed.count(*(const Mixture*)steps[s].part, widest);
            } else if (steps[s].kind == CONVOLUTION) {
                const auto& part = *(const Convolution*)steps[s].part;
                widest(part.into), widest(part.out), inner = std::max<size_t>(inner, part.into.n_out);
            } else if (steps[s].kind == DELTA) {
                const auto& part = *(const Delta*)steps[s].part;
                size_t total = 0;
                for (int i = 0; i < part.n_projections; i++) widest(part.projections[i]), total += part.projections[i].n_out;
                widest(part.out), inner = std::max(inner, total), updates = std::max<size_t>(updates, part.n_inputs());
                state = std::max<size_t>(state, (part.key_width + 1) * (part.value_width + LANES));
            } else {
                keeps = true;
            }
        }
        wide = std::max<size_t>(wide, pass.n_hidden) + 128;  // packed maps read whole groups
        part_lists();
        arena.pieces.clear(), inputs_.clear();
        inner_ = (T*)arena.take(rows * inner * sizeof(T));
        mixed_ = (T*)arena.take(rows * wide * sizeof(T));
        gates_ = (T*)arena.take(rows * gates * sizeof(T));
        updates_ = (T*)arena.take(rows * updates * sizeof(T));
        for (int s = 0; state && s < pass.n_sequences; s++)
            path = std::max<size_t>(path, pass.sequences[s].n_rows + pass.sequences[s].n_kept + 1);
        kept_ = keeps ? (T*)arena.take(rows * pass.n_hidden * sizeof(T)) : nullptr;
        n_threads_ = std::min(std::max(1, pass.n_threads), Team::most);
        // The last input is the one that threads share; with few rows each thread makes its own, and waits for nobody.
        for (int i = 0; i <= n_threads_; i++) {
            const size_t n = i < n_threads_ ? std::min<size_t>(rows, FEW) : rows;
            Input input{(T*)arena.take(n * wide * sizeof(T)), {}, nullptr, nullptr};
            if (TILES) input.turned = (T*)arena.take(whole_sides(n) * wide * sizeof(T));
            if (ordered) input.ordered = (T*)arena.take(n * wide * sizeof(T));
            if (packed) {
                const size_t whole = whole_sides(n);
                input.codes.codes = (int8_t*)arena.take(whole * wide);
                input.codes.scales = (float*)arena.take(whole * (wide / FINEST + 1) * sizeof(float));
                input.codes.sums = (float*)arena.take(whole * (wide / FINEST + 1) * sizeof(float));
                input.codes.halves = (float*)arena.take(2 * whole * (wide / FINEST + 1) * sizeof(float));
            }
            inputs_.add(input);
        }
        if (mixed.n_experts) take_room(mixed, int64_t(rows), wide, packed, ordered);
        tiles.clear(), scratch.clear(), paths.clear();
        for (int i = 0; i < n_threads_; i++) {  // here, where running out of memory can still be told
            tiles.add().reserve(2 * (whole_sides(rows) * PANEL + OUTPUTS));
            const int64_t spread = packed ? SPREAD_ROOM / int64_t(sizeof(float)) : 0;
            scratch.add().reserve(std::max({scratch_of(head), spread, int64_t(state)}) + 64 / sizeof(float));
            paths.add().reserve(2 * path);
        }
        team.run(n_threads_, [](void* self, int thread) { ((Runner*)self)->all(thread); }, this);
    }

  private:
    static constexpr int PANEL = 64;  // outputs that a thread takes at a time; twice as many where rows would be read too often
    static constexpr int FEW = 4;     // rows that each thread prepares for itself sooner than it waits for another
#if defined(WITH_TILES)
    static constexpr bool TILES = sizeof(T) == sizeof(bf16);  // whether weights in T are multiplied by tiles
    static int64_t whole_sides(int64_t rows) { return (rows + SIDE - 1) / SIDE * SIDE; }  // which tiles read and write
#else
    static constexpr bool TILES = false;
    static int64_t whole_sides(int64_t rows) { return rows; }
#endif

    struct Input {  // of a linear map: rows, and their codes where the map is packed
        T* rows;
        Rounded codes;
        T* ordered;  // rows in the order of a map's codes, where it has one of its own
        T* turned;   // rows as `tile_products` takes them
    };

    void look_once(int window) {
        for (auto& view : views_)
            if (view.window == window) return;
        View& view = views_.add();
        view.begin(window);
        int first = 0;
        for (int s = 0; s < pass_.n_sequences; first += pass_.sequences[s++].n_rows) {
            const Sequence& own = pass_.sequences[s];
            look(view, own.n_rows, own.first_slot, pass_.positions + first, own.visible);
        }
        view.first.add(int32_t(view.runs.n));
    }

    // Which sequence each row is of, and the parts of each list that are of one.
    void part_lists() {
        if (pass_.n_sequences == 0) return;  // no attention
        for (int s = 0; s < pass_.n_sequences; s++) {
            for (int row = 0; row < pass_.sequences[s].n_rows; row++) places_.add({s, pass_.sequences[s].first_slot + row});
        }
        for (int l = 0; l < pass_.n_lists; l++) {
            const RowList& list = pass_.lists[l];
            List<Part>& parts = parts_.add();
            parts.clear();
            for (int64_t i = 0; i < list.n; i++) {
                const int s = places_[row_of(list, i)].sequence;
                if (parts.n == 0 || parts.last().sequence != s) parts.add({i, 0, s});
                parts.last().n++;
            }
        }
    }

    void all(int thread) {
        WholeTiles tiles_in_use;
        for (int s = 0; s < n_steps_; s++) {
            const Step& step = steps_[s];
            const RowList& list = pass_.lists[step.rows];
            if (list.n == 0) continue;
            if (step.kind == ATTENTION) attention(step, *(const Attention*)step.part, list, thread);
            if (step.kind == MLP) mlp(step, *(const Mlp*)step.part, list, thread);
            if (step.kind == LOGITS) logits(*(const Map*)step.part, list, thread);
            if (step.kind == MIXTURE) mixture(step, *(const Mixture*)step.part, list, thread);
            if (step.kind == DELTA) delta(step, *(const Delta*)step.part, list, thread);
            if (step.kind == CONVOLUTION) convolution(step, *(const Convolution*)step.part, list, thread);
            if (step.kind == KEEP)
                team.each(pass_.n_rows, 16, [&](int64_t from, int64_t to) {
                    memcpy(kept_ + from * pass_.n_hidden, hidden(int(from)), (to - from) * pass_.n_hidden * sizeof(T));
                });
        }
    }

    struct Place {  // of a row's keys and values
        int sequence, slot;
    };
    struct Part {  // rows `first`, … of a list
        int64_t first, n;
        int sequence;
    };

    // Share out work of a kind, and note how long it took where that is wanted.
    template <class F> void each(Work work, int thread, int64_t n, int64_t piece, F&& body) const {
        if (thread || !pass_.seconds) return team.each(n, piece, body);
        const double start = clock_s();
        team.each(n, piece, body);
        pass_.seconds[work] += clock_s() - start;
    }

    T* hidden(int row) const { return (T*)pass_.hidden + int64_t(row) * pass_.n_hidden; }
    static int row_of(const RowList& list, int64_t i) { return list.rows ? list.rows[i] : int(i); }

    // Prepare the rows of an input, `make(input, row)` each.
    template <class F> Input prepared(int64_t n, int thread, F&& make) {
        if (n <= FEW) {
            for (int64_t i = 0; i < n; i++) make(inputs_[thread], i);
            return inputs_[thread];
        }
        each(REST, thread, n, 1, [&](int64_t i, int64_t) { make(inputs_.last(), i); });
        return inputs_.last();
    }

    // Norm of the listed rows, rounded to codes where one of the maps behind it wants that.
    Input enter(const Norm& norm, const RowList& list, const T* from, const Map* maps, int n_maps, int thread) {
        const int n = pass_.n_hidden;
        const Map *packed = nullptr, *plain = nullptr;
        for (const Map* map = maps; map < maps + n_maps; map++) (map->scales ? packed : plain) = map;
        const Input input = prepared(list.n, thread, [&](const Input& input, int64_t i) {
            normed(norm, from + int64_t(row_of(list, i)) * n, n, input.rows + i * n);
            if (packed) round_into(input, input.rows + i * n, *packed, i);
        });
        return plain ? turned(input, *plain, list.n, thread) : input;
    }

    // Rows as they are, rounded where the map wants that.
    Input taken(T* rows, const Map& map, int64_t n, int thread) {
        if (!map.scales) return turned({rows, {}, nullptr, nullptr}, map, n, thread);
        Input input = prepared(n, thread, [&](const Input& to, int64_t i) {
            round_into(to, rows + i * map.n_in, map, i);
        });
        return {rows, input.codes, nullptr, nullptr};
    }

    // An input whose rows are turned where that is how the map takes them.
    Input turned(Input input, const Map& map, int64_t n, int thread) {
#if defined(WITH_TILES)
        if constexpr (TILES) {
            if (map.scales) return input;
            input.turned = inputs_[n <= FEW ? thread : n_threads_].turned;
            const int k = map.n_in, whole = whole_tiles(k), n_shares = (whole + IN_CACHE - 1) / IN_CACHE;
            auto share = [&](int64_t item) {
                const int64_t row = item / n_shares * SIDE;
                const int from = int(item % n_shares) * IN_CACHE, m = int(std::min<int64_t>(SIDE, n - row));
                turn_rows(input.rows + row * k, k, m, k, from, std::min(from + IN_CACHE, whole), input.turned + row * whole);
            };
            if (n > FEW) each(REST, thread, whole_sides(n) / SIDE * n_shares, 1, [&](int64_t item, int64_t) { share(item); });
            else
                for (int item = 0; item < n_shares; item++) share(item);
        }
#endif
        return input;
    }

    static void round_into(const Input& input, const T* x, const Map& map, int64_t row) {
        const Rounded& codes = input.codes;
        if (map.order) {
            T* own = input.ordered + row * map.n_in;
            for (int i = 0; i < map.n_in; i++) own[i] = x[map.order[i]];
            x = own;
        }
        const int group = std::max(map.group, FINEST), groups = (map.n_in + group - 1) / group;
        round_row(x, map.n_in, group, codes.codes + row * groups * group, codes.scales + row * groups,
                  codes.sums + row * groups, codes.halves + 2 * row * groups);
    }

    struct Output {  // one of a map
        const Map* map;
        int number;
    };

    // Outputs [first, last) of a map for `rows` rows of `x` (or their codes), biases added, into `c`. `next`: where this thread
    // will probably go on; without a map, in this one if all threads are as fast.
    void outputs(
        const Map& map, const Input& x, int rows, int first, int last, float* c, int64_t ldc, int thread,
        Output next = {}) const {
        if (!next.map) next = {&map, first + n_threads_ * (last - first)};
        if (map.scales) {
            const Packed packed = packed_of(map);
            const int b0 = first / OUTPUTS, b1 = (last + OUTPUTS - 1) / OUTPUTS;
            by_kind(map, [&](auto kind) {
                packed_products<kind>(
                    packed, x.codes, rows, b0, b1, c, ldc, onward_to(next), on_line(scratch[thread].items));
            });
        } else {
            const T* weight = (const T*)map.weight + first * map.stride;
#if defined(WITH_TILES)
            if constexpr (TILES) tile_products(x.turned, rows, weight, map.stride, last - first, map.n_in, c, ldc);
            else
#endif
                products<T>(x.rows, map.n_in, rows, weight, map.stride, last - first, map.n_in, c, ldc,
                            (const T*)next.map->weight + next.number * next.map->stride);
        }
        if (map.bias) {
            const T* bias = (const T*)map.bias + first;
            for (int r = 0; r < rows; r++)
                for (int o = 0; o < last - first; o++) c[r * ldc + o] += to_float(bias[o]);
        }
    }

    static Onward onward_to(const Output& next) {
        if (!next.map->scales) return {};
        const Packed packed = packed_of(*next.map);
        const int block = next.number / OUTPUTS;
        return {packed.codes + block * (packed.block_bytes() * next.map->bits / 8), packed.scales_at(block)};
    }

    // `sink(row, first output, n, values)` for all outputs of a map.
    template <class F> void linear(const Map& map, const Input& x, int64_t rows, int thread, F&& sink) {
        const int most = rows > FEW_TO_STREAM && map.n_out >= 8 * PANEL * n_threads_ ? 2 * PANEL : PANEL;
        each(MAPS, thread, (map.n_out + most - 1) / most, 1, [&](int64_t panel, int64_t) {
            auto& tile = tiles[thread];
            const int first = int(panel) * most, last = std::min(first + most, map.n_out);
            outputs(map, x, int(rows), first, last, tile.items, most, thread);
            for (int r = 0; r < rows; r++) sink(r, first, last - first, tile.items + r * most);
        });
    }

    // Add a map's outputs times `scale` to the listed rows, by way of a norm where there is one.
    void leave(const Map& map, const Norm& norm, float scale, const Input& x, const RowList& list, int thread) {
        const int n = pass_.n_hidden;
        auto scaled = [&](vf v) { return scale == 1 ? v : as_stored<T>(v * scale); };
        linear(map, x, list.n, thread, [&](int row, int first, int n_out, const float* values) {
            if (norm.kind == NO_NORM) {
                T* to = hidden(row_of(list, row)) + first;
                along(n_out, to, to, [&](vf h, int at) { return h + scaled(as_stored<T>(part_of(values, at, n_out))); });
            } else {
                T* to = inputs_.last().rows + int64_t(row) * n + first;
                round_to(to, values, n_out);
            }
        });
        if (norm.kind == NO_NORM) return;
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) { add(norm, scale, list, i); });
    }

    // Add the norm of what lies in the last input's row, times `scale`, to a listed row.
    void add(const Norm& norm, float scale, const RowList& list, int64_t i) {
        const int n = pass_.n_hidden;
        T *delta = inputs_.last().rows + i * n, *to = hidden(row_of(list, i));
        normed(norm, delta, n, delta);
        along(n, to, to, [&](vf h, int at) {
            const vf own = part_of(delta, at, n);
            return h + (scale == 1 ? own : as_stored<T>(own * scale));
        });
    }

    // Several maps of an input as one, to `inner_`: panels of all of them are shared out together. Returns their outputs.
    int project(const Map* maps, int n_maps, const Input& input, const RowList& list, int thread) {
        int total = 0, n_panels = 0, panels[4];
        for (int i = 0; i < n_maps; i++) total += maps[i].n_out, panels[i] = n_panels += (maps[i].n_out + PANEL - 1) / PANEL;
        each(MAPS, thread, n_panels, 1, [&](int64_t panel, int64_t) {
            int which = 0, at = 0;
            while (panel >= panels[which]) at += maps[which++].n_out;
            const int first = int(panel - (which ? panels[which - 1] : 0)) * PANEL;
            const int last = std::min(first + PANEL, maps[which].n_out);
            auto& tile = tiles[thread];
            outputs(maps[which], input, int(list.n), first, last, tile.items, PANEL, thread);
            for (int64_t r = 0; r < list.n; r++) round_to(inner_ + r * total + at + first, tile.items + r * PANEL, last - first);
        });
        return total;
    }

    void attention(const Step& step, const Attention& part, const RowList& list, int thread) {
        const Input input = enter(
            part.before, list, (const T*)pass_.hidden, part.projections, part.n_projections, thread);
        const int total = project(part.projections, part.n_projections, input, list, thread);
        if (part.head_norm == WHOLE) {
            norm_rows(part.query_norm, inner_ + part.query_at, total, part.n_heads * part.width, list.n, thread);
            norm_rows(part.key_norm, inner_ + part.key_at, total, part.n_kv_heads * part.width, list.n, thread);
        }
        if (part.clip > 0)
            each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
                const vf least = splat(-part.clip), most = splat(part.clip);
                along(total, inner_ + i * total, inner_ + i * total, [&](vf v, int) {
                    return chosen(v < least, least, chosen(v > most, most, v));
                });
            });
        const int width = part.width, group = part.n_heads / part.n_kv_heads, q_size = part.n_heads * width;
        // Queries to `mixed_`, keys and values to the buffer, head by head.
        const int per_row = part.n_heads + part.n_kv_heads;
        each(REST, thread, list.n * per_row, list.n > FEW ? per_row : 1, [&](int64_t first, int64_t last) {
            for (int64_t item = first; item < last; item++) {
                const int64_t i = item / per_row;
                const int row = row_of(list, i), h = int(item % per_row), kv = h - part.n_heads;
                const T* in = inner_ + i * total;
                const Rotation* rotation = step.rotation < 0 ? nullptr : pass_.rotations + step.rotation;
                const int position = pass_.positions[row];
                if (kv < 0) {
                    T* to = mixed_ + i * q_size + h * width;
                    const T* from = in + part.query_at + h / group * part.query_step + h % group * width * (1 + part.gated);
                    if (part.gated) memcpy(gates_ + i * q_size + h * width, from + width, width * sizeof(T));
                    head_of(part.query_norm, part.head_norm, h, from, width, rotation, position, to);
                    if (rotation && rotation->query_scale) {
                        const float scale = to_float(((const T*)rotation->query_scale)[position]);
                        along(width, to, to, [&](vf v, int) { return v * scale; });
                    }
                } else {
                    const Sequence& own = pass_.sequences[places_[row].sequence];
                    const int64_t to = kv * own.head_stride + int64_t(places_[row].slot) * width;
                    head_of(part.key_norm, part.head_norm, kv, in + part.key_at + kv * part.key_step, width, rotation, position,
                            (T*)own.keys[step.layer] + to);
                    memcpy((T*)own.values[step.layer] + to, in + part.value_at + kv * part.value_step, width * sizeof(T));
                }
            }
        });
        const View* view = nullptr;
        for (auto& each : views_)
            if (each.window == step.window) view = &each;
        const List<Part>& parts = parts_[step.rows];
        const Split split = split_of(parts, part.n_kv_heads, group);
        // Queries lie in `mixed_`, and what the heads read goes where the projections were.
        each(SLOTS, thread, split.n, 1, [&](int64_t item, int64_t) {
            const int share = int(item % split.n_shares), kv = int(item / split.n_shares % part.n_kv_heads);
            int64_t chunk = item / split.n_shares / part.n_kv_heads;
            const Part* some = parts.items;
            for (; chunk >= chunks_of(some->n, split.n_rows); some++) chunk -= chunks_of(some->n, split.n_rows);
            const int64_t from = some->first + chunk * split.n_rows;
            const int own = share * split.n_heads;
            const int n_rows = int(std::min<int64_t>(split.n_rows, some->first + some->n - from));
            const Sequence& sequence = pass_.sequences[some->sequence];
            const int64_t head = kv * sequence.head_stride;
            Reader<T> rows[MOST_TOGETHER];
            for (int r = 0; r < n_rows; r++) {
                const int row = row_of(list, from + r);
                const int64_t at = (from + r) * q_size + (kv * group + own) * width;
                const Run* runs = view->runs.items;
                rows[r] = {runs + view->first[row], runs + view->first[row + 1], view->oldest[row], view->n_seen[row],
                           mixed_ + at, inner_ + at, part.sinks ? (const T*)part.sinks + kv * group + own : nullptr};
            }
            attend(rows, n_rows, std::min(split.n_heads, group - own), width, part.scaling, part.softcap,
                   (const T*)sequence.keys[step.layer] + head, (const T*)sequence.values[step.layer] + head,
                   on_line(scratch[thread].items));
        });
        if (part.gated)
            each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
                along(q_size, inner_ + i * q_size, inner_ + i * q_size, [&](vf v, int at) {
                    return v * as_stored<T>(splat(1.0f) / (exp(-part_of(gates_ + i * q_size, at, q_size)) + 1.0f));
                });
            });
        norm_rows(part.inner, inner_, q_size, q_size, list.n, thread);
        leave(part.out, part.after, part.added_scale, taken(inner_, part.out, list.n, thread), list, thread);
    }

    void convolution(const Step& step, const Convolution& part, const RowList& list, int thread);
    void delta(const Step& step, const Delta& part, const RowList& list, int thread);
    void delta_head(const Step& step, const Delta& part, const RowList& list, const Part& rows, int head, int thread);
    void recall(const Delta& part, int head, const float* read, int64_t i, int total);

    // Norm of `n` values from `x` on in each row, in place; `stride` between rows.
    void norm_rows(const Norm& norm, T* x, int64_t stride, int n, int64_t rows, int thread) {
        if (norm.kind == NO_NORM) return;
        each(REST, thread, rows, 1, [&](int64_t i, int64_t) { normed(norm, x + i * stride, n, x + i * stride); });
    }

    struct Split {  // of an attention into pieces of work: `n_rows` rows by `n_heads` of a key head's query heads
        int n_rows, n_heads, n_shares;
        int64_t n;
    };

    static int64_t chunks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

    // The split that should be done first, where turning keys and values costs as much as four heads' sums.
    Split split_of(const List<Part>& parts, int n_kv_heads, int group) const {
        int64_t longest = 1;
        for (const Part& each : parts) longest = std::max(longest, each.n);
        Split best{};
        int64_t least = INT64_MAX;
        for (int n_shares = 1; n_shares <= group; n_shares++) {
            const int n_heads = (group + n_shares - 1) / n_shares;
            if (n_heads > MOST_TOGETHER || (group + n_heads - 1) / n_heads != n_shares) continue;
            for (int n_rows = 1; n_rows == 1 || (n_rows * n_heads <= MOST_TOGETHER && n_rows < 2 * longest); n_rows *= 2) {
                int64_t n = 0;
                for (const Part& each : parts) n += chunks_of(each.n, n_rows) * n_kv_heads * n_shares;
                const int64_t turns = (n + n_threads_ - 1) / n_threads_, work = turns * (n_rows * n_heads + 4);
                if (work < least) least = work, best = {n_rows, n_heads, n_shares, n};
            }
        }
        return best;
    }

    // One head: its norm, and the rotation of its first values.
    static void head_of(
        Norm norm, int32_t when, int head, const T* from, int width, const Rotation* rotation, int position, T* to) {
        norm.weight = norm.weight ? (const T*)norm.weight + head * norm.step : nullptr;
        norm.bias = norm.bias ? (const T*)norm.bias + head * norm.step : nullptr;
        T own[WIDEST_HEAD];
        if (when == BY_HEAD) normed(norm, from, width, own);
        else memcpy(own, from, width * sizeof(T));
        int rotated = 0;
        if (rotation) {
            rotated = rotation->width;
            const int64_t at = int64_t(position) * rotated;
            if (rotation->wide) turn(*rotation, own, (const float*)rotation->cos + at, (const float*)rotation->sin + at, to);
            else turn(*rotation, own, (const T*)rotation->cos + at, (const T*)rotation->sin + at, to);
        }
        memcpy(to + rotated, own + rotated, (width - rotated) * sizeof(T));
        if (when == ROTATED) normed(norm, to, width, to);
    }

    // The rotation of a head's first values. Products are rounded to the type of the tables.
    template <class C> static void turn(const Rotation& rotation, const T* x, const C* cos, const C* sin, T* to) {
        const int n = rotation.width, half = n / 2;
        if (rotation.pairs ? n % LANES == 0 : half % LANES == 0) {
            for (int d = 0; d < n; d += LANES) {
                const vf partner = rotation.pairs ? neighbours(load(x + d)) : load(x + (d < half ? d + half : d - half));
                store(to + d, as_stored<C>(load(x + d) * load(cos + d)) + as_stored<C>(partner * load(sin + d)));
            }
        } else {
            for (int d = 0; d < n; d++) {
                const T partner = x[rotation.pairs ? d ^ 1 : d < half ? d + half : d - half];
                const float turned = as_stored<C>(to_float(partner) * to_float(sin[d]));
                to[d] = rounded<T>(as_stored<C>(to_float(x[d]) * to_float(cos[d])) + turned);
            }
        }
    }

    void mlp(const Step& step, const Mlp& part, const RowList& list, int thread) {
        const Input input = enter(
            part.before, list, step.from_kept ? kept_ : (const T*)pass_.hidden, part.in, part.n_in_maps, thread);
        const int n = part.n_inner;
        const bool joint = part.n_in_maps == 1;
        each(MAPS, thread, (n + PANEL - 1) / PANEL, 1, [&](int64_t panel, int64_t) {
            const int first = int(panel) * PANEL, last = std::min(first + PANEL, n), width = last - first;
            auto& tile = tiles[thread];
            float *gate = tile.items, *up = gate + whole_sides(list.n) * PANEL;
            outputs(part.in[0], input, int(list.n), first, last, gate, PANEL, thread);
            if (part.gated) outputs(part.in[joint ? 0 : 1], input, int(list.n), first + joint * n, last + joint * n, up, PANEL, thread);
            for (int64_t r = 0; r < list.n; r++)
                gated(part, gate + r * PANEL, part.gated ? up + r * PANEL : nullptr, width, inner_ + r * n + first);
        });
        norm_rows(part.inner, inner_, n, n, list.n, thread);
        leave(part.out, part.after, part.added_scale, taken(inner_, part.out, list.n, thread), list, thread);
    }

    struct Mixed {  // sizes of the largest mixture of a pass
        int64_t n_experts = 0, n_chosen = 0, n_groups = 0;

        template <class F> void count(const Mixture& part, F&& widest) {
            const int n = part.choosing.n_experts + part.has_shared;
            for (int e = 0; e < n; e++) {
                for (int i = 0; i < part.n_in_maps; i++) widest(part.in[e * part.n_in_maps + i]);
                widest(part.out[e]);
            }
            n_experts = std::max<int64_t>(n_experts, n), n_groups = std::max<int64_t>(n_groups, part.choosing.n_groups);
            n_chosen = std::max<int64_t>(n_chosen, part.choosing.n_chosen + part.has_shared);
        }
    };

    struct Share {  // of a pass: the rows of one expert, which lie together from place `first` on
        int32_t expert, n;
        int64_t first;
    };

    // Memory for the rows of experts: each row once for each expert that it takes. An expert's rows begin where a tile does.
    void take_room(const Mixed& mixed, int64_t rows, int64_t wide, bool packed, bool ordered) {
        const int64_t n_places = rows * mixed.n_chosen + mixed.n_experts * (whole_sides(1) - 1);
        scores_ = (float*)arena.take(rows * 2 * (mixed.n_experts + mixed.n_groups) * sizeof(float));
        choices_ = (Choice*)arena.take(rows * mixed.n_chosen * sizeof(Choice));
        places_of_ = (int64_t*)arena.take(rows * mixed.n_chosen * sizeof(int64_t));
        source_ = (int32_t*)arena.take(n_places * sizeof(int32_t));
        inner_of_ = (T*)arena.take(n_places * wide * sizeof(T));
        out_of_ = (T*)arena.take(n_places * pass_.n_hidden * sizeof(T));
        taken_ = {(T*)arena.take(n_places * wide * sizeof(T)), {}, nullptr, nullptr};
        if (TILES) taken_.turned = (T*)arena.take(n_places * wide * sizeof(T));
        if (ordered) taken_.ordered = (T*)arena.take(n_places * wide * sizeof(T));
        if (packed) {
            const int64_t groups = wide / FINEST + 1;
            taken_.codes.codes = (int8_t*)arena.take(n_places * wide);
            taken_.codes.scales = (float*)arena.take(n_places * groups * sizeof(float));
            taken_.codes.sums = (float*)arena.take(n_places * groups * sizeof(float));
            taken_.codes.halves = (float*)arena.take(2 * n_places * groups * sizeof(float));
        }
        shares_.clear();
        wide_ = wide;
    }

    // The rows of an expert, which lie from `rows` on in the order of their places, as an input of one of its maps.
    Input input_of(T* rows, const Share& share) const {
        const int64_t at = share.first * wide_, groups = share.first * (wide_ / FINEST + 1);
        Input own{rows + at, {}, nullptr, nullptr};
        own.codes.codes = taken_.codes.codes + at, own.codes.scales = taken_.codes.scales + groups;
        own.codes.sums = taken_.codes.sums + groups, own.codes.halves = taken_.codes.halves + 2 * groups;
        own.ordered = taken_.ordered + at, own.turned = taken_.turned + at;
        return own;
    }

    // Prepare the rows that experts read by their maps `map_of(share)`: codes, or turned for tiles.
    template <class F> void prepare_shares(T* rows, int thread, F&& map_of) {
        each(REST, thread, shares_.n, 1, [&](int64_t s, int64_t) {
            const Share& share = shares_[s];
            const Map& map = map_of(share);
            const Input own = input_of(rows, share);
            if (map.scales) {
                for (int r = 0; r < share.n; r++) round_into(own, own.rows + int64_t(r) * map.n_in, map, r);
                return;
            }
#if defined(WITH_TILES)
            if constexpr (TILES) {
                const int k = map.n_in, whole = whole_tiles(k);
                for (int row = 0; row < share.n; row += SIDE)
                    turn_rows(own.rows + int64_t(row) * k, k, std::min<int>(SIDE, share.n - row), k, 0, whole,
                              own.turned + int64_t(row) * whole);
            }
#endif
        });
    }

    void mixture(const Step& step, const Mixture& part, const RowList& list, int thread) {
        const int n_hidden = pass_.n_hidden, n = part.choosing.n_experts, all = n + part.has_shared;
        const int n_chosen = part.choosing.n_chosen + part.has_shared, room = 2 * (all + part.choosing.n_groups);
        const T* from = step.from_kept ? kept_ : (const T*)pass_.hidden;
        T* rows = inputs_.last().rows;
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            normed(part.before, from + int64_t(row_of(list, i)) * n_hidden, n_hidden, rows + i * n_hidden);
        });
        constexpr int TOGETHER = 16;  // experts
        const int n_blocks = (all + TOGETHER - 1) / TOGETHER;
        each(REST, thread, list.n * n_blocks, 1, [&](int64_t item, int64_t) {
            const int64_t i = item / n_blocks;
            const T* x = rows + i * n_hidden;
            const int first = int(item % n_blocks) * TOGETHER, last = std::min(all, first + TOGETHER);
            for (int e = first; e < last; e++) {
                float score = 0;
                if (e == n) score = part.shared_gate ? dot(x, (const T*)part.shared_gate, n_hidden) : 0;
                else if (part.wide_router) score = dot(x, (const float*)part.router + int64_t(e) * n_hidden, n_hidden);
                else score = dot(x, (const T*)part.router + int64_t(e) * n_hidden, n_hidden);
                if (e < n && part.router_bias) score += part.router_bias[e];
                scores_[i * room + e] = part.rounded_logits ? as_stored<T>(score) : score;
            }
        });
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            float* scores = scores_ + i * room;
            Choice* choices = choices_ + i * n_chosen;
            const float shared = scores[n];
            choose(part.choosing, scores, part.correction, scores + all, scores + 2 * all, choices);
            if (part.has_shared)
                choices[n_chosen - 1] = {n, part.shared_gate ? sigmoid_of(shared) : part.shared_scale};
        });
        each(REST, thread, 1, 1, [&](int64_t, int64_t) {
            share_out(list.n, n_chosen, all);
            if (pass_.experts) count(list, n_chosen, part.has_shared);
        });
        each(REST, thread, shares_.n, 1, [&](int64_t s, int64_t) {
            const Share& share = shares_[s];
            T* own = input_of(taken_.rows, share).rows;
            for (int r = 0; r < share.n; r++)
                memcpy(own + int64_t(r) * n_hidden, rows + int64_t(source_[share.first + r]) * n_hidden, n_hidden * sizeof(T));
        });
        auto in_of = [&](const Share& share) -> const Map& { return part.in[share.expert * part.n_in_maps]; };
        auto out_of = [&](const Share& share) -> const Map& { return part.out[share.expert]; };
        prepare_shares(taken_.rows, thread, in_of);
        const int most_inner = std::max(part.n_inner, part.n_shared_inner);
        const int64_t panels = (most_inner + PANEL - 1) / PANEL;
        const bool joint = part.n_in_maps == 1;
        const int64_t out_panels = (n_hidden + PANEL - 1) / PANEL, n_items = shares_.n * panels;
        // Where the thread of an item goes on, if all are as fast: at another expert's map at times.
        auto onward_in = [&](int64_t item, int half) -> Output {
            if (item >= n_items) return {&out_of(shares_[0]), int(item - n_items) * PANEL};
            const Share& share = shares_[item / panels];
            const int first = int(item % panels) * PANEL;
            return joint ? Output{&in_of(share), first + half * out_of(share).n_in} : Output{&in_of(share) + half, first};
        };
        auto onward_out = [&](int64_t item) -> Output {
            return {&out_of(shares_[std::min<int64_t>(item / out_panels, int64_t(shares_.n) - 1)]), int(item % out_panels) * PANEL};
        };
        each(MAPS, thread, n_items, 1, [&](int64_t item, int64_t) {
            const Share& share = shares_[item / panels];
            const int inner = out_of(share).n_in, first = int(item % panels) * PANEL, last = std::min(first + PANEL, inner);
            if (first >= inner) return;
            const Map* maps = &in_of(share);
            const Input input = input_of(taken_.rows, share);
            T* to = input_of(inner_of_, share).rows + first;
            auto& tile = tiles[thread];
            float *gate = tile.items, *up = gate + whole_sides(share.n) * PANEL;
            const int64_t next = item + n_threads_;
            outputs(maps[0], input, share.n, first, last, gate, PANEL, thread, onward_in(next, 0));
            outputs(maps[joint ? 0 : 1], input, share.n, first + joint * inner, last + joint * inner, up, PANEL, thread,
                    onward_in(next, 1));
            for (int r = 0; r < share.n; r++)
                gated(part.mlp, gate + r * PANEL, up + r * PANEL, last - first, to + int64_t(r) * inner);
        });
        prepare_shares(inner_of_, thread, out_of);
        each(MAPS, thread, shares_.n * out_panels, 1, [&](int64_t item, int64_t) {
            const Share& share = shares_[item / out_panels];
            const int first = int(item % out_panels) * PANEL, last = std::min(first + PANEL, n_hidden);
            const Input input = input_of(inner_of_, share);
            auto& tile = tiles[thread];
            outputs(out_of(share), input, share.n, first, last, tile.items, PANEL, thread, onward_out(item + n_threads_));
            for (int r = 0; r < share.n; r++)
                round_to(out_of_ + (share.first + r) * n_hidden + first, tile.items + r * PANEL, last - first);
        });
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) { gather(part, list, i, n_chosen); });
    }

    static float sigmoid_of(float x) { return as_stored<T>(1.0f / (1.0f + std::exp(-as_stored<T>(x)))); }

    // Add what a row's experts give, in their order.
    void gather(const Mixture& part, const RowList& list, int64_t i, int n_chosen) {
        const int n = pass_.n_hidden;
        T* delta = inputs_.last().rows + i * n;
        const Choice* choices = choices_ + i * n_chosen;
        const int64_t* places = places_of_ + i * n_chosen;
        for (int at = 0; at < n; at += LANES) {
            vf total = {};
            for (int c = 0; c < n_chosen; c++) total += part_of(out_of_ + places[c] * n, at, n) * choices[c].weight;
            T last_ones[LANES];
            store(last_ones, total);
            memcpy(delta + at, last_ones, std::min(LANES, n - at) * sizeof(T));
        }
        add(part.after, part.added_scale, list, i);
    }

    void count(const RowList& list, int n_chosen, int n_shared) const {
        ExpertCounts& counts = *pass_.experts;
        const int n = n_chosen - n_shared;
        counts.mixtures++, counts.distinct += shares_.n - n_shared;
        for (int64_t i = 1; i < list.n; i++) {
            if (places_[row_of(list, i)].sequence != places_[row_of(list, i - 1)].sequence) continue;
            counts.taken += n, counts.repeated += common(choices_ + (i - 1) * n_chosen, choices_ + i * n_chosen, n);
        }
    }

    // List which rows each expert computes, experts in ascending order.
    void share_out(int64_t n_rows, int n_chosen, int n_experts) {
        int64_t counts[MOST_EXPERTS + 1] = {};
        for (int64_t i = 0; i < n_rows * n_chosen; i++) counts[choices_[i].expert]++;
        shares_.clear();
        int64_t first = 0;
        for (int e = 0; e < n_experts; e++) {
            const int64_t n = counts[e];
            counts[e] = first;
            if (n == 0) continue;
            shares_.add({e, int32_t(n), first});
            first += whole_sides(n);
        }
        for (int64_t i = 0; i < n_rows * n_chosen; i++) {
            places_of_[i] = counts[choices_[i].expert]++;
            source_[places_of_[i]] = int32_t(i / n_chosen);
        }
    }

    // The activation of `n` values, times what stands beside them.
    static void gated(const Mlp& mlp, const float* gate, const float* up, int n, T* to) {
        for (int at = 0; at < n; at += LANES) {
            vf a = as_stored<T>(activated(as_stored<T>(part_of(gate, at, n)), mlp));
            if (up) {
                vf beside = as_stored<T>(part_of(up, at, n));
                if (mlp.activation == CLAMPED)  // gpt-oss: one more than the other half, bounded
                    beside = as_stored<T>(smaller(larger(beside, splat(-mlp.curve[0])), splat(mlp.curve[0])) + 1.0f);
                a = a * beside;
            }
            if (at + LANES <= n) {
                store(to + at, a);
            } else {
                T last_ones[LANES];
                store(last_ones, a);
                memcpy(to + at, last_ones, (n - at) * sizeof(T));
            }
        }
    }

    void logits(const Map& map, const RowList& list, int thread) {
        const Norm none{};
        const Input input = enter(pass_.norm ? *pass_.norm : none, list, (const T*)pass_.hidden, &map, 1, thread);
        T* out = (T*)pass_.logits;
        linear(map, input, list.n, thread, [&](int row, int first, int n_out, const float* values) {
            round_to(out + int64_t(row) * map.n_out + first, values, n_out);
        });
    }

    const Pass& pass_;
    const Step* steps_;
    const int n_steps_;
    int n_threads_ = 1;
    T *inner_, *mixed_, *kept_;
    T *gates_, *updates_;  // of gated heads; what recurrent layers' updates are made of
    float* scores_;        // of experts: each row's, and room to choose by them
    Choice* choices_;      // of each row
    int64_t* places_of_;   // of each choice: where the row lies among those of its expert
    int32_t* source_;      // row at each place
    T *inner_of_, *out_of_;  // of experts' rows
    Input taken_;          // what experts read
    int64_t wide_;         // values between places, enough for the widest input
    static inline List<View> views_;
    static inline List<Place> places_;       // of each row
    static inline List<List<Part>> parts_;   // of each list
    static inline List<Input> inputs_;
    static inline List<Share> shares_;
    static inline Arena arena;
    static inline List<List<float>> tiles, scratch;  // per thread
    static inline List<List<int32_t>> paths;         // slots of a row and of the one before it, per thread
};

#include "mixers.h"

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
    sizes[8] = sizeof(Mixture), sizes[9] = sizeof(Convolution), sizes[10] = sizeof(Delta);
}
