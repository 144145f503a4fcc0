// Token mixers in place of attention: convolutions and recurrences; a part of `pass.cpp`.
//
// Inputs are stored in slots, as keys are. A row reads the slots of the last tokens that it sees; a node of a tree reads those of
// its ancestors. So rejected rows leave no trace.
#pragma once
#include "selective.h"

namespace {

template <class T>
void Runner<T>::convolution(const Step& step, const Convolution& part, const RowList& list, int thread) {
    const int n = pass_.n_hidden, total = 3 * n;
    const Input input = normed_input(part.before, list, (const T*)pass_.hidden, &part.into, 1, thread);
    linear(part.into, input, list.n, thread, [&](int row, int first, int n_out, const float* values) {
        round_to(inner_ + int64_t(row) * total + first, values, n_out);
    });
    parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const Place& place = places_[row_of(list, i)];
        const T* in = inner_ + i * total;
        transform(n, in, (T*)pass_.sequences[place.sequence].keys[step.layer] + int64_t(place.slot) * n,
              [&](vf gate, int at) { return gate * part_of(in + 2 * n, at, n); });
    });
    parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const Place& place = places_[row_of(list, i)];
        const Sequence& sequence = pass_.sequences[place.sequence];
        const int64_t row = place.slot - sequence.first_slot, end = sequence.first_slot + sequence.n_rows;
        const uint8_t* row_mask = sequence.visible ? sequence.visible + row * end : nullptr;
        const T *read[MAX_TAPS], *slots = (const T*)sequence.keys[step.layer];  // newest first
        int n_read = 0;
        for (int64_t slot = place.slot; slot >= 0 && n_read < part.n_taps; slot--)
            if (slot == place.slot || !row_mask || row_mask[slot]) read[n_read++] = slots + slot * n;
        transform(n, inner_ + i * total + n, mixed_ + i * n, [&](vf gate, int at) {
            vf mixed = {};
            for (int tap = n_read - 1; tap >= 0; tap--) {
                const float* weights = part.taps + int64_t(part.n_taps - 1 - tap) * n;
                mixed = fma(part_of(read[tap], at, n), part_of(weights, at, n), mixed);
            }
            if (part.bias) mixed += part_of(part.bias, at, n);
            return gate * as_stored<T>(mixed);
        });
    });
    add_to_residual(part.out, part.after, part.added_scale, map_input(mixed_, part.out, list.n, thread), list, thread);
}

// The gated delta rule (arXiv:2412.06464), and the state space of Mamba-2 (arXiv:2405.21060). A delta rule corrects what the
// decayed state returns for a row's key; a state space adds to the state without such a correction. A head's state,
// (key_width, value_width), is updated row by row with the same order of operations, whether a row's inputs come from this pass
// or from the ring of earlier passes.

static constexpr int TEXT_CHUNK = 16;  // rows of text that update some columns at a time, which then stay in the nearest cache

static inline void scale_to_unit(float* x, int n, float scale) {
    vf squares = {};
    for (int i = 0; i < n; i += LANES) squares = fma(part_of(x, i, n), part_of(x, i, n), squares);
    const float factor = 1.0f / std::sqrt(sum(squares) + 1e-6f) * scale;
    for (int i = 0; i < n; i++) x[i] *= factor;
}

// The query and the key of a key head, for the last of `n_read` rows.
template <class T> static void make_query_and_key(
    const Recurrence& part, int key_head, const T* const* rows, int n_read, float* query, float* key) {
    const int n = part.key_width, first = key_head * n;
    convolve(part, rows, n_read, first, n, query);
    convolve(part, rows, n_read, part.n_key_heads * n + first, n, key);
    if (part.skip) return;
    scale_to_unit(query, n, 1.0f / std::sqrt(float(n)));
    scale_to_unit(key, n, 1.0f);
}

