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

inline int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Round an address up to a cache line: a store across two lines takes twice as long.
template <class P> P* cache_aligned(P* from) { return (P*)((uintptr_t(from) + 63) / 64 * 64); }

struct Arena {  // pieces of memory for one pass
    List<List<char>> blocks;

    void* allocate(size_t bytes) {
        List<char>& piece = blocks.add();
        piece.reserve(bytes + 64);
        return cache_aligned(piece.items);
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
        views_.clear(), places_.clear(), segments_.clear();
        const size_t rows = std::max<size_t>(1, pass.n_rows + n_earlier());
        size_t wide = 1, inner = 1, head = 0, heads = 0, queries = 0, gates = 0, updates = 0, keys = 0, state = 0, path = 0;
        size_t low = 0, steps_of_row = 0, decoded = 0;
        bool packed = false, ordered = false, saves = false;
        MixtureSizes sizes;  // the sizes of the largest mixture
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
                    widest(part.query_map), widest(*part.key_maps), widest(*part.value_maps);
                    heads = std::max<size_t>(heads, (part.n_heads + 1) * part.width);
                    sizes.count_heads(part, whole_sides(rows));
                }
                if (part.gated) gates = std::max<size_t>(gates, part.n_heads * part.width);
                head = std::max<size_t>(head, part.width), queries = std::max<size_t>(queries, part.n_heads * part.width);
                add_view(steps[s].window);
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
                sizes.count(*(const Mixture*)steps[s].part, widest);
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
                saves = true;
            }
        }
        wide = std::max<size_t>(wide, pass.n_hidden) + 128;  // packed maps read whole groups of inputs
        split_lists();
        arena.blocks.clear(), inputs_.clear();
        inner_ = (T*)arena.allocate(rows * inner * sizeof(T));
        mixed_ = (T*)arena.allocate(rows * std::max(wide, queries) * sizeof(T));
        heads_ = (T*)arena.allocate(rows * heads * sizeof(T));
        gates_ = (T*)arena.allocate(rows * gates * sizeof(T));
        updates_ = (T*)arena.allocate(rows * updates * sizeof(T));
        decoded_ = (T*)arena.allocate(decoded * sizeof(T));
        low_ = (T*)arena.allocate(2 * rows * low * sizeof(T));
        value_steps_ = (T*)arena.allocate(rows * steps_of_row * sizeof(T));
        keys_ = (float*)arena.allocate(rows * keys * sizeof(float));
        for (int s = 0; state && s < pass.n_sequences; s++)
            path = std::max<size_t>(path, pass.sequences[s].n_rows + pass.sequences[s].n_kept + 1);
        saved_ = saves ? (T*)arena.allocate(rows * pass.n_hidden * sizeof(T)) : nullptr;
        n_threads_ = std::min(std::max(1, pass.n_threads), Team::max_threads);
        // Threads share the last input. For few rows each thread has a separate input, so that no thread waits for another.
        for (int i = 0; i <= n_threads_; i++) {
            const size_t n = i < n_threads_ ? std::min<size_t>(rows, FEW_ROWS) : rows;
            Input input{(T*)arena.allocate(n * wide * sizeof(T)), {}, nullptr, nullptr};
            if (TILES) input.tiled = (T*)arena.allocate(whole_sides(n) * wide * sizeof(T));
            if (ordered) input.ordered = (T*)arena.allocate(n * wide * sizeof(T));
            if (packed) {
                const size_t whole = whole_sides(n);
                input.codes.codes = (int8_t*)arena.allocate(whole * wide);
                input.codes.scales = (float*)arena.allocate(whole * (wide / MIN_GROUP + 1) * sizeof(float));
                input.codes.sums = (float*)arena.allocate(whole * (wide / MIN_GROUP + 1) * sizeof(float));
                input.codes.halves = (float*)arena.allocate(2 * whole * (wide / MIN_GROUP + 1) * sizeof(float));
            }
            inputs_.add(input);
        }
        if (sizes.n_experts || sizes.head_values) allocate_experts(sizes, int64_t(rows), wide, packed, ordered);
        tiles.clear(), scratch.clear(), paths.clear();
        for (int i = 0; i < n_threads_; i++) {  // reserved here, because threads cannot report that memory ran out
            tiles.add().reserve(2 * (whole_sides(rows) * PANEL + OUTPUTS));
            const int64_t unpacked = packed ? UNPACKED_BYTES / int64_t(sizeof(float)) : 0;
            scratch.add().reserve(std::max({scratch_of(head), unpacked, int64_t(state)}) + 64 / sizeof(float));
            paths.add().reserve(2 * path);
        }
        team.run(n_threads_, [](void* self, int thread) { ((Runner*)self)->run_steps(thread); }, this);
    }

  private:
    static constexpr int PANEL = 64;  // outputs that a thread computes at a time; twice as many for many rows
    static constexpr int FEW_ROWS = 4;  // up to so many rows, each thread prepares all of them: that is faster than waiting
    static constexpr int MAX_ROWS_ADDED = 16;  // up to so many rows, a mixture's outputs are added up panel by panel
