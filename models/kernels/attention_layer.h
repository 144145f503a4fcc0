// The attention layer: projections, norms, rotation, storing keys and values, and the heads' outputs; a part of `pass.cpp`.
#pragma once
#include "coded_slots.h"
#include "latents.h"

namespace {

// Rotate a head's first values. Products are rounded to the type of the tables.
template <class T, class C>
inline void rotate(const Rotation& rotation, const T* x, const C* cos, const C* sin, T* to) {
    const int n = rotation.width, half = n / 2;
    if (rotation.pairs ? n % LANES == 0 : half % LANES == 0) {
        for (int d = 0; d < n; d += LANES) {
            const vf partner = rotation.pairs ? swap_pairs(load(x + d)) : load(x + (d < half ? d + half : d - half));
            store(to + d, as_stored<C>(load(x + d) * load(cos + d)) + as_stored<C>(partner * load(sin + d)));
        }
    } else {
        for (int d = 0; d < n; d++) {
            const T partner = x[rotation.pairs ? d ^ 1 : d < half ? d + half : d - half];
            const float sine_part = as_stored<C>(to_float(partner) * to_float(sin[d]));
            to[d] = rounded<T>(as_stored<C>(to_float(x[d]) * to_float(cos[d])) + sine_part);
        }
    }
}

// Normalise one head, and rotate its first values. `when`: a HeadNorm.
template <class T>
inline void prepare_head(
    Norm norm, int32_t when, int head, const T* from, int width, const Rotation* rotation, int position, T* to) {
    norm.weight = norm.weight ? (const T*)norm.weight + head * norm.step : nullptr;
    norm.bias = norm.bias ? (const T*)norm.bias + head * norm.step : nullptr;
    T values[MAX_HEAD_WIDTH];
    if (when == BY_HEAD) normalise(norm, from, width, values);
    else memcpy(values, from, width * sizeof(T));
    int rotated = 0;
    if (rotation) {
        rotated = rotation->width;
        const int64_t at = int64_t(position) * rotated;
        if (rotation->wide) rotate(*rotation, values, (const float*)rotation->cos + at, (const float*)rotation->sin + at, to);
        else rotate(*rotation, values, (const T*)rotation->cos + at, (const T*)rotation->sin + at, to);
    }
    memcpy(to + rotated, values + rotated, (width - rotated) * sizeof(T));
    if (when == ROTATED) normalise(norm, to, width, to);
}

// The split of attention that should take least time. Transposing keys and values costs about as much as four heads' sums.
template <class T>
auto Runner<T>::plan_split(const List<Segment>& segments, int n_kv_heads, int group) const -> Split {
    int64_t longest = 1;
    for (const Segment& rows : segments) longest = std::max(longest, rows.n);
    Split best{};
    int64_t least = INT64_MAX;
    for (int n_head_groups = 1; n_head_groups <= group; n_head_groups++) {
        const int n_heads = (group + n_head_groups - 1) / n_head_groups;
        if (n_heads > MAX_HEADS || (group + n_heads - 1) / n_heads != n_head_groups) continue;
        for (int n_rows = 1; n_rows == 1 || (n_rows * n_heads <= MAX_HEADS && n_rows < 2 * longest); n_rows *= 2) {
            int64_t n = 0;
            for (const Segment& rows : segments) n += ceil_div(rows.n, n_rows) * n_kv_heads * n_head_groups;
            const int64_t rounds = (n + n_threads_ - 1) / n_threads_, work = rounds * (n_rows * n_heads + 4);
            if (work < least) least = work, best = {n_rows, n_heads, n_head_groups, n};
        }
    }
    return best;
}

// The copies in 4 bits of a key head's slots that a sequence's rows read in a layer.
inline CodedHead coded_head(const Sequence& sequence, const Step& step, int kv, int width) {
    if (step.window || !sequence.n_coded) return {nullptr, 0};
    return {(const uint8_t*)sequence.coded[step.layer] + kv * sequence.coded_units * unit_bytes(width), sequence.n_coded};
}

template <class T>
void Runner<T>::attention(const Step& step, const Attention& part, const RowList& list, int thread) {
    const Input input = normed_input(
        part.before, list, (const T*)pass_.hidden, part.projections, part.n_projections, thread);
    int total = project(part.projections, part.n_projections, input, list, thread);
    const T* heads = inner_;
    if (part.head_norm == LATENT) total = make_heads(part, total, list, thread), heads = heads_;
    if (part.head_norm == WHOLE) {
        norm_rows(part.query_norm, inner_ + part.query_at, total, part.n_heads * part.width, list.n, thread);
        norm_rows(part.key_norm, inner_ + part.key_at, total, part.n_kv_heads * part.width, list.n, thread);
    }
    if (part.clip > 0)
        parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            const vf least = splat(-part.clip), most = splat(part.clip);
            transform(total, inner_ + i * total, inner_ + i * total, [&](vf v, int) {
                return blend(v < least, least, blend(v > most, most, v));
            });
        });
    const int width = part.width, group = part.n_heads / part.n_kv_heads, q_size = part.n_heads * width;
    // Prepare queries in `mixed_`, and write keys and values to the buffer, head by head.
    const int per_row = part.n_heads + (part.reads_shared_kv ? 0 : part.n_kv_heads);
    parallel_for(REST, thread, list.n * per_row, list.n > FEW_ROWS ? per_row : 1, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; item++) {
            const int64_t i = item / per_row;
            const int row = row_of(list, i), h = int(item % per_row), kv = h - part.n_heads;
            const T* projected = heads + i * total;
            const Rotation* rotation = step.rotation < 0 ? nullptr : pass_.rotations + step.rotation;
            const int position = pass_.positions[row];
            if (kv < 0) {
                T* to = mixed_ + i * q_size + h * width;
                const T* from = projected + part.query_at + h / group * part.query_step + h % group * width * (1 + part.gated);
                if (part.gated) memcpy(gates_ + i * q_size + h * width, from + width, width * sizeof(T));
                prepare_head(part.query_norm, part.head_norm, h, from, width, rotation, position, to);
                if (rotation && rotation->query_scale) {
                    const void* scales = rotation->query_scale;
                    const float scale = rotation->wide ? ((const float*)scales)[position] : to_float(((const T*)scales)[position]);
                    transform(width, to, to, [&](vf v, int) { return v * scale; });
                }
            } else {
                const Sequence& sequence = pass_.sequences[places_[row].sequence];
                const int64_t to = (kv * sequence.capacity + places_[row].slot) * width;
                prepare_head(part.key_norm, part.head_norm, kv, projected + part.key_at + kv * part.key_step, width, rotation,
                             position, (T*)sequence.keys[step.layer] + to);
                if (part.value_step)
                    normalise(part.value_norm, projected + part.value_at + kv * part.value_step, width,
                           (T*)sequence.values[step.layer] + to);
            }
        }
    });
    const View* view = nullptr;
    for (auto& candidate : views_)
        if (candidate.window == step.window) view = &candidate;
    const List<Segment>& segments = segments_[step.rows];
    const Split split = plan_split(segments, part.n_kv_heads, group);
    // The heads' outputs overwrite the projections' outputs in `inner_`.
    parallel_for(SLOTS, thread, split.n, 1, [&](int64_t item, int64_t) {
        const int head_group = int(item % split.n_head_groups), kv = int(item / split.n_head_groups % part.n_kv_heads);
        int64_t chunk = item / split.n_head_groups / part.n_kv_heads;
        const Segment* segment = segments.items;  // the rows of one sequence
        for (; chunk >= ceil_div(segment->n, split.n_rows); segment++) chunk -= ceil_div(segment->n, split.n_rows);
        const int64_t from = segment->first + chunk * split.n_rows;
        const int first_head = head_group * split.n_heads;
        const int n_rows = int(std::min<int64_t>(split.n_rows, segment->first + segment->n - from));
        const Sequence& sequence = pass_.sequences[segment->sequence];
        const int64_t head = kv * sequence.capacity * width;
        AttentionRow<T> rows[MAX_HEADS];
        for (int r = 0; r < n_rows; r++) {
            const int row = row_of(list, from + r);
            const int64_t at = (from + r) * q_size + (kv * group + first_head) * width;
            const Run* runs = view->runs.items;
            rows[r] = {runs + view->first[row], runs + view->first[row + 1], view->oldest[row], view->n_seen[row],
                       mixed_ + at, inner_ + at, part.sinks ? (const T*)part.sinks + kv * group + first_head : nullptr};
        }
        attend(rows, n_rows, std::min(split.n_heads, group - first_head), width, part.scaling, part.softcap,
               (const T*)sequence.keys[step.layer] + head, (const T*)sequence.values[step.layer] + head,
               coded_head(sequence, step, kv, width), cache_aligned(scratch[thread].items));
    });
    if (part.gated)
        parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            transform(q_size, inner_ + i * q_size, inner_ + i * q_size, [&](vf v, int at) {
                return v * as_stored<T>(splat(1.0f) / (exp(-part_of(gates_ + i * q_size, at, q_size)) + 1.0f));
            });
        });
    if (part.head_norm == LATENT) map_latents(part, list.n, thread);
    T* read = part.head_norm == LATENT ? mixed_ : inner_;
    norm_rows(part.inner, read, q_size, q_size, list.n, thread);
    add_to_residual(part.out, part.after, part.added_scale, map_input(read, part.out, list.n, thread), list, thread);
}

}  // namespace