// A head's update by the last of `n_read` rows. `shared`: the row's queries and keys; null: compute them here. `steps`: the steps
// of its values; null: heads have steps.
template <class T> static void make_update(
    const Recurrence& part, int head, const T* const* rows, int n_read, const float* shared, const T* steps, Update& to) {
    if (steps) return make_selective_update(part, head, rows, n_read, steps, to);
    const int keys = part.n_key_heads * part.key_width, key_head = head / (part.n_heads / part.n_key_heads);
    if (shared) {
        memcpy(to.query, shared + key_head * part.key_width, part.key_width * sizeof(float));
        memcpy(to.key, shared + keys + key_head * part.key_width, part.key_width * sizeof(float));
    } else {
        make_query_and_key(part, key_head, rows, n_read, to.query, to.key);
    }
    convolve(part, rows, n_read, 2 * keys + head * part.value_width, part.value_width, to.value);
    const T* numbers = rows[n_read - 1] + part.n_convolved();
    to.corrects = !part.skip, to.decays = nullptr;
    if (to.corrects) {
        to.amount = as_stored<T>(1.0f / (1.0f + std::exp(-to_float(numbers[head]))));
        numbers += part.n_heads;
    }
    const float before = to_float(numbers[head]) * part.step_scale + part.step_bias[head];
    const float step = before > 20.0f ? before : std::log1p(std::exp(before));
    const float bounded = std::min(std::max(step, part.min_step), part.max_step);
    to.decay = std::exp(part.decay[head] * bounded);
    if (!to.corrects) to.amount = bounded, to.skip = part.skip[head];
}

// Apply the updates of `n` rows to some columns of a state. `read`: null or (n, value_width), what each row's query reads after
// its update. One pass over the columns per row updates them, and retrieves what the next row's key finds after its decay.
template <int D> static inline void correct_columns(
    const Update* updates, int n, float* state, int n_keys, int n_values, int first, float* read) {
    vf retrieved[D] = {}, change[D];
    const vf first_decay = splat(updates->decay);
    for (int k = 0; k < n_keys; k++) {
        float* row = state + int64_t(k) * n_values + first;
        for (int d = 0; d < D; d++) {
            const vf v = load((const float*)row + d * LANES) * first_decay;
            store(row + d * LANES, v);
            retrieved[d] = fma(v, splat(updates->key[k]), retrieved[d]);
        }
    }
    for (int i = 0; i < n; i++) {
        const Update &update = updates[i], &next = updates[std::min(i + 1, n - 1)];
        const vf decay = splat(i + 1 < n ? next.decay : 1.0f);
        vf out[D] = {};
        for (int d = 0; d < D; d++) {
            change[d] = (load(update.value + first + d * LANES) - retrieved[d]) * update.amount;
            retrieved[d] = vf{};
        }
        for (int k = 0; k < n_keys; k++) {
            float* row = state + int64_t(k) * n_values + first;
            for (int d = 0; d < D; d++) {
                vf v = fma(splat(update.key[k]), change[d], load((const float*)row + d * LANES));
                out[d] = fma(v, splat(update.query[k]), out[d]);
                v = v * decay;
                store(row + d * LANES, v);
                retrieved[d] = fma(v, splat(next.key[k]), retrieved[d]);
            }
        }
        if (read)
            for (int d = 0; d < D; d++) store(read + i * n_values + first + d * LANES, out[d]);
    }
}

// The same for a state space.
template <int D> static inline void add_columns(
    const Update* updates, int n, float* state, int n_keys, int n_values, int first, float* read) {
    for (int i = 0; i < n; i++) {
        const Update& update = updates[i];
        const vf decay = splat(update.decay);
        vf change[D], out[D] = {};
        for (int d = 0; d < D; d++) change[d] = load(update.value + first + d * LANES) * update.amount;
        for (int k = 0; k < n_keys; k++) {
            float* row = state + int64_t(k) * n_values + first;
            for (int d = 0; d < D; d++) {
                const vf v = fma(splat(update.key[k]), change[d], load((const float*)row + d * LANES) * decay);
                store(row + d * LANES, v);
                out[d] = fma(v, splat(update.query[k]), out[d]);
            }
        }
        for (int d = 0; read && d < D; d++)
            store(read + i * n_values + first + d * LANES,
                  fma(load(update.value + first + d * LANES), splat(update.skip), out[d]));
    }
}

