// MLPs and mixtures of experts; a part of `pass.cpp`.
#pragma once
#include "runner.h"

namespace {

template <class T> inline float sigmoid_of(float x) { return as_stored<T>(1.0f / (1.0f + std::exp(-as_stored<T>(x)))); }

template <class T> void Runner<T>::mlp(const Step& step, const Mlp& part, const RowList& list, int thread) {
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

// Reserve memory for the rows of experts. Each row has a place for each expert that it takes; an expert's first place is at the
// beginning of a tile.
template <class T>
void Runner<T>::take_room(const Mixed& mixed, int64_t rows, int64_t wide, bool packed, bool ordered) {
    const int64_t n_places = std::max(rows * mixed.n_chosen + mixed.n_experts * (whole_sides(1) - 1),
                                      mixed.n_heads * chunks_of(mixed.of_heads, wide));
    scores_ = (float*)arena.take(rows * 2 * (mixed.n_experts + mixed.n_groups) * sizeof(float));
    choices_ = (Choice*)arena.take(rows * mixed.n_chosen * sizeof(Choice));
    places_of_ = (int64_t*)arena.take(rows * mixed.n_chosen * sizeof(int64_t));
    source_ = (int32_t*)arena.take(n_places * sizeof(int32_t));
    inner_of_ = (T*)arena.take(n_places * wide * sizeof(T));
    out_of_ = (T*)arena.take(n_places * pass_.n_hidden * sizeof(T));
    router_rows_ = (T*)arena.take((mixed.own_norms ? rows * pass_.n_hidden : 0) * sizeof(T));
    shared_rows_ = (T*)arena.take((mixed.own_norms ? rows * pass_.n_hidden : 0) * sizeof(T));
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
    done_ = (std::atomic<int32_t>*)arena.take((mixed.n_experts + pass_.n_hidden / PANEL + 1) * sizeof(*done_));
    shares_.reserve(std::max(mixed.n_experts, mixed.n_heads));
    wide_ = wide;
}

// The rows of an expert as the input of one of its maps. `rows` has the rows of all experts by place.
template <class T> auto Runner<T>::input_of(T* rows, const Share& share) const -> Input {
    const int64_t at = share.first * wide_, groups = share.first * (wide_ / FINEST + 1);
    Input input{rows + at, {}, nullptr, nullptr};
    input.codes.codes = taken_.codes.codes + at, input.codes.scales = taken_.codes.scales + groups;
    input.codes.sums = taken_.codes.sums + groups, input.codes.halves = taken_.codes.halves + 2 * groups;
    input.ordered = taken_.ordered + at, input.turned = taken_.turned + at;
    return input;
}

// Prepare the rows of an expert for a map: round them to codes, or lay them out for tiles.
template <class T> void Runner<T>::prepare(const Input& input, const Share& share, const Map& map) const {
    if (map.scales) {
        for (int r = 0; r < share.n; r++) round_into(input, input.rows + int64_t(r) * map.n_in, map, r);
        return;
    }
#if defined(WITH_TILES)
    if constexpr (TILES) {
        const int k = map.n_in, whole = whole_tiles(k);
        for (int row = 0; row < share.n; row += SIDE)
            turn_rows(input.rows + int64_t(row) * k, k, std::min<int>(SIDE, share.n - row), k, 0, whole,
                      input.turned + int64_t(row) * whole);
    }
#endif
}

// Whether rows are rounded once for all experts, and whether a map can use these codes: its groups must be those of the first
// expert's map.
inline bool rounds_once(const Mixture& part) { return part.in->scales && !part.in->order && !part.weighs_inputs; }
inline bool takes_same(const Mixture& part, const Map& map) {
    return rounds_once(part) && map.scales && !map.order && std::max(map.group, FINEST) == std::max(part.in->group, FINEST);
}

// Whether an expert with a single row can read it without a copy.
template <class T> bool Runner<T>::reads_row(const Mixture& part, const Share& share) const {
    const Map& map = part.in[share.expert * part.n_in_maps];
    if (part.own_norms() && share.expert == part.choosing.n_experts) return false;
    return share.n == 1 && !part.weighs_inputs && (map.scales ? takes_same(part, map) : !TILES);
}

// Copy the rows of an expert to their places, and prepare them for its first maps.
template <class T> void Runner<T>::bring_rows(const Mixture& part, const Share& share, const Input& rows) const {
    const Map& map = part.in[share.expert * part.n_in_maps];
    const int n = map.n_in, n_chosen = part.choosing.n_chosen + part.has_shared;
    const Input input = input_of(taken_.rows, share);
    const bool reads_shared_rows = part.own_norms() && share.expert == part.choosing.n_experts;
    if (takes_same(part, map) && !reads_shared_rows) {
        const int64_t group = std::max(map.group, FINEST), groups = (n + group - 1) / group;
        for (int r = 0; r < share.n; r++) {
            const Rounded from = rows.codes.at(source_[share.first + r], n, map.group), to = input.codes.at(r, n, map.group);
            memcpy(to.codes, from.codes, groups * group);
            memcpy(to.scales, from.scales, groups * sizeof(float));
            memcpy(to.sums, from.sums, groups * sizeof(float));
            memcpy(to.halves, from.halves, 2 * groups * sizeof(float));
        }
        return;
    }
    for (int r = 0; r < share.n; r++) {
        const int64_t i = source_[share.first + r];
        const T* from = (reads_shared_rows ? shared_rows_ : rows.rows) + i * n;
        T* to = input.rows + int64_t(r) * n;
        if (part.weighs_inputs && share.expert < part.choosing.n_experts) {
            const Choice* choice = choices_ + i * n_chosen;
            while (choice->expert != share.expert) choice++;
            const float weight = as_stored<T>(choice->weight);
            along(n, from, to, [&](vf v, int) { return v * weight; });
        } else {
            memcpy(to, from, n * sizeof(T));
        }
    }
    prepare(input, share, map);
}

// Choose the experts of row i by its scores.
template <class T> void Runner<T>::choose_experts(const Mixture& part, int64_t i) const {
    const int n = part.choosing.n_experts, all = n + part.has_shared, n_chosen = part.choosing.n_chosen + part.has_shared;
    float* scores = scores_ + i * 2 * (all + part.choosing.n_groups);
    Choice* choices = choices_ + i * n_chosen;
    const float shared = scores[n];
    choose(part.choosing, scores, part.correction, scores + all, scores + 2 * all, choices);
    if (part.expert_scale)
        for (int c = 0; c < part.choosing.n_chosen; c++) choices[c].weight *= part.expert_scale[choices[c].expert];
    if (part.has_shared) choices[n_chosen - 1] = {n, part.shared_gate ? sigmoid_of<T>(shared) : part.shared_scale};
}

template <class T>
void Runner<T>::mixture(const Step& step, const Mixture& part, const RowList& list, int thread) {
    const int n_hidden = pass_.n_hidden, n = part.choosing.n_experts, all = n + part.has_shared;
    const int room = 2 * (all + part.choosing.n_groups);
    const T* from = step.from_kept ? kept_ : (const T*)pass_.hidden;
    if (part.own_norms())
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            const T* x = from + int64_t(row_of(list, i)) * n_hidden;
            normed(part.router_before, x, n_hidden, router_rows_ + i * n_hidden);
            normed(part.shared_before, x, n_hidden, shared_rows_ + i * n_hidden);
        });
    const Input rows = prepared(list.n, thread, [&](const Input& to, int64_t i) {
        normed(part.before, from + int64_t(row_of(list, i)) * n_hidden, n_hidden, to.rows + i * n_hidden);
        if (rounds_once(part)) round_into(to, to.rows + i * n_hidden, *part.in, i);
    });
    // A thread computes the scores of so many experts and rows at a time: the experts' weights then stay in its cache.
    constexpr int EXPERTS = 8, ROWS = 64;
    const int n_blocks = chunks_of(all, EXPERTS);
    auto score_experts = [&](int64_t item, int64_t) {
        const int first = int(item % n_blocks) * EXPERTS, last = std::min(all, first + EXPERTS);
        const int64_t begin = item / n_blocks * ROWS, end = std::min(list.n, begin + ROWS);
        for (int64_t i = begin; i < end; i++)
            for (int e = first; e < last; e++) {
                const T* x = (part.own_norms() ? router_rows_ : rows.rows) + i * n_hidden;
                const int64_t at = int64_t(e) * n_hidden;
                const int ahead = i == begin && e + 1 < n ? n_hidden : 0;
                float score = 0;
                if (e == n) score = part.shared_gate ? dot(x, (const T*)part.shared_gate, n_hidden) : 0;
                else if (part.wide_router) score = dot(x, (const float*)part.router + at, n_hidden, ahead);
                else score = dot(x, (const T*)part.router + at, n_hidden, ahead);
                if (e < n && part.router_bias) score += part.router_bias[e];
                if (part.logit_scale != 1) score *= part.logit_scale;
                scores_[i * room + e] = part.rounded_logits ? as_stored<T>(score) : score;
            }
    };
    const int64_t n_scored = chunks_of(list.n, ROWS) * n_blocks;
    auto share_rows = [&] {
        share_out(part, list.n);
        if (pass_.experts) count(list, part.choosing.n_chosen + part.has_shared, part.has_shared);
    };
    if (list.n == 1) {
        each(REST, thread, n_scored, 1, score_experts, [&] { choose_experts(part, 0), share_rows(); });
    } else {
        each(REST, thread, n_scored, 1, score_experts);
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) { choose_experts(part, i); }, share_rows);
    }
    if (n_apart_)
        each(REST, thread, shares_.n, 1, [&](int64_t s, int64_t) {
            if (!reads_row(part, shares_[s])) bring_rows(part, shares_[s], rows);
        });
    auto in_of = [&](const Share& share) -> const Map& { return part.in[share.expert * part.n_in_maps]; };
    auto out_of = [&](const Share& share) -> const Map& { return part.out[share.expert]; };
    auto read_by = [&](const Share& share) -> Input {
        if (!reads_row(part, share)) return input_of(taken_.rows, share);
        const int64_t i = source_[share.first];
        const Map& map = in_of(share);
        const Rounded codes = map.scales ? rows.codes.at(i, map.n_in, map.group) : Rounded{};
        return {rows.rows + i * n_hidden, codes, nullptr, nullptr};
    };
    const int most_inner = std::max(part.n_inner, part.n_shared_inner);
    const int64_t panels = (most_inner + PANEL - 1) / PANEL;
    const bool is_gated = part.mlp.gated, joint = is_gated && part.n_in_maps == 1;
    const int64_t out_panels = (n_hidden + PANEL - 1) / PANEL, n_items = shares_.n * panels;
    // The output at which an item's thread continues if all threads are equally fast; its weights are prefetched.
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
        const Input input = read_by(share), results = input_of(inner_of_, share);
        T* to = results.rows + first;
        auto& tile = tiles[thread];
        float *gate = tile.items, *up = gate + whole_sides(share.n) * PANEL;
        const int64_t next = item + n_threads_;
        outputs(maps[0], input, share.n, first, last, gate, PANEL, thread, onward_in(next, 0));
        if (is_gated)
            outputs(maps[joint ? 0 : 1], input, share.n, first + joint * inner, last + joint * inner, up, PANEL, thread,
                    onward_in(next, 1));
        for (int r = 0; r < share.n; r++)
            gated(part.mlp, gate + r * PANEL, is_gated ? up + r * PANEL : nullptr, last - first, to + int64_t(r) * inner);
        // The thread that finishes an expert's last panel prepares its rows for the next map.
        if (done_[item / panels].fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_of(inner, PANEL))
            prepare(results, share, out_of(share));
    });
    // With few rows, the thread that finishes the last expert of a panel adds up the panel's outputs.
    const bool at_once = part.after.kind == NO_NORM && !part.own_norms() && list.n <= ROWS_ADDED;
    each(MAPS, thread, shares_.n * out_panels, 1, [&](int64_t item, int64_t) {
        const Share& share = shares_[item / out_panels];
        const int64_t panel = item % out_panels;
        const int first = int(panel) * PANEL, last = std::min(first + PANEL, n_hidden);
        auto& tile = tiles[thread];
        outputs(out_of(share), input_of(inner_of_, share), share.n, first, last, tile.items, PANEL, thread,
                onward_out(item + n_threads_));
        for (int r = 0; r < share.n; r++)
            round_to(out_of_ + (share.first + r) * n_hidden + first, tile.items + r * PANEL, last - first);
        if (at_once && size_t(done_[all + panel].fetch_add(1, std::memory_order_acq_rel)) + 1 == shares_.n)
            for (int64_t i = 0; i < list.n; i++) add_up(part, list, i, first, last);
    });
    if (!at_once)
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) { add_up(part, list, i, 0, n_hidden); });
}

