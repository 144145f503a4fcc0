// Runs the steps of a pass on a team of threads, and owns their memory. `maps.h` has linear maps, which all layers use;
// `attention_layer.h`, `mixers.h` and `mlps.h` have the layers.
#pragma once
#include <ctime>
#include "attention.h"
#include "elementwise.h"
#include "quantised.h"
#include "team.h"

namespace {

Team team;

inline int64_t chunks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Round an address up to a cache line: a store across two lines takes twice as long.
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
        const size_t rows = std::max<size_t>(1, pass.n_rows + n_earlier());
        size_t wide = 1, inner = 1, head = 0, heads = 0, queries = 0, gates = 0, updates = 0, keys = 0, state = 0, path = 0;
        size_t low = 0, steps_of_row = 0, decoded = 0;
        bool packed = false, ordered = false, keeps = false;
        Mixed mixed;  // the sizes of the largest mixture
        auto widest = [&](const Map& map) {
            wide = std::max<size_t>(wide, map.n_in);
            packed |= map.scales != nullptr, ordered |= map.order != nullptr;
        };
        for (int s = 0; s < n_steps; s++) {
            if (steps[s].kind == ATTENTION) {
                const auto& part = *(const Attention*)steps[s].part;
                size_t total = 0;
                for (int i = 0; i < part.n_projections; i++) widest(part.projections[i]), total += part.projections[i].n_out;
                widest(part.out), inner = std::max<size_t>({inner, total, size_t(part.n_heads) * part.width});
                if (part.head_norm == LATENT) {
                    widest(part.of_queries), widest(*part.of_keys), widest(*part.of_values);
                    heads = std::max<size_t>(heads, (part.n_heads + 1) * part.width);
                    mixed.count_heads(part, whole_sides(rows));
                }
                if (part.gated) gates = std::max<size_t>(gates, part.n_heads * part.width);
                head = std::max<size_t>(head, part.width), queries = std::max<size_t>(queries, part.n_heads * part.width);
                look_once(steps[s].window);
            } else if (steps[s].kind == MLP) {
                const auto& part = *(const Mlp*)steps[s].part;
                for (int i = 0; i < part.n_in_maps; i++) widest(part.in[i]);
                widest(part.out), inner = std::max<size_t>(inner, part.n_inner);
            } else if (steps[s].kind == LAYER_END) {
                const auto& part = *(const LayerEnd*)steps[s].part;
                if (part.gate.n_out) widest(part.gate), widest(part.out), inner = std::max<size_t>(inner, part.gate.n_out);
            } else if (steps[s].kind == LAYER_INPUTS) {
                const auto& part = *(const LayerInputs*)steps[s].part;
                widest(part.map), inner = std::max<size_t>(inner, part.map.n_out);
            } else if (steps[s].kind == LOGITS) {
                widest(*(const Map*)steps[s].part);
            } else if (steps[s].kind == MIXTURE) {
                mixed.count(*(const Mixture*)steps[s].part, widest);
            } else if (steps[s].kind == CONVOLUTION) {
                const auto& part = *(const Convolution*)steps[s].part;
                widest(part.into), widest(part.out), inner = std::max<size_t>(inner, part.into.n_out);
            } else if (steps[s].kind == RECURRENCE) {
                const auto& part = *(const Recurrence*)steps[s].part;
                size_t total = 0;
                for (int i = 0; i < part.n_projections; i++) widest(part.projections[i]), total += part.projections[i].n_out;
                widest(part.out), inner = std::max(inner, total), updates = std::max<size_t>(updates, part.n_inputs());
                keys = std::max<size_t>(keys, part.n_keys());
                if (part.codes_values(pass.is_bf16)) decoded = std::max<size_t>(decoded, n_decoded(steps[s], part) * part.n_inputs());
                if (!part.convolves_keys) {
                    widest(part.low), widest(part.steps), low = std::max<size_t>(low, part.low.n_out);
                    steps_of_row = std::max<size_t>(steps_of_row, part.steps.n_out);
                }
                state = std::max<size_t>(state, (part.key_width + 1) * (part.value_width + LANES));
            } else {
                keeps = true;
            }
        }
        wide = std::max<size_t>(wide, pass.n_hidden) + 128;  // packed maps read whole groups of inputs
        part_lists();
        arena.pieces.clear(), inputs_.clear();
        inner_ = (T*)arena.take(rows * inner * sizeof(T));
        mixed_ = (T*)arena.take(rows * std::max(wide, queries) * sizeof(T));
        heads_ = (T*)arena.take(rows * heads * sizeof(T));
        gates_ = (T*)arena.take(rows * gates * sizeof(T));
        updates_ = (T*)arena.take(rows * updates * sizeof(T));
        decoded_ = (T*)arena.take(decoded * sizeof(T));
        low_ = (T*)arena.take(2 * rows * low * sizeof(T));
        value_steps_ = (T*)arena.take(rows * steps_of_row * sizeof(T));
        keys_ = (float*)arena.take(rows * keys * sizeof(float));
        for (int s = 0; state && s < pass.n_sequences; s++)
            path = std::max<size_t>(path, pass.sequences[s].n_rows + pass.sequences[s].n_kept + 1);
        kept_ = keeps ? (T*)arena.take(rows * pass.n_hidden * sizeof(T)) : nullptr;
        n_threads_ = std::min(std::max(1, pass.n_threads), Team::most);
        // Threads share the last input. For few rows each thread prepares an input of its own, so that none has to wait.
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
        if (mixed.n_experts || mixed.of_heads) take_room(mixed, int64_t(rows), wide, packed, ordered);
        tiles.clear(), scratch.clear(), paths.clear();
        for (int i = 0; i < n_threads_; i++) {  // reserved here, because threads cannot report that memory ran out
            tiles.add().reserve(2 * (whole_sides(rows) * PANEL + OUTPUTS));
            const int64_t spread = packed ? SPREAD_ROOM / int64_t(sizeof(float)) : 0;
            scratch.add().reserve(std::max({scratch_of(head), spread, int64_t(state)}) + 64 / sizeof(float));
            paths.add().reserve(2 * path);
        }
        team.run(n_threads_, [](void* self, int thread) { ((Runner*)self)->all(thread); }, this);
    }

  private:
    static constexpr int PANEL = 64;  // outputs that a thread takes at a time; twice as many for many rows
    static constexpr int FEW = 4;     // each thread prepares up to so many rows itself, faster than it would wait for another
    static constexpr int ROWS_ADDED = 16;  // up to so many rows, a mixture's outputs are added panel by panel