template <int D, bool CORRECTS> static inline void update_columns(
    const Update* updates, int n, float* state, int n_keys, int n_values, int first, float* read) {
    if constexpr (CORRECTS) correct_columns<D>(updates, n, state, n_keys, n_values, first, read);
    else add_columns<D>(updates, n, state, n_keys, n_values, first, read);
}

template <bool CORRECTS>
static inline void update_column(const Update& update, float* state, int n_keys, int n_values, int v, float* read) {
    float retrieved = 0, out = CORRECTS ? 0 : update.value[v] * update.skip;
    for (int k = 0; k < n_keys; k++) {
        float& at = state[int64_t(k) * n_values + v];
        at *= update.decay;
        if (CORRECTS) retrieved = std::fma(at, update.key[k], retrieved);
    }
    const float change = (update.value[v] - retrieved) * update.amount;
    for (int k = 0; k < n_keys; k++) {
        float& at = state[int64_t(k) * n_values + v];
        at = std::fma(update.key[k], change, at);
        out = std::fma(at, update.query[k], out);
    }
    if (read) read[v] = out;
}

template <bool CORRECTS>
static inline void update_state(const Update* updates, int n, float* state, int n_keys, int n_values, float* read) {
    int at = 0;
    for (; at + 4 * LANES <= n_values; at += 4 * LANES)
        update_columns<4, CORRECTS>(updates, n, state, n_keys, n_values, at, read);
    for (; at + LANES <= n_values; at += LANES)
        update_columns<1, CORRECTS>(updates, n, state, n_keys, n_values, at, read);
    for (; at < n_values; at++)
        for (int i = 0; i < n; i++)
            update_column<CORRECTS>(updates[i], state, n_keys, n_values, at, read ? read + i * n_values : nullptr);
}

// Apply the updates of `n` rows, one after the other. `read`: null or (n, value_width). Columns do not depend on each other.
static inline void update_state(const Update* updates, int n, float* state, int n_keys, int n_values, float* read) {
    if (updates->decays) update_selective_state(updates, n, state, n_keys, n_values, read);
    else if (updates->corrects) update_state<true>(updates, n, state, n_keys, n_values, read);
    else update_state<false>(updates, n, state, n_keys, n_values, read);
}

