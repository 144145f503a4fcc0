// MLPs and mixtures of experts; a part of `pass.cpp`.
#pragma once
#include "runner.h"

namespace {

template <class T> inline float sigmoid_of(float x) { return as_stored<T>(1.0f / (1.0f + std::exp(-as_stored<T>(x)))); }

template <class T> void Runner<T>::mlp(const Step& step, const Mlp& part, const RowList& list, int thread) {
    const Input input = normed_input(
        part.before, list, step.from_saved ? saved_ : (const T*)pass_.hidden, part.in, part.n_in_maps, thread);
    const int n = part.n_inner;
    const bool joint = part.n_in_maps == 1;
    parallel_for(MAPS, thread, (n + PANEL - 1) / PANEL, 1, [&](int64_t panel, int64_t) {
        const int first = int(panel) * PANEL, last = std::min(first + PANEL, n), width = last - first;
        auto& tile = tiles[thread];
        float *gate = tile.items, *up = gate + whole_sides(list.n) * PANEL;
        outputs(part.in[0], input, int(list.n), first, last, gate, PANEL, thread);
        if (part.gated) outputs(part.in[joint ? 0 : 1], input, int(list.n), first + joint * n, last + joint * n, up, PANEL, thread);
        for (int64_t r = 0; r < list.n; r++)
            apply_gate(part, gate + r * PANEL, part.gated ? up + r * PANEL : nullptr, width, inner_ + r * n + first);
    });
    norm_rows(part.inner, inner_, n, n, list.n, thread);
    add_to_residual(part.out, part.after, part.added_scale, map_input(inner_, part.out, list.n, thread), list, thread);
}

// Allocate memory for the rows of experts. Each row has a place for each of its experts; an expert's first place begins a tile.
template <class T>
void Runner<T>::allocate_experts(const MixtureSizes& sizes, int64_t rows, int64_t wide, bool packed, bool ordered) {
    const int64_t n_places = std::max(rows * sizes.n_chosen + sizes.n_experts * (whole_sides(1) - 1),
                                      sizes.n_heads * ceil_div(sizes.head_values, wide));
    scores_ = (float*)arena.allocate(rows * 2 * (sizes.n_experts + sizes.n_groups) * sizeof(float));
    choices_ = (Choice*)arena.allocate(rows * sizes.n_chosen * sizeof(Choice));
    places_of_ = (int64_t*)arena.allocate(rows * sizes.n_chosen * sizeof(int64_t));
    source_ = (int32_t*)arena.allocate(n_places * sizeof(int32_t));
    expert_inner_ = (T*)arena.allocate(n_places * wide * sizeof(T));
    expert_out_ = (T*)arena.allocate(n_places * pass_.n_hidden * sizeof(T));
    router_rows_ = (T*)arena.allocate((sizes.separate_norms ? rows * pass_.n_hidden : 0) * sizeof(T));
    shared_rows_ = (T*)arena.allocate((sizes.separate_norms ? rows * pass_.n_hidden : 0) * sizeof(T));
    expert_rows_ = {(T*)arena.allocate(n_places * wide * sizeof(T)), {}, nullptr, nullptr};
    if (TILES) expert_rows_.tiled = (T*)arena.allocate(n_places * wide * sizeof(T));
    if (ordered) expert_rows_.ordered = (T*)arena.allocate(n_places * wide * sizeof(T));
    if (packed) {
        const int64_t groups = wide / MIN_GROUP + 1;
        expert_rows_.codes.codes = (int8_t*)arena.allocate(n_places * wide);
        expert_rows_.codes.scales = (float*)arena.allocate(n_places * groups * sizeof(float));
        expert_rows_.codes.sums = (float*)arena.allocate(n_places * groups * sizeof(float));
        expert_rows_.codes.halves = (float*)arena.allocate(2 * n_places * groups * sizeof(float));
    }
    n_done_ = (std::atomic<int32_t>*)arena.allocate((sizes.n_experts + pass_.n_hidden / PANEL + 1) * sizeof(*n_done_));
    batches_.reserve(std::max(sizes.n_experts, sizes.n_heads));
    expert_stride_ = wide;
}

// The rows of an expert as the input of one of its maps. `rows` has the rows of all experts by place.
template <class T> auto Runner<T>::input_of(T* rows, const ExpertBatch& batch) const -> Input {
    const int64_t at = batch.first * expert_stride_, groups = batch.first * (expert_stride_ / MIN_GROUP + 1);
    Input input{rows + at, {}, nullptr, nullptr};
    input.codes.codes = expert_rows_.codes.codes + at, input.codes.scales = expert_rows_.codes.scales + groups;
    input.codes.sums = expert_rows_.codes.sums + groups, input.codes.halves = expert_rows_.codes.halves + 2 * groups;
    input.ordered = expert_rows_.ordered + at, input.tiled = expert_rows_.tiled + at;
    return input;
}

// Prepare the rows of an expert for a map: round them to codes, or lay them out for tiles.
template <class T> void Runner<T>::prepare(const Input& input, const ExpertBatch& batch, const Map& map) const {
    if (map.scales) {
        for (int r = 0; r < batch.n; r++) quantise_row(input, input.rows + int64_t(r) * map.n_in, map, r);
        return;
    }
#if defined(WITH_TILES)
    if constexpr (TILES) {
        const int k = map.n_in, whole = whole_tiles(k);
        for (int row = 0; row < batch.n; row += SIDE)
            tile_rows(input.rows + int64_t(row) * k, k, std::min<int>(SIDE, batch.n - row), k, 0, whole,
                      input.tiled + int64_t(row) * whole);
    }
#endif
}

// Whether rows are rounded once for all experts; and whether a map can use these codes, because its groups are those of the first
// expert's map.
inline bool rounds_once(const Mixture& part) { return part.in->scales && !part.in->order && !part.weighs_inputs; }
inline bool can_reuse_codes(const Mixture& part, const Map& map) {
    return rounds_once(part) && map.scales && !map.order && std::max(map.group, MIN_GROUP) == std::max(part.in->group, MIN_GROUP);
}

// Whether an expert with a single row can read it without a copy.
template <class T> bool Runner<T>::reads_in_place(const Mixture& part, const ExpertBatch& batch) const {
    const Map& map = part.in[batch.expert * part.n_in_maps];
    if (part.separate_norms() && batch.expert == part.routing.n_experts) return false;
    return batch.n == 1 && !part.weighs_inputs && (map.scales ? can_reuse_codes(part, map) : !TILES);
}

// Copy an expert's rows to their places, and prepare them for its first maps.
template <class T> void Runner<T>::gather_rows(const Mixture& part, const ExpertBatch& batch, const Input& rows) const {
    const Map& map = part.in[batch.expert * part.n_in_maps];
    const int n = map.n_in, n_chosen = part.routing.n_chosen + part.has_shared;
    const Input input = input_of(expert_rows_.rows, batch);
    const bool reads_shared_rows = part.separate_norms() && batch.expert == part.routing.n_experts;
    if (can_reuse_codes(part, map) && !reads_shared_rows) {
        const int64_t group = std::max(map.group, MIN_GROUP), groups = (n + group - 1) / group;
        for (int r = 0; r < batch.n; r++) {
            const ActivationCodes from = rows.codes.at(source_[batch.first + r], n, map.group);
            const ActivationCodes to = input.codes.at(r, n, map.group);
            memcpy(to.codes, from.codes, groups * group);
            memcpy(to.scales, from.scales, groups * sizeof(float));
            memcpy(to.sums, from.sums, groups * sizeof(float));
            memcpy(to.halves, from.halves, 2 * groups * sizeof(float));
        }
        return;
    }
    for (int r = 0; r < batch.n; r++) {
        const int64_t i = source_[batch.first + r];
        const T* from = (reads_shared_rows ? shared_rows_ : rows.rows) + i * n;
        T* to = input.rows + int64_t(r) * n;
        if (part.weighs_inputs && batch.expert < part.routing.n_experts) {
            const Choice* choice = choices_ + i * n_chosen;
            while (choice->expert != batch.expert) choice++;
            const float weight = as_stored<T>(choice->weight);
            transform(n, from, to, [&](vf v, int) { return v * weight; });
        } else {
            memcpy(to, from, n * sizeof(T));
        }
    }
    prepare(input, batch, map);
}

// Choose the experts of row i by its scores.
template <class T> void Runner<T>::choose_experts(const Mixture& part, int64_t i) const {
    const int n = part.routing.n_experts, all = n + part.has_shared, n_chosen = part.routing.n_chosen + part.has_shared;
    float* scores = scores_ + i * 2 * (all + part.routing.n_groups);
    Choice* choices = choices_ + i * n_chosen;
    const float shared = scores[n];
    choose(part.routing, scores, part.correction, scores + all, scores + 2 * all, choices);
    if (part.expert_scale)
        for (int c = 0; c < part.routing.n_chosen; c++) choices[c].weight *= part.expert_scale[choices[c].expert];
    if (part.has_shared) choices[n_chosen - 1] = {n, part.shared_gate ? sigmoid_of<T>(shared) : part.shared_scale};
}

template <class T>
void Runner<T>::mixture(const Step& step, const Mixture& part, const RowList& list, int thread) {
    const int n_hidden = pass_.n_hidden, n = part.routing.n_experts, all = n + part.has_shared;
    const int row_size = 2 * (all + part.routing.n_groups);
    const T* from = step.from_saved ? saved_ : (const T*)pass_.hidden;
    if (part.separate_norms())
        parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            const T* x = from + int64_t(row_of(list, i)) * n_hidden;
            normalise(part.router_before, x, n_hidden, router_rows_ + i * n_hidden);
            normalise(part.shared_before, x, n_hidden, shared_rows_ + i * n_hidden);
        });
    const Input rows = prepare_input(list.n, thread, [&](const Input& to, int64_t i) {
        normalise(part.before, from + int64_t(row_of(list, i)) * n_hidden, n_hidden, to.rows + i * n_hidden);
        if (rounds_once(part)) quantise_row(to, to.rows + i * n_hidden, *part.in, i);
    });
    // A thread computes the scores of so many experts and rows at a time, so that the router's weights stay in its cache.
    constexpr int EXPERTS = 8, ROWS = 64, SIDE_BY_SIDE = 4;
    const int n_blocks = ceil_div(all, EXPERTS);
    auto score_experts = [&](int64_t item, int64_t) {
        const int first = int(item % n_blocks) * EXPERTS, last = std::min(all, first + EXPERTS), end_of_router = std::min(n, last);
        const int64_t begin = item / n_blocks * ROWS, end = std::min(list.n, begin + ROWS);
        for (int64_t i = begin; i < end; i++) {
            const T* x = (part.separate_norms() ? router_rows_ : rows.rows) + i * n_hidden;
            float* scores = scores_ + i * row_size;
            auto score = [&](const auto* router, int e, auto size) {
                const int64_t ahead = i == begin && e + 2 * size <= n ? int64_t(size) * n_hidden : 0;
                dots<size>(x, router + int64_t(e) * n_hidden, n_hidden, n_hidden, ahead, scores + e);
            };
            auto score_all = [&](const auto* router) {
                int e = first;
                for (; e + SIDE_BY_SIDE <= end_of_router; e += SIDE_BY_SIDE)
                    score(router, e, std::integral_constant<int, SIDE_BY_SIDE>());
                for (; e < end_of_router; e++) score(router, e, std::integral_constant<int, 1>());
            };
            if (part.wide_router) score_all((const float*)part.router);
            else score_all((const T*)part.router);
            if (last > n) scores[n] = 0;
            if (last > n && part.shared_gate) dots<1>(x, (const T*)part.shared_gate, 0, n_hidden, 0, scores + n);
            for (int e = first; e < last; e++) {
                float logit = scores[e];
                if (e < n && part.router_bias) logit += part.router_bias[e];
                if (part.logit_scale != 1) logit *= part.logit_scale;
                scores[e] = part.rounded_logits ? as_stored<T>(logit) : logit;
            }
        }
    };
    const int64_t n_scored = ceil_div(list.n, ROWS) * n_blocks;
    auto batch_rows = [&] {
        make_batches(part, list.n);
        if (pass_.experts) count(list, part.routing.n_chosen + part.has_shared, part.has_shared);
    };
    if (list.n == 1) {
        parallel_for(REST, thread, n_scored, 1, score_experts, [&] { choose_experts(part, 0), batch_rows(); });
    } else {
        parallel_for(REST, thread, n_scored, 1, score_experts);
        parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) { choose_experts(part, i); }, batch_rows);
    }
    if (n_copied_)
        parallel_for(REST, thread, batches_.n, 1, [&](int64_t s, int64_t) {
            if (!reads_in_place(part, batches_[s])) gather_rows(part, batches_[s], rows);
        });
    auto in_map = [&](const ExpertBatch& batch) -> const Map& { return part.in[batch.expert * part.n_in_maps]; };
    auto out_map = [&](const ExpertBatch& batch) -> const Map& { return part.out[batch.expert]; };
    auto input_for = [&](const ExpertBatch& batch) -> Input {
        if (!reads_in_place(part, batch)) return input_of(expert_rows_.rows, batch);
        const int64_t i = source_[batch.first];
        const Map& map = in_map(batch);
        const ActivationCodes codes = map.scales ? rows.codes.at(i, map.n_in, map.group) : ActivationCodes{};
        return {rows.rows + i * n_hidden, codes, nullptr, nullptr};
    };
    const int most_inner = std::max(part.n_inner, part.n_shared_inner);
    const int64_t panels = (most_inner + PANEL - 1) / PANEL;
    const bool is_gated = part.mlp.gated, joint = is_gated && part.n_in_maps == 1;
    const int64_t out_panels = (n_hidden + PANEL - 1) / PANEL, n_items = batches_.n * panels;
    // The output that an item's thread computes next if all threads are equally fast; its weights are prefetched.
    auto next_in = [&](int64_t item, int half) -> Output {
        if (item >= n_items) return {&out_map(batches_[0]), int(item - n_items) * PANEL};
        const ExpertBatch& batch = batches_[item / panels];
        const int first = int(item % panels) * PANEL;
        return joint ? Output{&in_map(batch), first + half * out_map(batch).n_in} : Output{&in_map(batch) + half, first};
    };
    auto next_out = [&](int64_t item) -> Output {
        const int64_t batch = std::min<int64_t>(item / out_panels, int64_t(batches_.n) - 1);
        return {&out_map(batches_[batch]), int(item % out_panels) * PANEL};
    };
    parallel_for(MAPS, thread, n_items, 1, [&](int64_t item, int64_t) {
        const ExpertBatch& batch = batches_[item / panels];
        const int inner = out_map(batch).n_in, first = int(item % panels) * PANEL, last = std::min(first + PANEL, inner);
        if (first >= inner) return;
        const Map* maps = &in_map(batch);
        const Input input = input_for(batch), results = input_of(expert_inner_, batch);
        T* to = results.rows + first;
        auto& tile = tiles[thread];
        float *gate = tile.items, *up = gate + whole_sides(batch.n) * PANEL;
        const int64_t next = item + n_threads_;
        outputs(maps[0], input, batch.n, first, last, gate, PANEL, thread, next_in(next, 0));
        if (is_gated)
            outputs(maps[joint ? 0 : 1], input, batch.n, first + joint * inner, last + joint * inner, up, PANEL, thread,
                    next_in(next, 1));
        for (int r = 0; r < batch.n; r++)
            apply_gate(part.mlp, gate + r * PANEL, is_gated ? up + r * PANEL : nullptr, last - first, to + int64_t(r) * inner);
        // The thread that finishes an expert's last panel prepares its rows for the next map.
        if (n_done_[item / panels].fetch_add(1, std::memory_order_acq_rel) + 1 == ceil_div(inner, PANEL))
            prepare(results, batch, out_map(batch));
    });
    // With few rows, the thread that finishes the last expert of a panel adds up the panel's outputs.
    const bool at_once = part.after.kind == NO_NORM && !part.separate_norms() && list.n <= MAX_ROWS_ADDED;
    parallel_for(MAPS, thread, batches_.n * out_panels, 1, [&](int64_t item, int64_t) {
        const ExpertBatch& batch = batches_[item / out_panels];
        const int64_t panel = item % out_panels;
        const int first = int(panel) * PANEL, last = std::min(first + PANEL, n_hidden);
        auto& tile = tiles[thread];
        outputs(out_map(batch), input_of(expert_inner_, batch), batch.n, first, last, tile.items, PANEL, thread,
                next_out(item + n_threads_));
        for (int r = 0; r < batch.n; r++)
            round_to(expert_out_ + (batch.first + r) * n_hidden + first, tile.items + r * PANEL, last - first);
        if (at_once && size_t(n_done_[all + panel].fetch_add(1, std::memory_order_acq_rel)) + 1 == batches_.n)
            for (int64_t i = 0; i < list.n; i++) add_up(part, list, i, first, last);
    });
    if (!at_once)
        parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) { add_up(part, list, i, 0, n_hidden); });
}