// Add outputs [first, last) of a row's experts, in the order of the experts, to its state. If a norm follows, these must be all
// outputs.
template <class T>
void Runner<T>::add_up(const Mixture& part, const RowList& list, int64_t i, int first, int last) {
    const int n = pass_.n_hidden, n_chosen = part.choosing.n_chosen + part.has_shared;
    const bool is_normed = part.after.kind != NO_NORM || part.own_norms();
    T *delta = inputs_.last().rows + i * n, *state = hidden(row_of(list, i));
    const Choice* choices = choices_ + i * n_chosen;
    const int64_t* places = places_of_ + i * n_chosen;
    const int n_summed = n_chosen - part.own_norms();  // a shared output with its own norm is added after the norm
    for (int at = first; at < last; at += LANES) {
        vf total = {};
        for (int c = 0; c < n_summed; c++) {
            const bool is_weighed = part.weighs_inputs && choices[c].expert < part.choosing.n_experts;
            const float weight = is_weighed ? 1 : choices[c].weight;
            total += part_of(out_of_ + places[c] * n, at, n) * weight;
        }
        if (!is_normed) {
            const vf sum = as_stored<T>(total);
            total = part_of(state, at, n) + (part.added_scale == 1 ? sum : as_stored<T>(sum * part.added_scale));
        }
        T values[LANES];
        store(values, total);
        memcpy((is_normed ? delta : state) + at, values, std::min(LANES, n - at) * sizeof(T));
    }
    if (part.own_norms()) {
        T* shared = out_of_ + places[n_summed] * n;
        normed(part.experts_after, delta, n, delta);
        normed(part.shared_after, shared, n, shared);
        along(n, delta, delta, [&](vf v, int at) { return v + part_of(shared, at, n); });
    }
    if (is_normed) add(part.after, part.added_scale, list, i);
}