template <class T>
void Runner<T>::recurrence(const Step& step, const Recurrence& part, const RowList& list, int thread) {
    const T* from = step.from_saved ? saved_ : (const T*)pass_.hidden;
    const Input input = normed_input(part.before, list, from, part.projections, part.n_projections, thread);
    const int total = project(part.projections, part.n_projections, input, list, thread), n_inputs = part.n_inputs();
    const List<Segment>& segments = segments_[step.rows];
    const bool codes = part.codes_values(pass_.is_bf16);
    int64_t n_kept_rows = 0;
    for (int64_t p = 0; codes && p < segments.n; p++) n_kept_rows += n_decoded(step, part, pass_.sequences[segments[p].sequence]);
    parallel_for(REST, thread, list.n + n_kept_rows, 1, [&](int64_t i, int64_t) {
        if (i >= list.n) return decode(step, part, i - list.n);
        T* to = updates_ + i * n_inputs;
        for (const int32_t* run = part.runs; run < part.runs + 2 * part.n_runs; to += run[1], run += 2)
            memcpy(to, inner_ + i * total + run[0], run[1] * sizeof(T));
        if constexpr (std::is_same_v<T, bf16>)
            if (codes) trim(updates_ + i * n_inputs, part.n_convolved());
    });
    if (!part.convolves_keys) prepare_selective(step, part, list, thread);
    else parallel_for(REST, thread, list.n * part.n_key_heads, 1, [&](int64_t item, int64_t) {
        const Segment* rows = segments.items;
        while (item / part.n_key_heads >= rows->first + rows->n) rows++;
        if (pass_.sequences[rows->sequence].is_text)
            compute_keys(step, part, list, *rows, item / part.n_key_heads, int(item % part.n_key_heads));
    });
    parallel_for(SLOTS, thread, segments.n * part.n_heads, 1, [&](int64_t item, int64_t) {
        update_head(step, part, list, segments[item / part.n_heads], int(item % part.n_heads), thread);
    });
    const int n_groups = part.n_heads * part.value_width / part.norm_width;
    if (part.skip)
        parallel_for(REST, thread, list.n * n_groups, 1, [&](int64_t item, int64_t) {
            gate_group(part, int(item % n_groups), item / n_groups, total);
        });
    parallel_for(REST, thread, segments.n, 1, [&](int64_t item, int64_t) {
        const Segment& rows = segments[item];
        const Sequence& sequence = pass_.sequences[rows.sequence];
        int32_t* roots = sequence.roots + 2 * step.layer;
        bool is_kept = true;
        if (sequence.visible)
            for (int64_t i = rows.first; i < rows.first + rows.n; i++) {
                const int64_t row = places_[row_of(list, i)].slot - sequence.first_slot;
                is_kept &= !memchr(sequence.visible + row * (sequence.first_slot + sequence.n_rows), 0, sequence.committed);
            }
        for (int64_t i = std::max(rows.first, rows.first + rows.n - sequence.n_kept); is_kept && i < rows.first + rows.n; i++)
            store_inputs(part, updates_ + i * n_inputs,
                         (T*)sequence.inputs[step.layer] +
                             int64_t(places_[row_of(list, i)].slot % sequence.n_kept) * part.kept_width(pass_.is_bf16));
        roots[0] = sequence.is_text ? sequence.first_slot + sequence.n_rows : sequence.committed;
        if (sequence.lag) roots[1] = std::max(roots[1], roots[0] - sequence.lag);
    });
    add_to_residual(part.out, part.after, part.added_scale, map_input(mixed_, part.out, list.n, thread), list, thread);
}

