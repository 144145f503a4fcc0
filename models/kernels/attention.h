// Attention of rows over the slots that each of them sees, in the order of the slots: the same sums whether these slots lie
// together (plain decoding) or have gaps (a tree), and however many rows the pass has.
#pragma once
#include <vector>
#include "dense.h"

struct Run {
    int32_t start, length;
};

// Which slots the rows of a pass see in one sliding window, as runs of consecutive slots.
struct View {
    int window = 0;  // 0: none
    std::vector<Run> runs;
    std::vector<int32_t> first;   // run of each row, and the number of runs
    std::vector<int32_t> n_seen;  // slots of each row
};

// Args: visible: (rows, end) or null where every row sees all slots up to its own; positions: of the rows, which lie at
//       slots `first_slot`, `first_slot` + 1, …; the slots before hold the positions of their own numbers.
static inline void look(View& view, int window, int n, int first_slot, const int32_t* positions, const uint8_t* visible) {
    const int end = first_slot + n;
    view.window = window, view.runs.clear(), view.first.clear(), view.n_seen.clear();
    for (int row = 0; row < n; row++) {
        view.first.push_back(int32_t(view.runs.size()));
        const int oldest = window ? std::max(0, positions[row] - window + 1) : 0;
        int seen = 0;
        if (!visible) {
            seen = first_slot + row + 1 - oldest;
            view.runs.push_back({oldest, seen});
        } else {
            const uint8_t* sees = visible + int64_t(row) * end;
            for (int slot = 0; slot < end;) {
                auto is_seen = [&](int s) { return sees[s] && (s < first_slot ? s : positions[s - first_slot]) >= oldest; };
                if (!is_seen(slot)) {
                    slot++;
                    continue;
                }
                const int start = slot;
                while (slot < end && is_seen(slot)) slot++;
                view.runs.push_back({start, slot - start});
                seen += slot - start;
            }
        }
        view.n_seen.push_back(seen);
    }
    view.first.push_back(int32_t(view.runs.size()));
}

// Sums over the slots of probabilities times values, for H heads and D vectors of the width.
template <class T, int H, int D>
static inline void mix(
    const float* probs, int64_t ldp, const Run* run, const Run* last, const T* values, int64_t ldv, float* out, int64_t ldo) {
    vf acc[H][D] = {};
    for (int64_t j = 0; run < last; run++) {
        const T* value = values + run->start * ldv;
        for (int s = 0; s < run->length; s++, j++, value += ldv) {
            vf v[D];
            for (int d = 0; d < D; d++) v[d] = load(value + d * LANES);
            for (int h = 0; h < H; h++) {
                const vf p = splat(probs[h * ldp + j]);
                for (int d = 0; d < D; d++) acc[h][d] = fma(p, v[d], acc[h][d]);
            }
        }
    }
    for (int h = 0; h < H; h++)
        for (int d = 0; d < D; d++) store(out + h * ldo + d * LANES, acc[h][d]);
}

constexpr int HEADS = 3;  // query heads that are computed together
#if defined(WITH_AVX512)
constexpr int DEEP = 4;
#else
constexpr int DEEP = 2;
#endif

// What H heads of one row read. `scratch`: room for H * (n_seen + width + 2 * LANES) values.
template <class T, int H>
static void attend(
    const T* query, int width, float scaling, const Run* run, const Run* last, int n_seen, const T* keys, const T* values,
    float* scratch, T* out) {
    const int64_t ld = (n_seen + LANES - 1) / LANES * LANES;
    float *scores = scratch, *mixed = scores + H * ld;
    int64_t at = 0;
    for (const Run* r = run; r < last; at += r->length, r++)
        products<T>(query, width, H, keys + int64_t(r->start) * width, width, r->length, width, scores + at, ld);
    float totals[H];
    for (int h = 0; h < H; h++) {
        float* own = scores + h * ld;
        for (int64_t j = n_seen; j < ld; j++) own[j] = -INFINITY;
        vf largest = splat(-INFINITY);
        for (int64_t j = 0; j < ld; j += LANES) {
            const vf scaled = load(own + j) * scaling;
            const vi more = scaled > largest;
            largest = (vf)((more & (vi)scaled) | (~more & (vi)largest));
            store(own + j, scaled);
        }
        float most = -INFINITY;
        for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
        vf total = {};
        for (int64_t j = 0; j < ld; j += LANES) {
            const vf e = exp(load(own + j) - most);
            store(own + j, e);
            total += e;
        }
        totals[h] = sum(total);
    }
    int d = 0;
    for (; d + DEEP * LANES <= width; d += DEEP * LANES)
        mix<T, H, DEEP>(scores, ld, run, last, values + d, width, mixed + d, width);
    for (; d + LANES <= width; d += LANES) mix<T, H, 1>(scores, ld, run, last, values + d, width, mixed + d, width);
    for (; d < width; d++)
        for (int h = 0; h < H; h++) {
            float acc = 0;
            int64_t j = h * ld;
            for (const Run* r = run; r < last; r++)
                for (int s = 0; s < r->length; s++) acc += scores[j++] * to_float(values[int64_t(r->start + s) * width + d]);
            mixed[h * width + d] = acc;
        }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < width; i++) out[h * width + i] = rounded<T>(mixed[h * width + i] / totals[h]);
}
