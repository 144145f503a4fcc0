// Selective state spaces whose values have a step and decays each (Mamba-1, arXiv:2312.00752); a part of `pass.cpp`.
//
// Values go through a convolution; a row's query, key and steps are made of what comes out. So a row of a tree needs its
// ancestors' values twice: here, where that is made once for all heads, and where heads take the row into their states.
//
// Of its steps a row keeps the one of low rank alone: those of values would take as much memory as its values. They are made
// again, with those of the pass, for each row that a state is still to be taken behind.
#pragma once
#include "coded_values.h"
#include "runner.h"

namespace {

constexpr int MOST_TAPS = 64;
constexpr int WIDEST_STATE = 256;

// The values i, i + 1, … of `n`, as far as there are some.
template <class T> static inline void store_part(T* x, vf values, int i, int n) {
    if (i + LANES <= n) return store(x + i, values);
    T lanes[LANES];
    store(lanes, values);
    memcpy(x + i, lanes, (n - i) * sizeof(T));
}

// One head's part in a row's update, rounded where transformers' modules round it.
struct Update {
    float query[WIDEST_STATE], key[WIDEST_STATE], value[WIDEST_STATE];
    float decay, amount;
    float skip;  // of a state space: what of the value is read past the state
    bool corrects;
    // Where steps are those of values: these, what decays in them (key_width, value_width), null elsewhere, and what is
    // read past the state.
    float steps[WIDEST_STATE];
    const float *decays, *skips;
};

// `n` channels from `first` on of the last `n_read` rows, the newest last, through the convolution and its activation.
template <class T, class To>
static void convolve(const Recurrence& part, const T* const* rows, int n_read, int first, int n, To* to) {
    const int n_all = part.n_convolved();
    for (int at = 0; at < n; at += LANES) {
        vf mixed = {};
        for (int r = 0; r < n_read; r++) {
            const float* weights = part.taps + int64_t(part.n_taps - n_read + r) * n_all + first;
            mixed = fma(part_of(rows[r] + first, at, n), part_of(weights, at, n), mixed);
        }
        if (part.taps_bias) mixed += part_of(part.taps_bias + first, at, n);
        mixed = as_stored<T>(mixed);
        store_part(to, as_stored<T>(mixed / (exp(-mixed) + 1.0f)), at, n);
    }
}

// log(1 + e^x): the larger of x and 0, and 2 atanh(y / (2 + y)) of what is left, where y is e^-|x|.
static inline vf softplus(vf x) {
    const vf y = exp(-larger(x, -x)), z = y / (y + 2.0f), squared = z * z;
    vf sum = splat(1.0f / 13);
    for (const float term : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) sum = fma(sum, squared, splat(term));
    return fma(z + z, sum, larger(x, vf{}));
}

// A head's part in the update of the last of `n_read` rows. `steps`: of its values.
template <class T> static void selected_update(
    const Recurrence& part, int head, const T* const* rows, int n_read, const T* steps, Update& to) {
    const int n = part.value_width, n_keys = part.key_width, first = head * n;
    convolve(part, rows, n_read, first, n, to.value);
    const T* own = rows[n_read - 1] + part.n_convolved();
    steps += first;
    for (int k = 0; k < n_keys; k++) to.query[k] = to_float(own[k]), to.key[k] = to_float(own[n_keys + k]);
    for (int at = 0; at < n; at += LANES)
        store_part(to.steps, softplus(part_of(steps, at, n) + part_of(part.step_bias + first, at, n)), at, n);
    to.corrects = false, to.decays = part.decay + int64_t(head) * n_keys * n, to.skips = part.skip + first;
}

// Take the updates of `n` rows, one after the other; `read`, null or (n, n_values). Columns do not depend on one another.
static inline void select_state(const Update* by, int n, float* state, int n_keys, int n_values, float* read) {
    for (int first = 0; first < n_values; first += LANES)
        for (int i = 0; i < n; i++) {
            const Update& own = by[i];
            const vf step = part_of(own.steps, first, n_values), value = part_of(own.value, first, n_values);
            const vf change = value * step;
            vf out = {};
            for (int k = 0; k < n_keys; k++) {
                float* row = state + int64_t(k) * n_values;
                const vf decay = exp(part_of(own.decays + int64_t(k) * n_values, first, n_values) * step);
                const vf v = fma(splat(own.key[k]), change, part_of((const float*)row, first, n_values) * decay);
                store_part(row, v, first, n_values);
                out = fma(v, splat(own.query[k]), out);
            }
            if (read) store_part(read + i * n_values, fma(value, part_of(own.skips, first, n_values), out), first, n_values);
        }
}

// Decode what is kept of the i-th row before those of the pass, counted over all sequences that a layer has rows of.
template <class T> void Runner<T>::decode(const Step& step, const Recurrence& part, int64_t i) {
    if constexpr (std::is_same_v<T, bf16>) {
        T* to = decoded_ + i * part.n_inputs();
        const Part* rows = parts_[step.rows].items;
        for (int64_t n; i >= (n = n_decoded(step, part, pass_.sequences[rows->sequence])); rows++) i -= n;
        const Sequence& own = pass_.sequences[rows->sequence];
        const int64_t slot = first_decoded(step, part, own) + i;
        const int n_values = part.n_convolved(), n_others = part.n_inputs() - n_values;
        const T* from = (const T*)own.inputs[step.layer] + slot % own.n_kept * part.kept_width(true);
        decode_values((const uint16_t*)(from + n_others), n_values, to);
        memcpy(to + n_values, from, n_others * sizeof(T));
    }
}

// What is kept of a row's inputs.
template <class T> void Runner<T>::keep(const Recurrence& part, const T* inputs, T* to) const {
    if constexpr (std::is_same_v<T, bf16>)
        if (part.codes_values(true)) {
            const int n_values = part.n_convolved(), n_others = part.n_inputs() - n_values;
            memcpy(to, inputs + n_values, n_others * sizeof(T));
            return code_values(inputs, n_values, (uint16_t*)(to + n_others));
        }
    memcpy(to, inputs, part.n_inputs() * sizeof(T));
}

// The inputs of the last tokens that the convolution reads for a list's row, the newest last; returns how many they are.
template <class T> int Runner<T>::tail_of(
    const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t i, const T** last) const {
    const Sequence& own = pass_.sequences[rows.sequence];
    const int64_t slot = places_[row_of(list, i)].slot, end = own.first_slot + own.n_rows;
    const uint8_t* sees = own.visible ? own.visible + (slot - own.first_slot) * end : nullptr;
    int64_t base = own.committed;  // the text before is seen
    if (own.lag && sees && memchr(sees, 0, own.committed))
        base = std::max<int64_t>(own.roots[2 * step.layer + 1], own.committed - own.lag);
    int n_read = 0;
    for (int64_t s = slot; s >= 0 && n_read < part.n_taps; s--)
        if (s == slot || s < base || !sees || sees[s]) last[n_read++] = inputs_at(step, part, list, rows, s);
    std::reverse(last, last + n_read);
    return n_read;
}

// A step for each value of a slot: of a row of this pass, else of one before it.
template <class T> const T* Runner<T>::value_steps(
    const Step& step, const Recurrence& part, const RowList& list, const Part& rows, int64_t slot) const {
    const Sequence& own = pass_.sequences[rows.sequence];
    int64_t at = slot >= own.first_slot ? index_of(list, rows, slot) : list.n + slot - oldest(step, own);
    for (const Part* before = parts_[step.rows].items; slot < own.first_slot && before < &rows; before++)
        at += n_earlier(step, pass_.sequences[before->sequence]);
    return value_steps_ + at * part.steps.n_out;
}

// Make the listed rows' queries, keys and steps of their values, which lie in `updates_`.
template <class T>
void Runner<T>::select(const Step& step, const Recurrence& part, const RowList& list, int thread) {
    const List<Part>& parts = parts_[step.rows];
    const int n_values = part.n_convolved(), n_inputs = part.n_inputs(), n_low = part.low.n_out, n_keys = part.key_width;
    const int rank = part.steps.n_in;
    each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const Part* rows = parts.items;
        while (i >= rows->first + rows->n) rows++;
        const T* last[MOST_TAPS];
        const int n_read = tail_of(step, part, list, *rows, i, last);
        convolve(part, last, n_read, 0, n_values, mixed_ + i * n_values);
    });
    T* steps = low_ + list.n * n_low;  // of low rank
    int64_t n_steps = list.n;
    linear(part.low, taken(mixed_, part.low, list.n, thread), list.n, thread,
           [&](int row, int first, int n_out, const float* values) {
               round_to(low_ + int64_t(row) * n_low + first, values, n_out);
           });
    each(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const T* low = low_ + i * n_low;
        T* to = updates_ + i * n_inputs + n_values;
        normed(part.low_norms[0], low, rank, to + 2 * n_keys);
        memcpy(steps + i * rank, to + 2 * n_keys, rank * sizeof(T));
        normed(part.low_norms[1], low + rank, n_keys, to + n_keys);
        normed(part.low_norms[2], low + rank + n_keys, n_keys, to);
    });
    for (int64_t p = 0; p < parts.n; p++) {
        const Sequence& own = pass_.sequences[parts[p].sequence];
        const int64_t first = oldest(step, own), n = n_earlier(step, own);
        each(REST, thread, n, 1, [&](int64_t i, int64_t) {
            const T* inputs = inputs_at(step, part, list, parts[p], first + i);
            memcpy(steps + (n_steps + i) * rank, inputs + n_values + 2 * n_keys, rank * sizeof(T));
        });
        n_steps += n;
    }
    linear(part.steps, taken(steps, part.steps, n_steps, thread), n_steps, thread,
           [&](int row, int first, int n_out, const float* values) {
               round_to(value_steps_ + int64_t(row) * n_values + first, values, n_out);
           });
}

}  // namespace