// The index in a list of the row at a slot of this pass. `rows`: the list's segment of its sequence.
template <class T> int64_t Runner<T>::index_of(const RowList& list, const Segment& rows, int64_t slot) const {
    const int first = row_of(list, rows.first);
    const int64_t row = first + slot - places_[first].slot;
    if (!list.rows) return row;
    int64_t low = rows.first, high = rows.first + rows.n - 1;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (row_of(list, middle) < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The inputs of a slot, of a row of this pass or an earlier one.
template <class T> const T* Runner<T>::inputs_at(
    const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t slot) const {
    const Sequence& sequence = pass_.sequences[rows.sequence];
    if (slot >= sequence.first_slot) return updates_ + index_of(list, rows, slot) * part.n_inputs();
    if (!part.codes_values(pass_.is_bf16))
        return (const T*)sequence.inputs[step.layer] + slot % sequence.n_kept * part.n_inputs();
    int64_t at = slot - first_decoded(step, part, sequence);
    for (const Segment* before = segments_[step.rows].items; before < &rows; before++)
        at += n_decoded(step, part, pass_.sequences[before->sequence]);
    return decoded_ + at * part.n_inputs();
}

// Compute the query and key of a key head for a row of text, in `keys_`, once for all heads that share them.
template <class T>
void Runner<T>::compute_keys(
    const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t i, int key_head) {
    const int keys = part.n_key_heads * part.key_width;
    const int64_t slot = places_[row_of(list, i)].slot;
    const T* last[MAX_TAPS];
    int n_read = 0;
    for (int64_t s = std::max<int64_t>(0, slot - part.n_taps + 1); s <= slot; s++)
        last[n_read++] = inputs_at(step, part, list, rows, s);
    float* to = keys_ + i * 2 * keys + key_head * part.key_width;
    make_query_and_key(part, key_head, last, n_read, to, to + keys);
}

template <class T>
void Runner<T>::update_head(
    const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int head, int thread) {
    const Sequence& sequence = pass_.sequences[rows.sequence];
    const int n_keys = part.key_width, n_values = part.value_width;
    const int64_t size = int64_t(n_keys) * n_values, end = sequence.first_slot + sequence.n_rows;
    int total = 0;
    for (int i = 0; i < part.n_projections; i++) total += part.projections[i].n_out;
    float* state = (float*)sequence.states[step.layer] + head * size;
    float* older = sequence.lag ? state + part.n_heads * size : state;
    const int32_t* roots = sequence.roots + 2 * step.layer;
    const int n_shared = 2 * part.n_key_heads * part.key_width;
    auto inputs_at = [&](int64_t slot) { return this->inputs_at(step, part, list, rows, slot); };
    auto steps_at = [&](int64_t slot) { return part.n_low ? value_steps(step, part, list, rows, slot) : nullptr; };
    Update updates[TEXT_CHUNK];
    float read[TEXT_CHUNK * MAX_STATE_WIDTH];
    const T* last[MAX_TAPS];
    // Update the state `into` by text slots from … to - 1. `row`: index in the list of the first one's row, if rows read the
    // state; else -1.
    auto advance = [&](int64_t from, int64_t to, float* into, int64_t row) {
        for (int n = 0; from < to; from += n) {
            n = int(std::min<int64_t>(TEXT_CHUNK, to - from));
            for (int i = 0; i < n; i++) {
                int n_read = 0;
                for (int64_t s = std::max<int64_t>(0, from + i - part.n_taps + 1); s <= from + i; s++)
                    last[n_read++] = inputs_at(s);
                const bool is_shared = sequence.is_text && from + i >= sequence.first_slot && part.convolves_keys;
                const float* shared = is_shared ? keys_ + index_of(list, rows, from + i) * n_shared : nullptr;
                make_update(part, head, last, n_read, shared, steps_at(from + i), updates[i]);
            }
            update_state(updates, n, into, n_keys, n_values, row < 0 ? nullptr : read);
            for (int i = 0; row >= 0 && i < n; i++) store_head(part, head, read + i * n_values, row++, total);
        }
    };
    auto advance_older = [&](int64_t from, int64_t to) {
        if (sequence.lag) advance(from, to, older, -1);
    };
    advance(roots[0], sequence.committed, state, -1);
    advance_older(roots[1], sequence.committed - sequence.lag);
    if (sequence.is_text) {
        const int64_t first = places_[row_of(list, rows.first)].slot;
        advance(first, first + rows.n, state, rows.first);
        advance_older(std::max<int64_t>(roots[1], sequence.committed - sequence.lag), end - sequence.lag);
        return;
    }
    const int64_t older_root = sequence.lag ? std::max<int64_t>(roots[1], sequence.committed - sequence.lag) : sequence.committed;
    float* work = cache_aligned(scratch[thread].items);
    int32_t *path = paths[thread].items, *done = path + paths[thread].capacity / 2;
    int64_t n_done = -1, done_base = -1;
    auto advance_path = [&](int64_t base, int64_t n, float* out) {  // the n-th slot of a path
        int n_read = 0;
        const int64_t n_text = std::max<int64_t>(0, part.n_taps - 1 - n);
        for (int64_t s = std::max<int64_t>(0, base - n_text); s < base; s++) last[n_read++] = inputs_at(s);
        for (int64_t p = std::max<int64_t>(0, n - part.n_taps + 1); p <= n; p++) last[n_read++] = inputs_at(path[p]);
        make_update(part, head, last, n_read, nullptr, steps_at(path[n]), updates[0]);
        update_state(updates, 1, work, n_keys, n_values, out);
    };
    for (int64_t i = rows.first; i < rows.first + rows.n; i++) {
        const int slot = places_[row_of(list, i)].slot;
        const uint8_t* row_mask = sequence.visible ? sequence.visible + int64_t(slot - sequence.first_slot) * end : nullptr;
        const bool sees_all = !row_mask || !memchr(row_mask, 0, sequence.committed);
        const int64_t base = sees_all ? sequence.committed : older_root;
        int64_t n = 0;
        for (int64_t s = base; s < slot; s++)
            if (!row_mask || row_mask[s]) path[n++] = int32_t(s);
        path[n] = slot;
        if (base != done_base || n != n_done || memcmp(path, done, n * sizeof(int32_t))) {
            memcpy(work, sees_all ? state : older, size * sizeof(float));
            for (int64_t p = 0; p < n; p++) advance_path(base, p, nullptr);
        }
        advance_path(base, n, read);
        store_head(part, head, read, i, total);
        done_base = base, n_done = n + 1;
        memcpy(done, path, n_done * sizeof(int32_t));
    }
}

// Store what a row's head has read in `mixed_`; for a delta rule, normalise it and multiply it by its gate.
template <class T> void Runner<T>::store_head(const Recurrence& part, int head, const float* read, int64_t i, int total) {
    const int n = part.value_width;
    if (part.skip) return round_to(mixed_ + (i * part.n_heads + head) * n, read, n);
    vf squares = {};
    for (int at = 0; at < n; at += LANES) {
        const vf v = as_stored<T>(part_of(read, at, n));
        squares = fma(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(n) + part.norm_eps);
    T gates[MAX_STATE_WIDTH], *to = mixed_ + (i * part.n_heads + part.places[head]) * n;
    for (int at = 0; at < n; at++) gates[at] = inner_[i * total + part.gates[head * n + at]];
    for (int at = 0; at < n; at += LANES) {
        const vf unit = as_stored<T>(as_stored<T>(part_of(read, at, n)) * scale), gate = part_of((const T*)gates, at, n);
        const vf normed = as_stored<T>(unit * part_of((const T*)part.norm, at, n));
        store_part(to, normed * (gate / (exp(-gate) + 1.0f)), at, n);
    }
}

// Normalise and gate in `mixed_` what a group of a row's values has read from a state space.
template <class T> void Runner<T>::gate_group(const Recurrence& part, int group, int64_t i, int total) {
    const int n = part.norm_width, first = group * n;
    T* values = mixed_ + i * part.n_heads * part.value_width + first;
    const T* projected = inner_ + i * total;
    auto gate_at = [&](int at) {
        T lanes[LANES] = {};
        for (int lane = 0; lane < std::min(LANES, n - at); lane++) lanes[lane] = projected[part.gates[first + at + lane]];
        vf gate = load((const T*)lanes);
        if (part.gate_scale != 1) gate = as_stored<T>(gate * part.gate_scale);
        return gate / (exp(-gate) + 1.0f);
    };
    auto before_norm = [&](vf v, int at) { return part.gating == GATED_BEFORE_NORM ? v * gate_at(at) : v; };
    float scale = 1;
    if (part.gating != GATED_ALONE) {
        vf squares = {};
        for (int at = 0; at < n; at += LANES) {
            const vf v = before_norm(part_of((const T*)values, at, n), at);
            squares = fma(v, v, squares);
        }
        scale = 1.0f / std::sqrt(sum(squares) / float(n) + part.norm_eps);
    }
    const T* norm = part.norm ? (const T*)part.norm + first : nullptr;
    transform(n, values, values, [&](vf v, int at) {
        if (part.gating == GATED_ALONE) return v * gate_at(at);
        if (part.gating == GATED_AFTER_NORM) return v * scale * part_of(norm, at, n) * gate_at(at);
        return as_stored<T>(before_norm(v, at) * scale) * part_of(norm, at, n);
    });
}

}  // namespace