// Add this mixture's experts to the pass's counts.
template <class T> void Runner<T>::count(const RowList& list, int n_chosen, int n_shared) const {
    ExpertCounts& counts = *pass_.experts;
    const int n = n_chosen - n_shared;
    counts.mixtures++, counts.distinct += shares_.n - n_shared;
    for (int64_t i = 1; i < list.n; i++) {
        if (places_[row_of(list, i)].sequence != places_[row_of(list, i - 1)].sequence) continue;
        counts.taken += n, counts.repeated += common(choices_ + (i - 1) * n_chosen, choices_ + i * n_chosen, n);
    }
}

// List the rows of each expert, experts in ascending order, and give each a place.
template <class T> void Runner<T>::share_out(const Mixture& part, int64_t n_rows) {
    const int n_chosen = part.choosing.n_chosen + part.has_shared, n_experts = part.choosing.n_experts + part.has_shared;
    int64_t counts[MOST_EXPERTS + 1] = {};
    for (int64_t i = 0; i < n_rows * n_chosen; i++) counts[choices_[i].expert]++;
    shares_.clear();
    int64_t first = 0;
    n_apart_ = 0;
    for (int e = 0; e < n_experts; e++) {
        const int64_t n = counts[e];
        counts[e] = first;
        if (n == 0) continue;
        shares_.add({e, int32_t(n), first});
        n_apart_ += !reads_row(part, shares_.last());
        first += whole_sides(n);
    }
    for (int64_t i = 0; i < n_rows * n_chosen; i++) {
        places_of_[i] = counts[choices_[i].expert]++;
        source_[places_of_[i]] = int32_t(i / n_chosen);
    }
    for (int i = 0; i < n_experts + pass_.n_hidden / PANEL + 1; i++) done_[i].store(0, std::memory_order_relaxed);
}

}  // namespace
