// MLPs, and mixtures of experts in their place; a part of `pass.cpp`.
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

// Memory for the rows of experts: each row once for each expert that it takes. An expert's rows begin where a tile does.
template <class T>
void Runner<T>::take_room(const Mixed& mixed, int64_t rows, int64_t wide, bool packed, bool ordered) {
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
template <class T> auto Runner<T>::input_of(T* rows, const Share& share) const -> Input {
    const int64_t at = share.first * wide_, groups = share.first * (wide_ / FINEST + 1);
    Input own{rows + at, {}, nullptr, nullptr};
    own.codes.codes = taken_.codes.codes + at, own.codes.scales = taken_.codes.scales + groups;
    own.codes.sums = taken_.codes.sums + groups, own.codes.halves = taken_.codes.halves + 2 * groups;
    own.ordered = taken_.ordered + at, own.turned = taken_.turned + at;
    return own;
}

// Prepare the rows that experts read by their maps `map_of(share)`: codes, or turned for tiles.
template <class T> template <class F> void Runner<T>::prepare_shares(T* rows, int thread, F&& map_of) {
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

template <class T>
void Runner<T>::mixture(const Step& step, const Mixture& part, const RowList& list, int thread) {
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
            choices[n_chosen - 1] = {n, part.shared_gate ? sigmoid_of<T>(shared) : part.shared_scale};
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
    const bool is_gated = part.mlp.gated, joint = is_gated && part.n_in_maps == 1;
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
        if (is_gated)
            outputs(maps[joint ? 0 : 1], input, share.n, first + joint * inner, last + joint * inner, up, PANEL, thread,
                    onward_in(next, 1));
        for (int r = 0; r < share.n; r++)
            gated(part.mlp, gate + r * PANEL, is_gated ? up + r * PANEL : nullptr, last - first, to + int64_t(r) * inner);
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

// Add what a row's experts give, in their order.
template <class T>
void Runner<T>::gather(const Mixture& part, const RowList& list, int64_t i, int n_chosen) {
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

template <class T> void Runner<T>::count(const RowList& list, int n_chosen, int n_shared) const {
    ExpertCounts& counts = *pass_.experts;
    const int n = n_chosen - n_shared;
    counts.mixtures++, counts.distinct += shares_.n - n_shared;
    for (int64_t i = 1; i < list.n; i++) {
        if (places_[row_of(list, i)].sequence != places_[row_of(list, i - 1)].sequence) continue;
        counts.taken += n, counts.repeated += common(choices_ + (i - 1) * n_chosen, choices_ + i * n_chosen, n);
    }
}

// List which rows each expert computes, experts in ascending order.
template <class T> void Runner<T>::share_out(int64_t n_rows, int n_chosen, int n_experts) {
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

}  // namespace