#if defined(WITH_TILES)
    static constexpr bool TILES = sizeof(T) == sizeof(bf16);  // whether tile instructions multiply weights of type T
    static int64_t whole_sides(int64_t rows) { return (rows + SIDE - 1) / SIDE * SIDE; }  // tiles read and write SIDE rows
#else
    static constexpr bool TILES = false;
    static int64_t whole_sides(int64_t rows) { return rows; }
#endif

    struct Input {  // the input of a linear map: rows, and their codes if the map is packed
        T* rows;
        Rounded codes;
        T* ordered;  // rows in the order of a map's codes, if its inputs are permuted
        T* turned;   // rows in the layout of `tile_products`
    };

    // The most rows before the pass whose steps a recurrent layer computes again (Mamba-1).
    int64_t n_earlier() const {
        int64_t most = 0;
        for (int s = 0; s < n_steps_; s++) {
            if (steps_[s].kind != RECURRENCE || ((const Recurrence*)steps_[s].part)->convolves_keys) continue;
            int64_t n = 0;
            for (int i = 0; i < pass_.n_sequences; i++)
                n += n_earlier(steps_[s], pass_.sequences[i]);
            most = std::max(most, n);
        }
        return most;
    }
    static int64_t n_earlier(const Step& step, const Sequence& sequence) {  // those of one sequence
        return std::max<int64_t>(0, sequence.first_slot - oldest(step, sequence));
    }

    // The first slot whose kept inputs a row's convolution may read, and the number of such slots before the pass.
    static int64_t first_decoded(const Step& step, const Recurrence& part, const Sequence& sequence) {
        return std::max<int64_t>(0, oldest(step, sequence) - part.n_taps + 1);
    }
    static int64_t n_decoded(const Step& step, const Recurrence& part, const Sequence& sequence) {
        return std::max<int64_t>(0, sequence.first_slot - first_decoded(step, part, sequence));
    }
    int64_t n_decoded(const Step& step, const Recurrence& part) const {  // those of all sequences
        int64_t n = 0;
        for (int i = 0; i < pass_.n_sequences; i++) n += n_decoded(step, part, pass_.sequences[i]);
        return n;
    }

    // The first slot that a sequence's oldest state in a layer does not include.
    static int64_t oldest(const Step& step, const Sequence& sequence) {
        const int32_t* roots = sequence.roots + 2 * step.layer;
        return sequence.lag ? std::min(roots[0], roots[1]) : roots[0];
    }

    // Compute what rows see through a window, once per window size.
    void look_once(int window) {
        for (auto& view : views_)
            if (view.window == window) return;
        View& view = views_.add();
        view.begin(window);
        int first = 0;
        for (int s = 0; s < pass_.n_sequences; first += pass_.sequences[s++].n_rows) {
            const Sequence& sequence = pass_.sequences[s];
            look(view, sequence.n_rows, sequence.first_slot, pass_.positions + first, sequence.visible);
        }
        view.first.add(int32_t(view.runs.n));
    }

    // Record each row's sequence and slot, and split each list into parts of one sequence.
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
            if (step.kind == RECURRENCE) recurrence(step, *(const Recurrence*)step.part, list, thread);
            if (step.kind == CONVOLUTION) convolution(step, *(const Convolution*)step.part, list, thread);
            if (step.kind == LAYER_END) layer_end(step, *(const LayerEnd*)step.part, list, thread);
            if (step.kind == LAYER_INPUTS) layer_inputs(*(const LayerInputs*)step.part, list, thread);
            if (step.kind == KEEP)
                team.each(pass_.n_rows, 16, [&](int64_t from, int64_t to) {
                    memcpy(kept_ + from * pass_.n_hidden, hidden(int(from)), (to - from) * pass_.n_hidden * sizeof(T));
                });
        }
    }

    struct Place {  // where a row's key and value are
        int sequence, slot;
    };
    struct Part {  // rows first … first + n - 1 of a list, all of one sequence
        int64_t first, n;
        int sequence;
    };

    // Distribute work over the threads, and add up its time by kind if the pass asks for it. `last` runs on one thread when
    // all work is done, before any thread continues.
    template <class F, class G> void each(Work work, int thread, int64_t n, int64_t piece, F&& body, G&& last) const {
        if (thread || !pass_.seconds) return team.each(n, piece, body, last);
        const double start = clock_s();
        team.each(n, piece, body, last);
        pass_.seconds[work] += clock_s() - start;
    }
    template <class F> void each(Work work, int thread, int64_t n, int64_t piece, F&& body) const {
        each(work, thread, n, piece, body, [] {});
    }

    T* hidden(int row) const { return (T*)pass_.hidden + int64_t(row) * pass_.n_hidden; }
    static int row_of(const RowList& list, int64_t i) { return list.rows ? list.rows[i] : int(i); }

    // Prepare an input of n rows by `make(input, row)`.
    template <class F> Input prepared(int64_t n, int thread, F&& make) {
        if (n <= FEW) {
            for (int64_t i = 0; i < n; i++) make(inputs_[thread], i);
            return inputs_[thread];
        }
        each(REST, thread, n, 1, [&](int64_t i, int64_t) { make(inputs_.last(), i); });
        return inputs_.last();
    }

    struct Output {  // an output of a map
        const Map* map;
        int number;
    };

    // Normalise, in place, the n values from `x` on in each row; `stride` is the distance between rows.
    void norm_rows(const Norm& norm, T* x, int64_t stride, int n, int64_t rows, int thread) {
        if (norm.kind == NO_NORM) return;
        each(REST, thread, rows, 1, [&](int64_t i, int64_t) { normed(norm, x + i * stride, n, x + i * stride); });
    }

    struct Split {  // of attention into n pieces of work: n_rows rows, and n_heads of the query heads of a key head
        int n_rows, n_heads, n_shares;
        int64_t n;
    };

    struct Mixed {  // sizes of the largest mixture of a pass, and of latent attention, whose heads are computed like experts
        int64_t n_experts = 0, n_chosen = 0, n_groups = 0;
        bool own_norms = false;  // whether the router and shared experts have norms of their own
        int64_t n_heads = 0, of_heads = 0;  // heads of latent attention, and values in the rows of one head
        void count_heads(const Attention& part, int64_t n_rows) {
            of_heads = std::max(of_heads, n_rows * part.room());
            n_heads = std::max<int64_t>(n_heads, part.n_heads);
        }

        template <class F> void count(const Mixture& part, F&& widest) {
            widest(part.widest);
            n_experts = std::max<int64_t>(n_experts, part.choosing.n_experts + part.has_shared);
            n_groups = std::max<int64_t>(n_groups, part.choosing.n_groups);
            n_chosen = std::max<int64_t>(n_chosen, part.choosing.n_chosen + part.has_shared);
            own_norms |= part.own_norms();
        }
    };

    struct Share {  // n rows of one expert, or of one head, which are together from place `first` on
        int32_t expert, n;
        int64_t first;
    };

    Input enter(const Norm& norm, const RowList& list, const T* from, const Map* maps, int n_maps, int thread);
    Input taken(T* rows, const Map& map, int64_t n, int thread);
    Input turned(Input input, const Map& map, int64_t n, int thread);
    static void round_into(const Input& input, const T* x, const Map& map, int64_t row);
    void outputs(
        const Map& map, const Input& x, int rows, int first, int last, float* c, int64_t ldc, int thread,
        Output next = {}) const;
    static Onward onward_to(const Output& next);
    template <class F> void linear(const Map& map, const Input& x, int64_t rows, int thread, F&& sink);
    void leave(const Map& map, const Norm& norm, float scale, const Input& x, const RowList& list, int thread);
    void add(const Norm& norm, float scale, const RowList& list, int64_t i);
    int project(const Map* maps, int n_maps, const Input& input, const RowList& list, int thread);
    void logits(const Map& map, const RowList& list, int thread);

    void attention(const Step& step, const Attention& part, const RowList& list, int thread);
    int make_heads(const Attention& part, int total, const RowList& list, int thread);
    void read_values(const Attention& part, int64_t n, int thread);
    template <class F> void map_heads(const Map* maps, int64_t n, int thread, F&& sink);
    Split split_of(const List<Part>& parts, int n_kv_heads, int group) const;

    void convolution(const Step& step, const Convolution& part, const RowList& list, int thread);
    void recurrence(const Step& step, const Recurrence& part, const RowList& list, int thread);
    void select(const Step& step, const Recurrence& part, const RowList& list, int thread);
    int tail_of(const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t i, const T** last) const;
    int64_t index_of(const RowList& list, const Part& rows, int64_t slot) const;
    const T* inputs_at(const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t slot) const;
    void decode(const Step& step, const Recurrence& part, int64_t i);
    void keep(const Recurrence& part, const T* inputs, T* to) const;
    const T* value_steps(const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t slot) const;
    void share_keys(const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t i, int key_head);
    void take_head(const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int head, int thread);
    void recall(const Recurrence& part, int head, const float* read, int64_t i, int total);
    void gate(const Recurrence& part, int group, int64_t i, int total);

    void layer_end(const Step& step, const LayerEnd& part, const RowList& list, int thread);
    void layer_inputs(const LayerInputs& part, const RowList& list, int thread);

    void mlp(const Step& step, const Mlp& part, const RowList& list, int thread);
    void mixture(const Step& step, const Mixture& part, const RowList& list, int thread);
    void take_room(const Mixed& mixed, int64_t rows, int64_t wide, bool packed, bool ordered);
    Input input_of(T* rows, const Share& share) const;
    void choose_experts(const Mixture& part, int64_t i) const;
    bool reads_row(const Mixture& part, const Share& share) const;
    void bring_rows(const Mixture& part, const Share& share, const Input& rows) const;
    void prepare(const Input& input, const Share& share, const Map& map) const;
    void add_up(const Mixture& part, const RowList& list, int64_t i, int first, int last);
    void count(const RowList& list, int n_chosen, int n_shared) const;
    void share_out(const Mixture& part, int64_t n_rows);

    const Pass& pass_;
    const Step* steps_;
    const int n_steps_;
    int n_threads_ = 1;
    T *inner_, *mixed_, *kept_;
    T* heads_;             // queries and keys of latent attention
    T *gates_, *updates_;  // gates of gated heads; inputs of recurrent layers' updates
    T* decoded_;           // inputs of rows before those of the pass, of layers that keep them in codes
    T* low_;               // of Mamba-1: each row's step of low rank, key and query; then the normed step
    T* value_steps_;       // of Mamba-1: a step for each value, of the pass's rows and then of those before them
    float* keys_;          // queries and keys of a prompt's rows in a recurrent layer, prepared once for heads that share them
    T *router_rows_, *shared_rows_;  // the inputs of router and shared experts that have norms of their own
    float* scores_;        // each row's scores of experts, and room to choose by them
    Choice* choices_;      // the experts of each row
    int64_t* places_of_;   // for each choice, the row's place among those of its expert
    int32_t* source_;      // the row at each place
    T *inner_of_, *out_of_;  // experts' inner values and outputs
    Input taken_;          // the input of experts
    int64_t wide_;         // values between places, enough for the widest input
    int64_t n_apart_;      // experts whose rows are copied to consecutive places
    std::atomic<int32_t>*done_;  // finished panels of each expert's first maps, then finished experts of each panel of outputs
    static inline List<View> views_;
    static inline List<Place> places_;       // by row
    static inline List<List<Part>> parts_;   // by list
    static inline List<Input> inputs_;
    static inline List<Share> shares_;
    static inline Arena arena;
    static inline List<List<float>> tiles, scratch;  // per thread
    static inline List<List<int32_t>> paths;         // slots that a row and the one before it see, per thread
};

}  // namespace
