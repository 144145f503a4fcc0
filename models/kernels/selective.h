// Selective state spaces, in which each value has its own step and decays (Mamba-1, arXiv:2312.00752); a part of `pass.cpp`.
//
// Values pass through a convolution; a row's query, key and steps are computed from the result. So a row of a tree reads its
// ancestors' values twice: here, once for all heads, and when heads update their states by the row.
//
// A row stores only its step of low rank, because the steps of its values would take as much memory as the values. The steps of
// values are computed again, with those of the pass, for each earlier row that a state does not include yet.
#pragma once
#include "coded_values.h"
#include "runner.h"

namespace {

constexpr int MAX_TAPS = 64;
constexpr int MAX_STATE_WIDTH = 256;

// Store the values i, i + 1, … of `n`, at most LANES.
template <class T> static inline void store_part(T* x, vf values, int i, int n) {
    if (i + LANES <= n) return store(x + i, values);
    T lanes[LANES];
    store(lanes, values);
    memcpy(x + i, lanes, (n - i) * sizeof(T));
}

// A row's update of one head's state, rounded where transformers' modules round it.
struct Update {
    float query[MAX_STATE_WIDTH], key[MAX_STATE_WIDTH], value[MAX_STATE_WIDTH];
    float decay, amount;
    float skip;  // of a state space: factor of the value that is added to what is read
    bool corrects;
    // If each value has a step: the steps; their decays, (key_width, value_width), else null; and the factors of values that are
    // added to what is read.
    float steps[MAX_STATE_WIDTH];
    const float *decays, *skips;
};

// Convolve `n` channels from `first` on of the last `n_read` rows, the newest last, and apply the activation.
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

// log(1 + e^x) = max(x, 0) + 2 atanh(y / (2 + y)), where y is e^-|x|.
static inline vf softplus(vf x) {
    const vf y = exp(-larger(x, -x)), z = y / (y + 2.0f), squared = z * z;
    vf sum = splat(1.0f / 13);
    for (const float term : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) sum = fma(sum, squared, splat(term));
    return fma(z + z, sum, larger(x, vf{}));
}

// A head's update by the last of `n_read` rows. `steps`: those of its values.
template <class T> static void make_selective_update(
    const Recurrence& part, int head, const T* const* rows, int n_read, const T* steps, Update& to) {
    const int n = part.value_width, n_keys = part.key_width, first = head * n;
    convolve(part, rows, n_read, first, n, to.value);
    const T* numbers = rows[n_read - 1] + part.n_convolved();
    steps += first;
    for (int k = 0; k < n_keys; k++) to.query[k] = to_float(numbers[k]), to.key[k] = to_float(numbers[n_keys + k]);
    for (int at = 0; at < n; at += LANES)
        store_part(to.steps, softplus(part_of(steps, at, n) + part_of(part.step_bias + first, at, n)), at, n);
    to.corrects = false, to.decays = part.decay + int64_t(head) * n_keys * n, to.skips = part.skip + first;
}

// Apply the updates of `n` rows, one after the other. `read`: null or (n, n_values). Columns do not depend on each other.
static inline void update_selective_state(const Update* updates, int n, float* state, int n_keys, int n_values, float* read) {
    for (int first = 0; first < n_values; first += LANES)
        for (int i = 0; i < n; i++) {
            const Update& update = updates[i];
            const vf step = part_of(update.steps, first, n_values), value = part_of(update.value, first, n_values);
            const vf change = value * step;
            vf out = {};
            for (int k = 0; k < n_keys; k++) {
                float* row = state + int64_t(k) * n_values;
                const vf decay = exp(part_of(update.decays + int64_t(k) * n_values, first, n_values) * step);
                const vf v = fma(splat(update.key[k]), change, part_of((const float*)row, first, n_values) * decay);
                store_part(row, v, first, n_values);
                out = fma(v, splat(update.query[k]), out);
            }
            if (read) store_part(read + i * n_values, fma(value, part_of(update.skips, first, n_values), out), first, n_values);
        }
}

// Decode the stored inputs of the i-th row before the pass, counted over all segments of the layer's list.
template <class T> void Runner<T>::decode(const Step& step, const Recurrence& part, int64_t i) {
    if constexpr (std::is_same_v<T, bf16>) {
        T* to = decoded_ + i * part.n_inputs();
        const Segment* rows = segments_[step.rows].items;
        for (int64_t n; i >= (n = n_decoded(step, part, pass_.sequences[rows->sequence])); rows++) i -= n;
        const Sequence& sequence = pass_.sequences[rows->sequence];
        const int64_t slot = first_decoded(step, part, sequence) + i;
        const int n_values = part.n_convolved(), n_others = part.n_inputs() - n_values;
        const T* from = (const T*)sequence.inputs[step.layer] + slot % sequence.n_kept * part.kept_width(true);
        decode_values((const uint16_t*)(from + n_others), n_values, to);
        memcpy(to + n_values, from, n_others * sizeof(T));
    }
}

// Store a row's inputs for later passes.
template <class T> void Runner<T>::store_inputs(const Recurrence& part, const T* inputs, T* to) const {
    if constexpr (std::is_same_v<T, bf16>)
        if (part.codes_values(true)) {
            const int n_values = part.n_convolved(), n_others = part.n_inputs() - n_values;
            memcpy(to, inputs + n_values, n_others * sizeof(T));
            return code_values(inputs, n_values, (uint16_t*)(to + n_others));
        }
    memcpy(to, inputs, part.n_inputs() * sizeof(T));
}

// The inputs that the convolution reads for a list's row, the newest last; returns their number.
template <class T> int Runner<T>::conv_inputs(
    const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t i, const T** last) const {
    const Sequence& sequence = pass_.sequences[rows.sequence];
    const int64_t slot = places_[row_of(list, i)].slot, end = sequence.first_slot + sequence.n_rows;
    const uint8_t* row_mask = sequence.visible ? sequence.visible + (slot - sequence.first_slot) * end : nullptr;
    int64_t base = sequence.committed;  // a row sees all text before this slot
    if (sequence.lag && row_mask && memchr(row_mask, 0, sequence.committed))
        base = std::max<int64_t>(sequence.roots[2 * step.layer + 1], sequence.committed - sequence.lag);
    int n_read = 0;
    for (int64_t s = slot; s >= 0 && n_read < part.n_taps; s--)
        if (s == slot || s < base || !row_mask || row_mask[s]) last[n_read++] = inputs_at(step, part, list, rows, s);
    std::reverse(last, last + n_read);
    return n_read;
}

// The steps of a slot's values, of a row of this pass or an earlier one.
template <class T> const T* Runner<T>::value_steps(
    const Step& step, const Recurrence& part, const RowList& list, const Segment& rows, int64_t slot) const {
    const Sequence& sequence = pass_.sequences[rows.sequence];
    int64_t at = slot >= sequence.first_slot ? index_of(list, rows, slot) : list.n + slot - oldest(step, sequence);
    for (const Segment* before = segments_[step.rows].items; slot < sequence.first_slot && before < &rows; before++)
        at += n_earlier(step, pass_.sequences[before->sequence]);
    return value_steps_ + at * part.steps.n_out;
}

// Compute the listed rows' queries and keys in `updates_`, and the steps of their values in `value_steps_`.
template <class T>
void Runner<T>::prepare_selective(const Step& step, const Recurrence& part, const RowList& list, int thread) {
    const List<Segment>& segments = segments_[step.rows];
    const int n_values = part.n_convolved(), n_inputs = part.n_inputs(), n_low = part.low.n_out, n_keys = part.key_width;
    const int rank = part.steps.n_in;
    parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const Segment* rows = segments.items;
        while (i >= rows->first + rows->n) rows++;
        const T* last[MAX_TAPS];
        const int n_read = conv_inputs(step, part, list, *rows, i, last);
        convolve(part, last, n_read, 0, n_values, mixed_ + i * n_values);
    });
    T* steps = low_ + list.n * n_low;  // of low rank
    int64_t n_steps = list.n;
    linear(part.low, map_input(mixed_, part.low, list.n, thread), list.n, thread,
           [&](int row, int first, int n_out, const float* values) {
               round_to(low_ + int64_t(row) * n_low + first, values, n_out);
           });
    parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
        const T* low = low_ + i * n_low;
        T* to = updates_ + i * n_inputs + n_values;
        normalise(part.low_norms[0], low, rank, to + 2 * n_keys);
        memcpy(steps + i * rank, to + 2 * n_keys, rank * sizeof(T));
        normalise(part.low_norms[1], low + rank, n_keys, to + n_keys);
        normalise(part.low_norms[2], low + rank + n_keys, n_keys, to);
    });
    for (int64_t p = 0; p < segments.n; p++) {
        const Sequence& sequence = pass_.sequences[segments[p].sequence];
        const int64_t first = oldest(step, sequence), n = n_earlier(step, sequence);
        parallel_for(REST, thread, n, 1, [&](int64_t i, int64_t) {
            const T* inputs = inputs_at(step, part, list, segments[p], first + i);
            memcpy(steps + (n_steps + i) * rank, inputs + n_values + 2 * n_keys, rank * sizeof(T));
        });
        n_steps += n;
    }
    linear(part.steps, map_input(steps, part.steps, n_steps, thread), n_steps, thread,
           [&](int row, int first, int n_out, const float* values) {
               round_to(value_steps_ + int64_t(row) * n_values + first, values, n_out);
           });
}

}  // namespace
