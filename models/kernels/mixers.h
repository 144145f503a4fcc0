// What mixes tokens in place of attention; a part of `pass.cpp`.
//
// Inputs lie in slots as keys do. A row reads the slots of the last tokens that it sees: of a tree's node those of its
// ancestors, so that a rejected row leaves no trace.
#pragma once
#include "selective.h"

namespace {

template <class T>
void Runner<T>::convolution(const Step& step, const Convolution& part, const RowList& list, int thread) {
    const int n = pass_.n_hidden, total = 3 * n;
    const Input input = enter(part.before, list, (const T*)pass_.hidden, &part.into, 1, thread);
    linear(part.into, input, list.n, thread, [&](int row, int first, int n_out, const float* values) {
        round_to(inner_ + int64_t(row) * total + first, values, n_out);
    });
    each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const Place& place = places_[row_of(list, i)];
        const T* in = inner_ + i * total;
        along(n, in, (T*)pass_.sequences[place.sequence].keys[step.layer] + int64_t(place.slot) * n,
              [&](vf gate, int at) { return gate * part_of(in + 2 * n, at, n); });
    });
    each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const Place& place = places_[row_of(list, i)];
        const Sequence& own = pass_.sequences[place.sequence];
        const int64_t row = place.slot - own.first_slot, end = own.first_slot + own.n_rows;
        const uint8_t* sees = own.visible ? own.visible + row * end : nullptr;
        const T *read[MOST_TAPS], *slots = (const T*)own.keys[step.layer];  // newest first
        int n_read = 0;
        for (int64_t slot = place.slot; slot >= 0 && n_read < part.n_taps; slot--)
            if (slot == place.slot || !sees || sees[slot]) read[n_read++] = slots + slot * n;
        along(n, inner_ + i * total + n, mixed_ + i * n, [&](vf gate, int at) {
            vf mixed = {};
            for (int tap = n_read - 1; tap >= 0; tap--) {
                const float* weights = part.taps + int64_t(part.n_taps - 1 - tap) * n;
                mixed = fma(part_of(read[tap], at, n), part_of(weights, at, n), mixed);
            }
            if (part.bias) mixed += part_of(part.bias, at, n);
            return gate * as_stored<T>(mixed);
        });
    });
    leave(part.out, part.after, part.added_scale, taken(mixed_, part.out, list.n, thread), list, thread);
}

// The gated delta rule (arXiv:2412.06464), and the state space of Mamba-2 (arXiv:2405.21060), which corrects nothing: a row adds
// to a decayed state whatever this recalls. A head's state, (key_width, value_width), is taken along from row to row by one
// order of operations, wherever a row's inputs come from: this pass, or the ring of an earlier one's.

static constexpr int STRETCH = 16;  // rows of text taken into some columns of a state, which then stay in the nearest cache

static inline void to_unit(float* x, int n, float scale) {
    vf squares = {};
    for (int i = 0; i < n; i += LANES) squares = fma(part_of(x, i, n), part_of(x, i, n), squares);
    const float by = 1.0f / std::sqrt(sum(squares) + 1e-6f) * scale;
    for (int i = 0; i < n; i++) x[i] *= by;
}

// The query and the key of a key head, of the last of `n_read` rows.
template <class T> static void keys_of(
    const Recurrence& part, int key_head, const T* const* rows, int n_read, float* query, float* key) {
    const int n = part.key_width, first = key_head * n;
    convolve(part, rows, n_read, first, n, query);
    convolve(part, rows, n_read, part.n_key_heads * n + first, n, key);
    if (part.skip) return;
    to_unit(query, n, 1.0f / std::sqrt(float(n)));
    to_unit(key, n, 1.0f);
}