// Add outputs [first, last) of a row's experts, in the order of the experts, to its state. If a norm follows, all outputs must
// be added at once.
template <class T>
void Runner<T>::add_up(const Mixture& part, const RowList& list, int64_t i, int first, int last) {
    const int n = pass_.n_hidden, n_chosen = part.routing.n_chosen + part.has_shared;
    const bool is_normed = part.after.kind != NO_NORM || part.separate_norms();
    T *delta = inputs_.last().rows + i * n, *state = hidden(row_of(list, i));
    const Choice* choices = choices_ + i * n_chosen;
    const int64_t* places = places_of_ + i * n_chosen;
    const int n_summed = n_chosen - part.separate_norms();  // a shared output with its own norm is added after the norm
    for (int at = first; at < last; at += LANES) {
        vf total = {};
        for (int c = 0; c < n_summed; c++) {
            const bool is_weighed = part.weighs_inputs && choices[c].expert < part.routing.n_experts;
            const float weight = is_weighed ? 1 : choices[c].weight;
            total += part_of(expert_out_ + places[c] * n, at, n) * weight;
        }
        if (!is_normed) {
            const vf sum = as_stored<T>(total);
            total = part_of(state, at, n) + (part.added_scale == 1 ? sum : as_stored<T>(sum * part.added_scale));
        }
        T values[LANES];
        store(values, total);
        memcpy((is_normed ? delta : state) + at, values, std::min(LANES, n - at) * sizeof(T));
    }
    if (part.separate_norms()) {
        T* shared = expert_out_ + places[n_summed] * n;
        normalise(part.experts_after, delta, n, delta);
        normalise(part.shared_after, shared, n, shared);
        transform(n, delta, delta, [&](vf v, int at) { return v + part_of(shared, at, n); });
    }
    if (is_normed) add_normed(part.after, part.added_scale, list, i);
}

