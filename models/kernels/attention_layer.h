// Attention: projections, rotation, keys and values to their slots, what heads read; a part of `pass.cpp`.
#pragma once
#include "coded_slots.h"
#include "latents.h"

namespace {

// The rotation of a head's first values. Products are rounded to the type of the tables.
template <class T, class C>
inline void turn(const Rotation& rotation, const T* x, const C* cos, const C* sin, T* to) {
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

// One head: its norm, and the rotation of its first values.
template <class T>
inline void head_of(
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

// The split that should be done first, where turning keys and values costs as much as four heads' sums.
template <class T>
auto Runner<T>::split_of(const List<Part>& parts, int n_kv_heads, int group) const -> Split {
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

// The copies of a key head's slots that the rows of a sequence read in a layer.
inline CodedHead coded_head(const Sequence& sequence, const Step& step, int kv, int width) {
    if (step.window || !sequence.n_coded) return {nullptr, 0};
    return {(const uint8_t*)sequence.coded[step.layer] + kv * sequence.coded_units * unit_bytes(width), sequence.n_coded};
}

template <class T>
void Runner<T>::attention(const Step& step, const Attention& part, const RowList& list, int thread) {
    const Input input = enter(
        part.before, list, (const T*)pass_.hidden, part.projections, part.n_projections, thread);
    int total = project(part.projections, part.n_projections, input, list, thread);
    const T* heads = inner_;
    if (part.head_norm == LATENT) total = make_heads(part, total, list, thread), heads = heads_;
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
    const int per_row = part.n_heads + (part.reads_other ? 0 : part.n_kv_heads);
    each(REST, thread, list.n * per_row, list.n > FEW ? per_row : 1, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; item++) {
            const int64_t i = item / per_row;
            const int row = row_of(list, i), h = int(item % per_row), kv = h - part.n_heads;
            const T* in = heads + i * total;
            const Rotation* rotation = step.rotation < 0 ? nullptr : pass_.rotations + step.rotation;
            const int position = pass_.positions[row];
            if (kv < 0) {
                T* to = mixed_ + i * q_size + h * width;
                const T* from = in + part.query_at + h / group * part.query_step + h % group * width * (1 + part.gated);
                if (part.gated) memcpy(gates_ + i * q_size + h * width, from + width, width * sizeof(T));
                head_of(part.query_norm, part.head_norm, h, from, width, rotation, position, to);
                if (rotation && rotation->query_scale) {
                    const void* scales = rotation->query_scale;
                    const float scale = rotation->wide ? ((const float*)scales)[position] : to_float(((const T*)scales)[position]);
                    along(width, to, to, [&](vf v, int) { return v * scale; });
                }
            } else {
                const Sequence& own = pass_.sequences[places_[row].sequence];
                const int64_t to = (kv * own.capacity + places_[row].slot) * width;
                head_of(part.key_norm, part.head_norm, kv, in + part.key_at + kv * part.key_step, width, rotation, position,
                        (T*)own.keys[step.layer] + to);
                if (part.value_step)
                    normed(part.value_norm, in + part.value_at + kv * part.value_step, width,
                           (T*)own.values[step.layer] + to);
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
        const int64_t head = kv * sequence.capacity * width;
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
               coded_head(sequence, step, kv, width), on_line(scratch[thread].items));
    });
    if (part.gated)
        each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            along(q_size, inner_ + i * q_size, inner_ + i * q_size, [&](vf v, int at) {
                return v * as_stored<T>(splat(1.0f) / (exp(-part_of(gates_ + i * q_size, at, q_size)) + 1.0f));
            });
        });
    if (part.head_norm == LATENT) read_values(part, list.n, thread);
    T* read = part.head_norm == LATENT ? mixed_ : inner_;
    norm_rows(part.inner, read, q_size, q_size, list.n, thread);
    leave(part.out, part.after, part.added_scale, taken(read, part.out, list.n, thread), list, thread);
}

}  // namespace
