// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), computed on the latents; a part of `pass.cpp`.
//
// All heads read the same key of a slot, which is a rotated part and the latent. Each head has two maps: from the
// unrotated part of its query to the latent's space, and from its sum of latents to its output. In the model's maps a head's
// rotated values come last; here they come first, as in other families.
#pragma once
#include "runner.h"

namespace {

// Apply each head's map to its rows, which `batches_` lists; call `sink(row, head, first output, n, values)` for all outputs.
template <class T> template <class F>
void Runner<T>::map_heads(const Map* maps, int64_t n, int thread, F&& sink) {
    const int64_t panels = ceil_div(maps->n_out, PANEL);
    parallel_for(REST, thread, batches_.n, 1, [&](int64_t s, int64_t) {
        prepare(input_of(expert_rows_.rows, batches_[s]), batches_[s], maps[batches_[s].expert]);
    });
    parallel_for(MAPS, thread, batches_.n * panels, 1, [&](int64_t item, int64_t) {
        const ExpertBatch& batch = batches_[item / panels];
        const Map& map = maps[batch.expert];
        const int first = int(item % panels) * PANEL, last = std::min(first + PANEL, map.n_out);
        auto& tile = tiles[thread];
        outputs(map, input_of(expert_rows_.rows, batch), int(n), first, last, tile.items, PANEL, thread);
        for (int r = 0; r < n; r++) sink(r, batch.expert, first, last - first, tile.items + r * PANEL);
    });
}

// Compute the heads' queries and their common key in `heads_`, from the projections' outputs in `inner_`, `total` values per
// row. Returns the number of values per row in `heads_`.
template <class T>
int Runner<T>::make_heads(const Attention& part, int total, const RowList& list, int thread) {
    const int width = part.width, rotary = part.rotary, kept = part.key_maps->n_in, rank = part.key_maps->n_out;
    const int size = kept + rotary, made = (part.n_heads + 1) * width;
    const int latent_at = part.query_map.n_in ? part.query_map.n_in : part.n_heads * size;
    parallel_for(REST, thread, 1, 1, [&](int64_t, int64_t) {
        batches_.clear();
        const int64_t places = ceil_div(whole_sides(list.n) * part.padded_width(), expert_stride_);
        for (int h = 0; h < part.n_heads; h++) batches_.add({h, int32_t(list.n), h * places});
    });
    // Distribute n values of a row's queries, from index `first` on: rotated ones to `heads_`, others to their head's rows.
    auto put = [&](int64_t row, int first, int n, auto&& copy) {
        for (int done = 0; done < n;) {
            const int head = (first + done) / size, at = (first + done) % size;
            const int n_piece = std::min(n - done, (at < kept ? kept : size) - at);
            T* to = at < kept ? input_of(expert_rows_.rows, batches_[head]).rows + row * kept + at
                              : heads_ + row * made + head * width + at - kept;
            copy(to, done, n_piece);
            done += n_piece;
        }
    };
    if (part.query_map.n_in) {
        const Map& map = part.query_map;
        const Input latent = prepare_input(list.n, thread, [&](const Input& input, int64_t i) {
            normalise(part.query_norm, inner_ + i * total, map.n_in, input.rows + i * map.n_in);
            if (map.scales) quantise_row(input, input.rows + i * map.n_in, map, i);
        });
        linear(map, map.scales ? latent : tiled_input(latent, map, list.n, thread), list.n, thread,
               [&](int row, int first, int n, const float* values) {
                   put(row, first, n, [&](T* to, int from, int n_piece) { round_to(to, values + from, n_piece); });
               });
    }
    parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const T* from = inner_ + i * total;
        if (!part.query_map.n_in)
            put(i, 0, latent_at, [&](T* to, int at, int n_piece) { memcpy(to, from + at, n_piece * sizeof(T)); });
        T* key = heads_ + i * made + part.key_at;
        memcpy(key, from + latent_at + rank, rotary * sizeof(T));
        normalise(part.key_norm, from + latent_at, rank, key + rotary);
    });
    map_heads(part.key_maps, list.n, thread, [&](int row, int head, int first, int n, const float* values) {
        round_to(heads_ + int64_t(row) * made + head * width + rotary + first, values, n);
    });
    return made;
}

// Compute the heads' outputs in `mixed_`, from their sums of keys in `inner_`.
template <class T> void Runner<T>::map_latents(const Attention& part, int64_t n, int thread) {
    const int rank = part.value_maps->n_in, n_out = part.value_maps->n_out;
    parallel_for(REST, thread, batches_.n, 1, [&](int64_t s, int64_t) {
        T* to = input_of(expert_rows_.rows, batches_[s]).rows;
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * rank, inner_ + (i * part.n_heads + s) * part.width + part.rotary, rank * sizeof(T));
    });
    map_heads(part.value_maps, n, thread, [&](int row, int head, int first, int n_values, const float* values) {
        round_to(mixed_ + (int64_t(row) * part.n_heads + head) * n_out + first, values, n_values);
    });
}

}  // namespace