// A head's part in the update of the last of `n_read` rows. `shared`: the row's queries and keys, null: to be computed.
// `steps`: of its values, null: heads have steps.
template <class T> static void update_of(
    const Recurrence& part, int head, const T* const* rows, int n_read, const float* shared, const T* steps, Update& to) {
    if (steps) return selected_update(part, head, rows, n_read, steps, to);
    const int keys = part.n_key_heads * part.key_width, key_head = head / (part.n_heads / part.n_key_heads);
    if (shared) {
        memcpy(to.query, shared + key_head * part.key_width, part.key_width * sizeof(float));
        memcpy(to.key, shared + keys + key_head * part.key_width, part.key_width * sizeof(float));
    } else {
        keys_of(part, key_head, rows, n_read, to.query, to.key);
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
    const float bounded = std::min(std::max(step, part.least_step), part.largest_step);
    to.decay = std::exp(part.decay[head] * bounded);
    if (!to.corrects) to.amount = bounded, to.skip = part.skip[head];
}

// Take the updates of `n` rows into some columns of a state; `read`, null or (n, value_width): what the rows' queries read
// then. A state is gone through once for a row: what it becomes, and what the next row recalls of it once that has decayed.
template <int D> static inline void correct_columns(
    const Update* by, int n, float* state, int n_keys, int n_values, int first, float* read) {
    vf recalled[D] = {}, change[D];
    const vf first_decay = splat(by->decay);
    for (int k = 0; k < n_keys; k++) {
        float* row = state + int64_t(k) * n_values + first;
        for (int d = 0; d < D; d++) {
            const vf v = load((const float*)row + d * LANES) * first_decay;
            store(row + d * LANES, v);
            recalled[d] = fma(v, splat(by->key[k]), recalled[d]);
        }
    }
    for (int i = 0; i < n; i++) {
        const Update &own = by[i], &next = by[std::min(i + 1, n - 1)];
        const vf decay = splat(i + 1 < n ? next.decay : 1.0f);
        vf out[D] = {};
        for (int d = 0; d < D; d++) {
            change[d] = (load(own.value + first + d * LANES) - recalled[d]) * own.amount;
            recalled[d] = vf{};
        }
        for (int k = 0; k < n_keys; k++) {
            float* row = state + int64_t(k) * n_values + first;
            for (int d = 0; d < D; d++) {
                vf v = fma(splat(own.key[k]), change[d], load((const float*)row + d * LANES));
                out[d] = fma(v, splat(own.query[k]), out[d]);
                v = v * decay;
                store(row + d * LANES, v);
                recalled[d] = fma(v, splat(next.key[k]), recalled[d]);
            }
        }
        if (read)
            for (int d = 0; d < D; d++) store(read + i * n_values + first + d * LANES, out[d]);
    }
}

// The same of a state space, whose rows correct nothing.
template <int D> static inline void add_columns(
    const Update* by, int n, float* state, int n_keys, int n_values, int first, float* read) {
    for (int i = 0; i < n; i++) {
        const Update& own = by[i];
        const vf decay = splat(own.decay);
        vf change[D], out[D] = {};
        for (int d = 0; d < D; d++) change[d] = load(own.value + first + d * LANES) * own.amount;
        for (int k = 0; k < n_keys; k++) {
            float* row = state + int64_t(k) * n_values + first;
            for (int d = 0; d < D; d++) {
                const vf v = fma(splat(own.key[k]), change[d], load((const float*)row + d * LANES) * decay);
                store(row + d * LANES, v);
                out[d] = fma(v, splat(own.query[k]), out[d]);
            }
        }
        for (int d = 0; read && d < D; d++)
            store(read + i * n_values + first + d * LANES, fma(load(own.value + first + d * LANES), splat(own.skip), out[d]));
    }
}

template <int D, bool CORRECTS> static inline void update_columns(
    const Update* by, int n, float* state, int n_keys, int n_values, int first, float* read) {
    if constexpr (CORRECTS) correct_columns<D>(by, n, state, n_keys, n_values, first, read);
    else add_columns<D>(by, n, state, n_keys, n_values, first, read);
}

template <bool CORRECTS>
static inline void update_column(const Update& by, float* state, int n_keys, int n_values, int v, float* read) {
    float recalled = 0, out = CORRECTS ? 0 : by.value[v] * by.skip;
    for (int k = 0; k < n_keys; k++) {
        float& at = state[int64_t(k) * n_values + v];
        at *= by.decay;
        if (CORRECTS) recalled = std::fma(at, by.key[k], recalled);
    }
    const float change = (by.value[v] - recalled) * by.amount;
    for (int k = 0; k < n_keys; k++) {
        float& at = state[int64_t(k) * n_values + v];
        at = std::fma(by.key[k], change, at);
        out = std::fma(at, by.query[k], out);
    }
    if (read) read[v] = out;
}

template <bool CORRECTS>
static inline void update_state(const Update* by, int n, float* state, int n_keys, int n_values, float* read) {
    int at = 0;
    for (; at + 4 * LANES <= n_values; at += 4 * LANES)
        update_columns<4, CORRECTS>(by, n, state, n_keys, n_values, at, read);
    for (; at + LANES <= n_values; at += LANES)
        update_columns<1, CORRECTS>(by, n, state, n_keys, n_values, at, read);
    for (; at < n_values; at++)
        for (int i = 0; i < n; i++)
            update_column<CORRECTS>(by[i], state, n_keys, n_values, at, read ? read + i * n_values : nullptr);
}

// Take the updates of `n` rows, one after the other; `read`, null or (n, value_width). Columns do not depend on one another.
static inline void update_state(const Update* by, int n, float* state, int n_keys, int n_values, float* read) {
    if (by->decays) select_state(by, n, state, n_keys, n_values, read);
    else if (by->corrects) update_state<true>(by, n, state, n_keys, n_values, read);
    else update_state<false>(by, n, state, n_keys, n_values, read);
}

template <class T>
void Runner<T>::recurrence(const Step& step, const Recurrence& part, const RowList& list, int thread) {
    const T* from = step.from_kept ? kept_ : (const T*)pass_.hidden;
    const Input input = enter(part.before, list, from, part.projections, part.n_projections, thread);
    const int total = project(part.projections, part.n_projections, input, list, thread), n_inputs = part.n_inputs();
    const List<Part>& parts = parts_[step.rows];
    const bool codes = part.codes_values(pass_.is_bf16);
    int64_t n_kept_rows = 0;
    for (int64_t p = 0; codes && p < parts.n; p++) n_kept_rows += n_decoded(step, part, pass_.sequences[parts[p].sequence]);
    each(REST, thread, list.n + n_kept_rows, 1, [&](int64_t i, int64_t) {
        if (i >= list.n) return decode(step, part, i - list.n);
        T* to = updates_ + i * n_inputs;
        for (const int32_t* run = part.runs; run < part.runs + 2 * part.n_runs; to += run[1], run += 2)
            memcpy(to, inner_ + i * total + run[0], run[1] * sizeof(T));
        if constexpr (std::is_same_v<T, bf16>)
            if (codes) trim(updates_ + i * n_inputs, part.n_convolved());
    });
    if (!part.convolves_keys) select(step, part, list, thread);
    else each(REST, thread, list.n * part.n_key_heads, 1, [&](int64_t item, int64_t) {
        const Part* rows = parts.items;
        while (item / part.n_key_heads >= rows->first + rows->n) rows++;
        if (pass_.sequences[rows->sequence].is_text)
            share_keys(step, part, list, *rows, item / part.n_key_heads, int(item % part.n_key_heads));
    });
    each(SLOTS, thread, parts.n * part.n_heads, 1, [&](int64_t item, int64_t) {
        take_head(step, part, list, parts[item / part.n_heads], int(item % part.n_heads), thread);
    });
    const int n_groups = part.n_heads * part.value_width / part.norm_width;
    if (part.skip)
        each(REST, thread, list.n * n_groups, 1, [&](int64_t item, int64_t) {
            gate(part, int(item % n_groups), item / n_groups, total);
        });
    each(REST, thread, parts.n, 1, [&](int64_t item, int64_t) {
        const Part& rows = parts[item];
        const Sequence& own = pass_.sequences[rows.sequence];
        int32_t* roots = own.roots + 2 * step.layer;
        bool is_kept = true;
        if (own.visible)
            for (int64_t i = rows.first; i < rows.first + rows.n; i++) {
                const int64_t row = places_[row_of(list, i)].slot - own.first_slot;
                is_kept &= !memchr(own.visible + row * (own.first_slot + own.n_rows), 0, own.committed);
            }
        for (int64_t i = std::max(rows.first, rows.first + rows.n - own.n_kept); is_kept && i < rows.first + rows.n; i++)
            keep(part, updates_ + i * n_inputs,
                 (T*)own.inputs[step.layer] + int64_t(places_[row_of(list, i)].slot % own.n_kept) * part.kept_width(pass_.is_bf16));
        roots[0] = own.is_text ? own.first_slot + own.n_rows : own.committed;
        if (own.lag) roots[1] = std::max(roots[1], roots[0] - own.lag);
    });
    leave(part.out, part.after, part.added_scale, taken(mixed_, part.out, list.n, thread), list, thread);
}

// The index in a list of the row at a slot of this pass. `rows`: of its sequence.
template <class T> int64_t Runner<T>::index_of(const RowList& list, const Part& rows, int64_t slot) const {
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

// The inputs of a slot: of a row of this pass, else of one before it.
template <class T> const T* Runner<T>::inputs_at(
    const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t slot) const {
    const Sequence& own = pass_.sequences[rows.sequence];
    if (slot >= own.first_slot) return updates_ + index_of(list, rows, slot) * part.n_inputs();
    if (!part.codes_values(pass_.is_bf16)) return (const T*)own.inputs[step.layer] + slot % own.n_kept * part.n_inputs();
    int64_t at = slot - first_decoded(step, part, own);
    for (const Part* before = parts_[step.rows].items; before < &rows; before++)
        at += n_decoded(step, part, pass_.sequences[before->sequence]);
    return decoded_ + at * part.n_inputs();
}

// A prompt's row's query and key of a key head, to `keys_`: once for all heads that share them.
template <class T>
void Runner<T>::share_keys(
    const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t i, int key_head) {
    const int keys = part.n_key_heads * part.key_width;
    const int64_t slot = places_[row_of(list, i)].slot;
    const T* last[MOST_TAPS];
    int n_read = 0;
    for (int64_t s = std::max<int64_t>(0, slot - part.n_taps + 1); s <= slot; s++)
        last[n_read++] = inputs_at(step, part, list, rows, s);
    float* to = keys_ + i * 2 * keys + key_head * part.key_width;
    keys_of(part, key_head, last, n_read, to, to + keys);
}

template <class T>
void Runner<T>::take_head(const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int head, int thread) {
    const Sequence& own = pass_.sequences[rows.sequence];
    const int n_keys = part.key_width, n_values = part.value_width;
    const int64_t size = int64_t(n_keys) * n_values, end = own.first_slot + own.n_rows;
    int total = 0;
    for (int i = 0; i < part.n_projections; i++) total += part.projections[i].n_out;
    float* state = (float*)own.states[step.layer] + head * size;
    float* older = own.lag ? state + part.n_heads * size : state;
    const int32_t* roots = own.roots + 2 * step.layer;
    const int n_shared = 2 * part.n_key_heads * part.key_width;
    auto inputs_at = [&](int64_t slot) { return this->inputs_at(step, part, list, rows, slot); };
    auto steps_at = [&](int64_t slot) { return part.n_low ? value_steps(step, part, list, rows, slot) : nullptr; };
    Update by[STRETCH];
    float read[STRETCH * WIDEST_STATE];
    const T* last[MOST_TAPS];
    // The slots of text from … to - 1; the rows of this pass from `row` on are theirs, and read the state; -1: they do not.
    auto take = [&](int64_t from, int64_t to, float* into, int64_t row) {
        for (int n = 0; from < to; from += n) {
            n = int(std::min<int64_t>(STRETCH, to - from));
            for (int i = 0; i < n; i++) {
                int n_read = 0;
                for (int64_t s = std::max<int64_t>(0, from + i - part.n_taps + 1); s <= from + i; s++)
                    last[n_read++] = inputs_at(s);
                const bool is_shared = own.is_text && from + i >= own.first_slot && part.convolves_keys;
                const float* shared = is_shared ? keys_ + index_of(list, rows, from + i) * n_shared : nullptr;
                update_of(part, head, last, n_read, shared, steps_at(from + i), by[i]);
            }
            update_state(by, n, into, n_keys, n_values, row < 0 ? nullptr : read);
            for (int i = 0; row >= 0 && i < n; i++) recall(part, head, read + i * n_values, row++, total);
        }
    };
    auto bring_older = [&](int64_t from, int64_t to) {
        if (own.lag) take(from, to, older, -1);
    };
    take(roots[0], own.committed, state, -1);
    bring_older(roots[1], own.committed - own.lag);
    if (own.is_text) {
        const int64_t first = places_[row_of(list, rows.first)].slot;
        take(first, first + rows.n, state, rows.first);
        bring_older(std::max<int64_t>(roots[1], own.committed - own.lag), end - own.lag);
        return;
    }
    const int64_t older_root = own.lag ? std::max<int64_t>(roots[1], own.committed - own.lag) : own.committed;
    float* work = on_line(scratch[thread].items);
    int32_t *path = paths[thread].items, *done = path + paths[thread].room / 2;
    int64_t n_done = -1, done_base = -1;
    auto take_of_path = [&](int64_t base, int64_t n, float* out) {  // the n-th slot of a path
        int n_read = 0;
        const int64_t n_text = std::max<int64_t>(0, part.n_taps - 1 - n);
        for (int64_t s = std::max<int64_t>(0, base - n_text); s < base; s++) last[n_read++] = inputs_at(s);
        for (int64_t p = std::max<int64_t>(0, n - part.n_taps + 1); p <= n; p++) last[n_read++] = inputs_at(path[p]);
        update_of(part, head, last, n_read, nullptr, steps_at(path[n]), by[0]);
        update_state(by, 1, work, n_keys, n_values, out);
    };
    for (int64_t i = rows.first; i < rows.first + rows.n; i++) {
        const int slot = places_[row_of(list, i)].slot;
        const uint8_t* sees = own.visible ? own.visible + int64_t(slot - own.first_slot) * end : nullptr;
        const bool sees_all = !sees || !memchr(sees, 0, own.committed);
        const int64_t base = sees_all ? own.committed : older_root;
        int64_t n = 0;
        for (int64_t s = base; s < slot; s++)
            if (!sees || sees[s]) path[n++] = int32_t(s);
        path[n] = slot;
        if (base != done_base || n != n_done || memcmp(path, done, n * sizeof(int32_t))) {
            memcpy(work, sees_all ? state : older, size * sizeof(float));
            for (int64_t p = 0; p < n; p++) take_of_path(base, p, nullptr);
        }
        take_of_path(base, n, read);
        recall(part, head, read, i, total);
        done_base = base, n_done = n + 1;
        memcpy(done, path, n_done * sizeof(int32_t));
    }
}

// What a row's head has read, to `mixed_`: of a delta rule its norm, times its gate.
template <class T> void Runner<T>::recall(const Recurrence& part, int head, const float* read, int64_t i, int total) {
    const int n = part.value_width;
    if (part.skip) return round_to(mixed_ + (i * part.n_heads + head) * n, read, n);
    vf squares = {};
    for (int at = 0; at < n; at += LANES) {
        const vf v = as_stored<T>(part_of(read, at, n));
        squares = fma(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(n) + part.norm_eps);
    T gates[WIDEST_STATE], *to = mixed_ + (i * part.n_heads + part.places[head]) * n;
    for (int at = 0; at < n; at++) gates[at] = inner_[i * total + part.gates[head * n + at]];
    for (int at = 0; at < n; at += LANES) {
        const vf unit = as_stored<T>(as_stored<T>(part_of(read, at, n)) * scale), gate = part_of((const T*)gates, at, n);
        const vf normed = as_stored<T>(unit * part_of((const T*)part.norm, at, n));
        store_part(to, normed * (gate / (exp(-gate) + 1.0f)), at, n);
    }
}

// What a group of a row's heads has read of a state space, normed and gated in `mixed_`.
template <class T> void Runner<T>::gate(const Recurrence& part, int group, int64_t i, int total) {
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
    along(n, values, values, [&](vf v, int at) {
        if (part.gating == GATED_ALONE) return v * gate_at(at);
        if (part.gating == GATED_BEHIND_NORM) return v * scale * part_of(norm, at, n) * gate_at(at);
        return as_stored<T>(before_norm(v, at) * scale) * part_of(norm, at, n);
    });
}

}  // namespace