// Add this mixture's experts to the pass's counts.
template <class T> void Runner<T>::count(const RowList& list, int n_chosen, int n_shared) const {
    ExpertCounts& counts = *pass_.experts;
    const int n = n_chosen - n_shared;
    counts.mixtures++, counts.distinct += batches_.n - n_shared;
    for (int64_t i = 1; i < list.n; i++) {
        if (places_[row_of(list, i)].sequence != places_[row_of(list, i - 1)].sequence) continue;
        counts.taken += n, counts.repeated += common(choices_ + (i - 1) * n_chosen, choices_ + i * n_chosen, n);
    }
}

// List the rows of each expert, experts in ascending order, and give each a place.
template <class T> void Runner<T>::make_batches(const Mixture& part, int64_t n_rows) {
    const int n_chosen = part.routing.n_chosen + part.has_shared, n_experts = part.routing.n_experts + part.has_shared;
    int64_t counts[MAX_EXPERTS + 1] = {};
    for (int64_t i = 0; i < n_rows * n_chosen; i++) counts[choices_[i].expert]++;
    batches_.clear();
    int64_t first = 0;
    n_copied_ = 0;
    for (int e = 0; e < n_experts; e++) {
        const int64_t n = counts[e];
        counts[e] = first;
        if (n == 0) continue;
        batches_.add({e, int32_t(n), first});
        n_copied_ += !reads_in_place(part, batches_.last());
        first += whole_sides(n);
    }
    for (int64_t i = 0; i < n_rows * n_chosen; i++) {
        places_of_[i] = counts[choices_[i].expert]++;
        source_[places_of_[i]] = int32_t(i / n_chosen);
    }
    for (int i = 0; i < n_experts + pass_.n_hidden / PANEL + 1; i++) n_done_[i].store(0, std::memory_order_relaxed);
}

}  // namespace
