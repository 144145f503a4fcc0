// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), computed on the latents; a part of `pass.cpp`.
//
// All heads read the same key of a slot, which is a rotated part and the latent. Each head has two maps of its own: from the
// unrotated part of its query to the latent's space, and from its sum of latents to its output. In the model's maps a head's
// rotated values come last; here they come first, as in other families.
#pragma once
#include "runner.h"

namespace {

// Apply each head's map to its rows, which `shares_` lists; call `sink(row, head, first output, n, values)` for all outputs.
template <class T> template <class F>
void Runner<T>::map_heads(const Map* maps, int64_t n, int thread, F&& sink) {
    const int64_t panels = chunks_of(maps->n_out, PANEL);
    each(REST, thread, shares_.n, 1, [&](int64_t s, int64_t) {
        prepare(input_of(taken_.rows, shares_[s]), shares_[s], maps[shares_[s].expert]);
    });
    each(MAPS, thread, shares_.n * panels, 1, [&](int64_t item, int64_t) {
        const Share& share = shares_[item / panels];
        const Map& map = maps[share.expert];
        const int first = int(item % panels) * PANEL, last = std::min(first + PANEL, map.n_out);
        auto& tile = tiles[thread];
        outputs(map, input_of(taken_.rows, share), int(n), first, last, tile.items, PANEL, thread);
        for (int r = 0; r < n; r++) sink(r, share.expert, first, last - first, tile.items + r * PANEL);
    });
}

// Compute the heads' queries and their common key in `heads_`, from the projections' outputs in `inner_`, `total` values per
// row. Returns the number of values per row in `heads_`.
template <class T>
int Runner<T>::make_heads(const Attention& part, int total, const RowList& list, int thread) {
    const int width = part.width, rotary = part.rotary, kept = part.of_keys->n_in, rank = part.of_keys->n_out;
    const int size = kept + rotary, made = (part.n_heads + 1) * width;
    const int latent_at = part.of_queries.n_in ? part.of_queries.n_in : part.n_heads * size;
    each(REST, thread, 1, 1, [&](int64_t, int64_t) {
        shares_.clear();
        const int64_t places = chunks_of(whole_sides(list.n) * part.room(), wide_);
        for (int h = 0; h < part.n_heads; h++) shares_.add({h, int32_t(list.n), h * places});
    });
    // Distribute n values of a row's queries, from index `first` on: rotated ones to `heads_`, others to their head's rows.
    auto put = [&](int64_t row, int first, int n, auto&& copy) {
        for (int done = 0; done < n;) {
            const int head = (first + done) / size, at = (first + done) % size;
            const int n_piece = std::min(n - done, (at < kept ? kept : size) - at);
            T* to = at < kept ? input_of(taken_.rows, shares_[head]).rows + row * kept + at
                              : heads_ + row * made + head * width + at - kept;
            copy(to, done, n_piece);
            done += n_piece;
        }
    };
    if (part.of_queries.n_in) {
        const Map& map = part.of_queries;
        const Input latent = prepared(list.n, thread, [&](const Input& input, int64_t i) {
            normed(part.query_norm, inner_ + i * total, map.n_in, input.rows + i * map.n_in);
            if (map.scales) round_into(input, input.rows + i * map.n_in, map, i);
        });
        linear(map, map.scales ? latent : turned(latent, map, list.n, thread), list.n, thread,
               [&](int row, int first, int n, const float* values) {
                   put(row, first, n, [&](T* to, int from, int n_piece) { round_to(to, values + from, n_piece); });
               });
    }
    each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const T* from = inner_ + i * total;
        if (!part.of_queries.n_in)
            put(i, 0, latent_at, [&](T* to, int at, int n_piece) { memcpy(to, from + at, n_piece * sizeof(T)); });
        T* key = heads_ + i * made + part.key_at;
        memcpy(key, from + latent_at + rank, rotary * sizeof(T));
        normed(part.key_norm, from + latent_at, rank, key + rotary);
    });
    map_heads(part.of_keys, list.n, thread, [&](int row, int head, int first, int n, const float* values) {
        round_to(heads_ + int64_t(row) * made + head * width + rotary + first, values, n);
    });
    return made;
}

// Compute the heads' outputs in `mixed_`, from their sums of keys in `inner_`.
template <class T> void Runner<T>::read_values(const Attention& part, int64_t n, int thread) {
    const int rank = part.of_values->n_in, n_out = part.of_values->n_out;
    each(REST, thread, shares_.n, 1, [&](int64_t s, int64_t) {
        T* to = input_of(taken_.rows, shares_[s]).rows;
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * rank, inner_ + (i * part.n_heads + s) * part.width + part.rotary, rank * sizeof(T));
    });
    map_heads(part.of_values, n, thread, [&](int row, int head, int first, int n_values, const float* values) {
        round_to(mixed_ + (int64_t(row) * part.n_heads + head) * n_out + first, values, n_values);
    });
}

}  // namespace
