// Heads made of latents, as in DeepSeek-V2 (arXiv:2405.04434); a part of `pass.cpp`.
//
// The model's maps have a head's rotated values last. Here they lie first, as in other families.
#pragma once
#include "runner.h"

namespace {

// Outputs of a map that come head by head: of each head `n_first` and then `n_second`, and where both go.
struct ByHead {
    int n_first, n_second;
    int64_t first_at, first_step, second_at, second_step;

    // The `n` outputs from `output` on: f(where, which of them, how many) for each piece that lies together.
    template <class F> void each(int output, int n, F&& f) const {
        const int size = n_first + n_second;
        for (int done = 0; done < n;) {
            const int head = (output + done) / size, at = (output + done) % size;
            const bool is_first = at < n_first;
            const int some = std::min(n - done, (is_first ? n_first : size) - at);
            f(is_first ? first_at + head * first_step + at : second_at + head * second_step + at - n_first, done, some);
            done += some;
        }
    }
};

// Queries, keys and values of all heads, to `heads_`, from what the projections give, `total` values of each row. Returns how
// many values a row then has.
template <class T>
int Runner<T>::make_heads(const Attention& part, int total, const RowList& list, int thread) {
    const int width = part.width, rotary = part.rotary, kept = width - rotary, all = part.n_heads * width;
    const int made = 2 * all + part.n_heads * part.value_width;
    const Map &of_queries = part.latents[0], &of_keys = part.latents[1];
    const int latent_at = of_queries.n_in ? of_queries.n_in : all;
    const ByHead queries{kept, rotary, part.query_at + rotary, width, part.query_at, width};
    const ByHead keys{kept, part.value_width, part.key_at + rotary, width, part.value_at, part.value_width};
    auto map_latent = [&](const Norm& norm, const Map& map, int at, const ByHead& places) {
        const Input latent = prepared(list.n, thread, [&](const Input& input, int64_t i) {
            T* own = input.rows + i * map.n_in;
            normed(norm, inner_ + i * total + at, map.n_in, own);
            if (map.scales) round_into(input, own, map, i);
        });
        linear(map, map.scales ? latent : turned(latent, map, list.n, thread), list.n, thread,
               [&](int row, int first, int n, const float* values) {
                   places.each(first, n, [&](int64_t to, int from, int some) {
                       round_to(heads_ + int64_t(row) * made + to, values + from, some);
                   });
               });
    };
    if (of_queries.n_in) map_latent(part.query_norm, of_queries, 0, queries);
    map_latent(part.key_norm, of_keys, latent_at, keys);
    each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const T* from = inner_ + i * total;
        T* to = heads_ + i * made;
        if (!of_queries.n_in)
            queries.each(0, all, [&](int64_t place, int at, int some) { memcpy(to + place, from + at, some * sizeof(T)); });
        for (int h = 0; h < part.n_heads; h++)
            memcpy(to + part.key_at + h * width, from + latent_at + of_keys.n_in, rotary * sizeof(T));
    });
    return made;
}

// What heads read of values that are narrower than keys, one after the other: from `inner_` to `mixed_`, which is returned.
template <class T> T* Runner<T>::narrow_values(const Attention& part, int64_t n, int thread) {
    each(REST, thread, n * part.n_heads, part.n_heads, [&](int64_t first, int64_t last) {
        for (int64_t head = first; head < last; head++)
            memcpy(mixed_ + head * part.value_width, inner_ + head * part.width, part.value_width * sizeof(T));
    });
    return mixed_;
}

}  // namespace
