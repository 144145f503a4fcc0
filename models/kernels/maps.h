// Linear maps of a pass: preparing their inputs, computing them, and adding outputs to the residual stream; a part of
// `pass.cpp`.
#pragma once
#include "runner.h"

namespace {

Packed packed_of(const Map& map) {
    return {map.weight, map.scales, (map.n_in + map.group - 1) / map.group * map.group, map.group, map.scale_type};
}

// Call f with the kind of a map's codes, as a compile-time constant.
template <class F> void dispatch_kind(const Map& map, F&& f) {
    const auto is = [&](auto kind) { return kind_of(map.bits, map.table) == kind && (f(kind), true); };
    is(std::integral_constant<int, 4>{}) || is(std::integral_constant<int, 5>{}) || is(std::integral_constant<int, 6>{}) ||
        is(std::integral_constant<int, 8>{}) || is(std::integral_constant<int, kind_of(4, E2M1)>{}) ||
        is(std::integral_constant<int, kind_of(4, IQ4)>{});
}

// Functions here are `inline`, so that the compiler inlines them like members that are defined in the class.

// The normalised listed rows as the input of some maps, rounded to codes or laid out for tiles as the maps need.
template <class T>
inline auto Runner<T>::normed_input(
    const Norm& norm, const RowList& list, const T* from, const Map* maps, int n_maps, int thread) -> Input {
    const int n = pass_.n_hidden;
    const Map *packed = nullptr, *plain = nullptr;
    for (const Map* map = maps; map < maps + n_maps; map++) (map->scales ? packed : plain) = map;
    const Input input = prepare_input(list.n, thread, [&](const Input& input, int64_t i) {
        normalise(norm, from + int64_t(row_of(list, i)) * n, n, input.rows + i * n);
        if (packed) quantise_row(input, input.rows + i * n, *packed, i);
    });
    return plain ? tiled_input(input, *plain, list.n, thread) : input;
}

// Rows as a map's input without a norm, rounded to codes or laid out for tiles as the map needs.
template <class T> inline auto Runner<T>::map_input(T* rows, const Map& map, int64_t n, int thread) -> Input {
    if (!map.scales) return tiled_input({rows, {}, nullptr, nullptr}, map, n, thread);
    Input input = prepare_input(n, thread, [&](const Input& to, int64_t i) {
        quantise_row(to, rows + i * map.n_in, map, i);
    });
    return {rows, input.codes, nullptr, nullptr};
}

// An input whose rows are also laid out for tiles, if the map is computed with tiles.
template <class T> inline auto Runner<T>::tiled_input(Input input, const Map& map, int64_t n, int thread) -> Input {
#if defined(WITH_TILES)
    if constexpr (TILES) {
        if (map.scales) return input;
        input.tiled = inputs_[n <= FEW_ROWS ? thread : n_threads_].tiled;
        const int k = map.n_in, whole = whole_tiles(k), n_chunks = (whole + CACHED_INPUTS - 1) / CACHED_INPUTS;
        auto lay_out = [&](int64_t item) {
            const int64_t row = item / n_chunks * SIDE;
            const int from = int(item % n_chunks) * CACHED_INPUTS, m = int(std::min<int64_t>(SIDE, n - row));
            tile_rows(input.rows + row * k, k, m, k, from, std::min(from + CACHED_INPUTS, whole), input.tiled + row * whole);
        };
        if (n > FEW_ROWS)
            parallel_for(REST, thread, whole_sides(n) / SIDE * n_chunks, 1, [&](int64_t item, int64_t) { lay_out(item); });
        else
            for (int item = 0; item < n_chunks; item++) lay_out(item);
    }
#endif
    return input;
}

// Round a row to the codes of an input, in the order of the map's inputs.
template <class T> inline void Runner<T>::quantise_row(const Input& input, const T* x, const Map& map, int64_t row) {
    if (map.order) {
        T* ordered = input.ordered + row * map.n_in;
        for (int i = 0; i < map.n_in; i++) ordered[i] = x[map.order[i]];
        x = ordered;
    }
    const ActivationCodes to = input.codes.at(row, map.n_in, map.group);
    quantise(x, map.n_in, std::max(map.group, MIN_GROUP), to.codes, to.scales, to.sums, to.halves);
}

// Compute outputs [first, last) of a map, with their biases, for `rows` rows of `x`, to `c`. `next`: the output that
// this thread will probably compute next; if it has no map, the same map's output after those of all other threads.
template <class T>
inline void Runner<T>::outputs(
    const Map& map, const Input& x, int rows, int first, int last, float* c, int64_t ldc, int thread,
    Output next) const {
    if (!next.map) next = {&map, first + n_threads_ * (last - first)};
    if (map.scales) {
        const Packed packed = packed_of(map);
        const int b0 = first / OUTPUTS, b1 = (last + OUTPUTS - 1) / OUTPUTS;
        dispatch_kind(map, [&](auto kind) {
            packed_products<kind>(
                packed, x.codes, rows, b0, b1, c, ldc, prefetch_of(next), cache_aligned(scratch[thread].items));
        });
    } else {
        const T* weight = (const T*)map.weight + first * map.stride;
#if defined(WITH_TILES)
        if constexpr (TILES) tile_products(x.tiled, rows, weight, map.stride, last - first, map.n_in, c, ldc);
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

template <class T> inline Prefetch Runner<T>::prefetch_of(const Output& next) {
    if (!next.map->scales) return {};
    const Packed packed = packed_of(*next.map);
    const int block = next.number / OUTPUTS;
    return {packed.codes + block * (packed.block_bytes() * next.map->bits / 8), packed.scales_at(block)};
}

// Compute all outputs of a map, and call `sink(row, first output, n, values)` for them, panel by panel.
template <class T>
template <class F>
inline void Runner<T>::linear(const Map& map, const Input& x, int64_t rows, int thread, F&& sink) {
    const int size = rows > MAX_STREAMED_ROWS && map.n_out >= 8 * PANEL * n_threads_ ? 2 * PANEL : PANEL;
    parallel_for(MAPS, thread, (map.n_out + size - 1) / size, 1, [&](int64_t panel, int64_t) {
        auto& tile = tiles[thread];
        const int first = int(panel) * size, last = std::min(first + size, map.n_out);
        outputs(map, x, int(rows), first, last, tile.items, size, thread);
        for (int r = 0; r < rows; r++) sink(r, first, last - first, tile.items + r * size);
    });
}

// Add a map's outputs, normalised if there is a norm, times `scale` to the states of the listed rows.
template <class T>
inline void Runner<T>::add_to_residual(
    const Map& map, const Norm& norm, float scale, const Input& x, const RowList& list, int thread) {
    const int n = pass_.n_hidden;
    auto scaled = [&](vf v) { return scale == 1 ? v : as_stored<T>(v * scale); };
    linear(map, x, list.n, thread, [&](int row, int first, int n_out, const float* values) {
        if (norm.kind == NO_NORM) {
            T* to = hidden(row_of(list, row)) + first;
            transform(n_out, to, to, [&](vf h, int at) { return h + scaled(as_stored<T>(part_of(values, at, n_out))); });
        } else {
            T* to = inputs_.last().rows + int64_t(row) * n + first;
            round_to(to, values, n_out);
        }
    });
    if (norm.kind == NO_NORM) return;
    parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) { add_normed(norm, scale, list, i); });
}

// Add the norm of row i of the last input, times `scale`, to the state of the i-th listed row.
template <class T> inline void Runner<T>::add_normed(const Norm& norm, float scale, const RowList& list, int64_t i) {
    const int n = pass_.n_hidden;
    T *delta = inputs_.last().rows + i * n, *to = hidden(row_of(list, i));
    normalise(norm, delta, n, delta);
    transform(n, to, to, [&](vf h, int at) {
        const vf d = part_of(delta, at, n);
        return h + (scale == 1 ? d : as_stored<T>(d * scale));
    });
}

// Compute several maps of one input to `inner_`, outputs one after the other; threads take panels of all maps. Returns the
// number of outputs per row.
template <class T>
inline int Runner<T>::project(const Map* maps, int n_maps, const Input& input, const RowList& list, int thread) {
    int total = 0, n_panels = 0, panels[4];
    for (int i = 0; i < n_maps; i++) total += maps[i].n_out, panels[i] = n_panels += (maps[i].n_out + PANEL - 1) / PANEL;
    parallel_for(MAPS, thread, n_panels, 1, [&](int64_t panel, int64_t) {
        int map = 0, at = 0;
        while (panel >= panels[map]) at += maps[map++].n_out;
        const int first = int(panel - (map ? panels[map - 1] : 0)) * PANEL;
        const int last = std::min(first + PANEL, maps[map].n_out);
        auto& tile = tiles[thread];
        outputs(maps[map], input, int(list.n), first, last, tile.items, PANEL, thread);
        for (int64_t r = 0; r < list.n; r++) round_to(inner_ + r * total + at + first, tile.items + r * PANEL, last - first);
    });
    return total;
}

template <class T> inline void Runner<T>::logits(const Map& map, const RowList& list, int thread) {
    const Norm none{};
    const Input input = normed_input(pass_.norm ? *pass_.norm : none, list, (const T*)pass_.hidden, &map, 1, thread);
    T* out = (T*)pass_.logits;
    linear(map, input, list.n, thread, [&](int row, int first, int n_out, const float* values) {
        round_to(out + int64_t(row) * map.n_out + first, values, n_out);
    });
}

}  // namespace