#if defined(WITH_TILES)
    static constexpr bool TILES = sizeof(T) == sizeof(bf16);  // whether tile instructions multiply weights of type T
    static int64_t whole_sides(int64_t rows) { return (rows + SIDE - 1) / SIDE * SIDE; }  // tiles read and write SIDE rows
#else
    static constexpr bool TILES = false;
    static int64_t whole_sides(int64_t rows) { return rows; }
#endif

    struct Input {  // the input of a linear map: rows, and their codes if the map is packed
        T* rows;
        ActivationCodes codes;
        T* ordered;  // rows in the order of a map's codes, if its inputs are permuted
        T* tiled;   // rows in the layout of `tile_products`
    };

    // The largest number of rows before the pass whose steps a recurrent layer computes again (Mamba-1).
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

    // The first slot whose stored inputs a row's convolution may read, and the number of such slots before the pass.
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

    // Compute which slots rows see through a window, once per window size.
    void add_view(int window) {
        for (auto& view : views_)
            if (view.window == window) return;
        View& view = views_.add();
        view.reset(window);
        int first = 0;
        for (int s = 0; s < pass_.n_sequences; first += pass_.sequences[s++].n_rows) {
            const Sequence& sequence = pass_.sequences[s];
            add_rows(view, sequence.n_rows, sequence.first_slot, pass_.positions + first, sequence.visible);
        }
        view.first.add(int32_t(view.runs.n));
    }

    // Record each row's sequence and slot, and split each list into segments of one sequence.
    void split_lists() {
        if (pass_.n_sequences == 0) return;  // no attention
        for (int s = 0; s < pass_.n_sequences; s++) {
            for (int row = 0; row < pass_.sequences[s].n_rows; row++) places_.add({s, pass_.sequences[s].first_slot + row});
        }
        for (int l = 0; l < pass_.n_lists; l++) {
            const RowList& list = pass_.lists[l];
            List<Segment>& segments = segments_.add();
            segments.clear();
            for (int64_t i = 0; i < list.n; i++) {
                const int s = places_[row_of(list, i)].sequence;
                if (segments.n == 0 || segments.last().sequence != s) segments.add({i, 0, s});
                segments.last().n++;
            }
        }
    }

    void run_steps(int thread) {
        TileConfig tile_config;
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
            if (step.kind == SAVE)
                team.parallel_for(pass_.n_rows, 16, [&](int64_t from, int64_t to) {
                    memcpy(saved_ + from * pass_.n_hidden, hidden(int(from)), (to - from) * pass_.n_hidden * sizeof(T));
                });
        }
    }

    struct Place {  // where a row's key and value are
        int sequence, slot;
    };
    struct Segment {  // rows first … first + n - 1 of a list, all of one sequence
        int64_t first, n;
        int sequence;
    };

    // Distribute work over the threads, and add up its time by kind if the pass asks for it. `last` runs on one thread when
    // all work is done, before any thread continues.
    template <class F, class G> void parallel_for(Work work, int thread, int64_t n, int64_t piece, F&& body, G&& last) const {
        if (thread || !pass_.seconds) return team.parallel_for(n, piece, body, last);
        const double start = clock_s();
        team.parallel_for(n, piece, body, last);
        pass_.seconds[work] += clock_s() - start;
    }
    template <class F> void parallel_for(Work work, int thread, int64_t n, int64_t piece, F&& body) const {
        parallel_for(work, thread, n, piece, body, [] {});
    }

    T* hidden(int row) const { return (T*)pass_.hidden + int64_t(row) * pass_.n_hidden; }
    static int row_of(const RowList& list, int64_t i) { return list.rows ? list.rows[i] : int(i); }

    // Prepare an input of n rows by `make(input, row)`.
    template <class F> Input prepare_input(int64_t n, int thread, F&& make) {
        if (n <= FEW_ROWS) {
            for (int64_t i = 0; i < n; i++) make(inputs_[thread], i);
            return inputs_[thread];
        }
        parallel_for(REST, thread, n, 1, [&](int64_t i, int64_t) { make(inputs_.last(), i); });
        return inputs_.last();
    }

    struct Output {  // an output of a map
        const Map* map;
        int number;
    };

    // Normalise, in place, the n values from `x` on in each row; `stride` is the distance between rows.
    void norm_rows(const Norm& norm, T* x, int64_t stride, int n, int64_t rows, int thread) {
        if (norm.kind == NO_NORM) return;
        parallel_for(REST, thread, rows, 1, [&](int64_t i, int64_t) { normalise(norm, x + i * stride, n, x + i * stride); });
    }

    struct Split {  // of attention into n pieces of work: n_rows rows, and n_heads of the query heads of a key head
        int n_rows, n_heads, n_head_groups;
        int64_t n;
    };

    struct MixtureSizes {  // sizes of a pass's largest mixture, and of latent attention, whose heads are computed like experts
        int64_t n_experts = 0, n_chosen = 0, n_groups = 0;
        bool separate_norms = false;  // whether router and shared expert have their own norms
        int64_t n_heads = 0, head_values = 0;  // heads of latent attention, and values in the rows of one head
        void count_heads(const Attention& part, int64_t n_rows) {
            head_values = std::max(head_values, n_rows * part.padded_width());
            n_heads = std::max<int64_t>(n_heads, part.n_heads);
        }

        template <class F> void count(const Mixture& part, F&& widest) {
            widest(part.widest);
            n_experts = std::max<int64_t>(n_experts, part.routing.n_experts + part.has_shared);
            n_groups = std::max<int64_t>(n_groups, part.routing.n_groups);
            n_chosen = std::max<int64_t>(n_chosen, part.routing.n_chosen + part.has_shared);
            separate_norms |= part.separate_norms();
        }
    };

    struct ExpertBatch {  // n rows of one expert, or of one head of latent attention, at consecutive places from `first` on
        int32_t expert, n;
        int64_t first;
    };

    Input normed_input(const Norm& norm, const RowList& list, const T* from, const Map* maps, int n_maps, int thread);
    Input map_input(T* rows, const Map& map, int64_t n, int thread);
    Input tiled_input(Input input, const Map& map, int64_t n, int thread);
    static void quantise_row(const Input& input, const T* x, const Map& map, int64_t row);
    void outputs(
        const Map& map, const Input& x, int rows, int first, int last, float* c, int64_t ldc, int thread,
        Output next = {}) const;
    static Prefetch prefetch_of(const Output& next);
    template <class F> void linear(const Map& map, const Input& x, int64_t rows, int thread, F&& sink);
    void add_to_residual(const Map& map, const Norm& norm, float scale, const Input& x, const RowList& list, int thread);
    void add_normed(const Norm& norm, float scale, const RowList& list, int64_t i);
    int project(const Map* maps, int n_maps, const Input& input, const RowList& list, int thread);
    void logits(const Map& map, const RowList& list, int thread);

    void attention(const Step& step, const Attention& part, const RowList& list, int thread);
    int make_heads(const Attention& part, int total, const RowList& list, int thread);
    void map_latents(const Attention& part, int64_t n, int thread);
    template <class F> void map_heads(const Map* maps, int64_t n, int thread, F&& sink);
    Split plan_split(const List<Segment>& segments, int n_kv_heads, int group) const;

    void convolution(const Step& step, const Convolution& part, const RowList& list, int thread);
    void recurrence(const Step& step, const Recurrence& part, const RowList& list, int thread);
    void prepare_selective(const Step& step, const Recurrence& part, const RowList& list, int thread);
    int conv_inputs(
        const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t i, const T** last) const;
    int64_t index_of(const RowList& list, const Segment& rows, int64_t slot) const;
    const T* inputs_at(const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t slot) const;
    void decode(const Step& step, const Recurrence& part, int64_t i);
    void store_inputs(const Recurrence& part, const T* inputs, T* to) const;
    const T* value_steps(const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t slot) const;
    void compute_keys(
        const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t i, int key_head);
    void update_head(const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int head, int thread);
    void store_head(const Recurrence& part, int head, const float* read, int64_t i, int total);
    void gate_group(const Recurrence& part, int group, int64_t i, int total);

    void layer_end(const Step& step, const LayerEnd& part, const RowList& list, int thread);
    void layer_inputs(const LayerInputs& part, const RowList& list, int thread);

    void mlp(const Step& step, const Mlp& part, const RowList& list, int thread);
    void mixture(const Step& step, const Mixture& part, const RowList& list, int thread);
    void allocate_experts(const MixtureSizes& sizes, int64_t rows, int64_t wide, bool packed, bool ordered);
    Input input_of(T* rows, const ExpertBatch& batch) const;
    void choose_experts(const Mixture& part, int64_t i) const;
    bool reads_in_place(const Mixture& part, const ExpertBatch& batch) const;
    void gather_rows(const Mixture& part, const ExpertBatch& batch, const Input& rows) const;
    void prepare(const Input& input, const ExpertBatch& batch, const Map& map) const;
    void add_up(const Mixture& part, const RowList& list, int64_t i, int first, int last);
    void count(const RowList& list, int n_chosen, int n_shared) const;
    void make_batches(const Mixture& part, int64_t n_rows);

    const Pass& pass_;
    const Step* steps_;
    const int n_steps_;
    int n_threads_ = 1;
    T *inner_, *mixed_, *saved_;
    T* heads_;             // queries and keys of latent attention
    T *gates_, *updates_;  // gates of gated heads; inputs of recurrent layers' updates
    T* decoded_;           // inputs of rows before the pass, of layers that store them in codes
    T* low_;               // of Mamba-1: each row's step of low rank, key and query; then the normed step
    T* value_steps_;       // of Mamba-1: a step for each value, of the pass's rows and then of earlier ones
    float* keys_;          // queries and keys of a prompt's rows in a recurrent layer, prepared once for heads that share them
    T *router_rows_, *shared_rows_;  // the inputs of router and shared expert, if they have their own norms
    float* scores_;        // each row's scores of experts, and scratch to choose by them
    Choice* choices_;      // the experts of each row
    int64_t* places_of_;   // for each choice, the row's place among those of its expert
    int32_t* source_;      // the row at each place
    T *expert_inner_, *expert_out_;  // experts' inner values and outputs
    Input expert_rows_;    // the input of experts
    int64_t expert_stride_;  // values between places, enough for the widest input
    int64_t n_copied_;      // experts whose rows are copied to consecutive places
    std::atomic<int32_t>* n_done_;  // finished panels of each expert's first maps, then finished experts of each panel of outputs
    static inline List<View> views_;
    static inline List<Place> places_;       // by row
    static inline List<List<Segment>> segments_;  // by list
    static inline List<Input> inputs_;
    static inline List<ExpertBatch> batches_;
    static inline Arena arena;
    static inline List<List<float>> tiles, scratch;  // per thread
    static inline List<List<int32_t>> paths;         // slots that a row and the one before it see, per thread
};

}  // namespace
