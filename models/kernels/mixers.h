// What mixes tokens in place of attention; a part of `pass.cpp`, which includes it behind its `Runner`.
//
// Inputs lie in slots as keys do. A row reads the slots of the last tokens that it sees: of a tree's node those of its
// ancestors, so that a rejected row leaves no trace.
#pragma once

constexpr int MOST_TAPS = 64;

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
