// Attention of rows over the slots that each of them sees, in the order of the slots: the same sums whether these slots lie
// together (plain decoding) or have gaps (a tree), and however many rows the pass has.
//
// Both of its products are sums over words of 32 bits, one lane of a vector per slot (scores) or per value (what is read):
// nothing is added up across lanes. Keys are turned for that, and values paired, block by block for all heads that read them.
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

// Add the n rows of a sequence.
//
// Args: visible: (rows, end) or null where every row sees all slots up to its own; positions: of the rows, which lie at
//       slots `first_slot`, `first_slot` + 1, …; the slots before hold the positions of their own numbers.
static inline void look(View& view, int n, int first_slot, const int32_t* positions, const uint8_t* visible) {
    const int end = first_slot + n, window = view.window;
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
}

// Words of rows of T, and their products.
template <class T> struct Word {  // one value each
    static constexpr int PER = 1;
    static vf get(const T* x, int word, int n) { return part_of(x, word, n); }
    // A row of n values for the columns of what is read, in whole lanes.
    static void spread(const T* x, const T*, int n, float* to) {
        for (int i = 0; i < n; i += LANES) store(to + i, part_of(x, i, n));
    }
    static int column(int value) { return value; }
    static vf add(vf acc, vf a, vf b) { return fma(a, b, acc); }
    static void pack(float*, int64_t) {}
};

#if defined(WITH_AVX512) && defined(__AVX512BF16__)
template <> struct Word<bf16> {  // two values each
    static constexpr int PER = 2;
    // Words `word`, … of a row of n values.
    static vf get(const bf16* x, int word, int n) {
        const int left = n - 2 * word;
        return (vf)(left >= 32 ? _mm512_loadu_si512(x + 2 * word) : _mm512_maskz_loadu_epi16((1ull << left) - 1, x + 2 * word));
    }
    // Two rows of n values, or one, value beside value; in the order that `column` tells.
    static void spread(const bf16* x, const bf16* y, int n, float* to) {
        for (int i = 0; i < n; i += 32) {
            const __m512i a = (__m512i)get(x, i / 2, n), b = y ? (__m512i)get(y, i / 2, n) : __m512i{};
            store(to + i, (vf)_mm512_unpacklo_epi16(a, b));
            store(to + i + 16, (vf)_mm512_unpackhi_epi16(a, b));
        }
    }
    static int column(int value) { return (value & ~31) + (value & 4) * 4 + (value >> 3 & 3) * 4 + (value & 3); }
    static vf add(vf acc, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
    // Values in place of floats; n: whole lanes.
    static void pack(float* x, int64_t n) {
        for (int64_t i = 0; i < n; i += LANES) store((bf16*)x + i, load(x + i));
    }
};
#endif

constexpr int MOST_HEADS = 8;             // of one row that are computed together
constexpr int MOST_TOGETHER = 64;         // heads of all rows that are computed together, and the most
constexpr int64_t MOST_SCORES = 1 << 17;  // that they may have, to stay in the cache; one row may have more
constexpr int SLOTS_AT_ONCE = 64;
#if defined(WITH_AVX512)
constexpr int TALL = 6, DEEP = 4;  // heads by vectors that the registers hold sums of
#else
constexpr int TALL = 3, DEEP = 2;
#endif

static inline int64_t whole_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
static inline int64_t columns_of(int64_t width) { return (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

// Floats of scratch memory that `attend` needs at most for rows that see `n_seen` slots.
static inline int64_t scratch_of(int64_t n_seen, int64_t width) {
    const int64_t scores = std::max(MOST_SCORES, MOST_HEADS * (whole_lanes(n_seen) + LANES));
    return scores + (2 * MOST_TOGETHER + SLOTS_AT_ONCE) * columns_of(width);
}

// C[h][column] += sum over k of a[h][k] * b[k][column], for H rows and D vectors of columns; `fresh`: C = it.
template <class T, int H, int D>
static inline void sums_tile(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t n_k, float* c, int64_t ldc, bool fresh) {
    vf acc[H][D] = {};
    if (!fresh)
        for (int h = 0; h < H; h++)
            for (int d = 0; d < D; d++) acc[h][d] = load(c + h * ldc + d * LANES);
    for (int64_t k = 0; k < n_k; k++, b += ldb) {
        vf bs[D];
        for (int d = 0; d < D; d++) bs[d] = load(b + d * LANES);
        for (int h = 0; h < H; h++) {
            int32_t word;
            memcpy(&word, a + h * lda + k, sizeof word);
            const vf as = (vf)(vi{} + word);
            for (int d = 0; d < D; d++) acc[h][d] = Word<T>::add(acc[h][d], as, bs[d]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int d = 0; d < D; d++) store(c + h * ldc + d * LANES, acc[h][d]);
}

// At most TALL rows.
template <class T, int D, int H = TALL>
static inline void sums_tile_of(
    int m, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t n_k, float* c, int64_t ldc, bool fresh) {
    if (m == H) sums_tile<T, H, D>(a, lda, b, ldb, n_k, c, ldc, fresh);
    else if constexpr (H > 1) sums_tile_of<T, D, H - 1>(m, a, lda, b, ldb, n_k, c, ldc, fresh);
}

// The same for m rows and n columns, whole lanes.
template <class T>
static void add_sums(
    int m, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t n_k, int64_t n, float* c, int64_t ldc, bool fresh) {
    for (int h = 0; h < m; h += TALL, a += TALL * lda, c += TALL * ldc) {
        const int some = std::min(TALL, m - h);
        int64_t at = 0;
        for (; at + DEEP * LANES <= n; at += DEEP * LANES)
            sums_tile_of<T, DEEP>(some, a, lda, b + at, ldb, n_k, c + at, ldc, fresh);
        for (; at < n; at += LANES) sums_tile_of<T, 1>(some, a, lda, b + at, ldb, n_k, c + at, ldc, fresh);
    }
}

// Turn a square of LANES by LANES words: swap its halves' corners, then those of its quarters, ….
template <int STEP = LANES / 2> static inline __attribute__((always_inline)) void turn(vf* rows) {
    vi low, high;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) low[i] = i & STEP ? LANES + i - STEP : i, high[i] = i & STEP ? LANES + i : i + STEP;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        const vf a = rows[i], b = rows[i + STEP];
        rows[i] = __builtin_shuffle(a, b, low), rows[i + STEP] = __builtin_shuffle(a, b, high);
    }
    if constexpr (STEP > 1) turn<STEP / 2>(rows);
}

// The slots of a row one after the other, from the one at `at` of its first run on.
struct Slots {
    const Run* run;
    int64_t at;
    int32_t next() {
        while (at >= run->length) at -= run->length, run++;
        return int32_t(run->start + at++);
    }
};

// Ask for a row of T that is used soon, a cache line each 64 bytes.
template <class T> static inline void ask_for(const T* row, int width) {
    for (int i = 0; i < width; i += 64 / int(sizeof(T))) __builtin_prefetch(row + i, 0, 3);
}

// Scores of m heads' queries, as words (m, columns_of(width)), with the keys of n slots.
template <class T>
static void scores_of(
    int m, const float* query, Slots slots, int64_t n, const T* keys, int width, float* block, float* scores, int64_t ld) {
    const int n_words = (width + Word<T>::PER - 1) / Word<T>::PER;
    for (int64_t from = 0; from < n; from += SLOTS_AT_ONCE) {
        const int some = int(std::min<int64_t>(SLOTS_AT_ONCE, n - from));
        for (int s = 0; s < some; s += LANES) {
            const T* own[LANES];  // behind the last slot it stands again: that score is overwritten or never read
            for (int i = 0; i < LANES; i++) {
                own[i] = s + i < some ? keys + int64_t(slots.next()) * width : own[i - 1];
                ask_for(own[i] + SLOTS_AT_ONCE * width, width);
            }
            for (int w = 0; w < n_words; w += LANES) {
                vf square[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) square[i] = Word<T>::get(own[i], w, width);
                turn(square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) store(block + (w + i) * SLOTS_AT_ONCE + s, square[i]);
            }
        }
        add_sums<T>(m, query, columns_of(width), block, SLOTS_AT_ONCE, n_words, whole_lanes(some), scores + from, ld, true);
    }
}

// Add probabilities, as words, times the values of n slots to `out` (m, columns_of(width)).
template <class T>
static void mix(
    int m, const float* probs, int64_t ld, Slots slots, int64_t n, const T* values, int width, float* block, float* out) {
    constexpr int PER = Word<T>::PER;
    const int64_t wide = columns_of(width);
    for (int64_t from = 0; from < n; from += SLOTS_AT_ONCE) {
        const int some = int(std::min<int64_t>(SLOTS_AT_ONCE, n - from));
        for (int s = 0; s < some; s += PER) {
            const T* x = values + int64_t(slots.next()) * width;
            const T* y = PER > 1 && s + 1 < some ? values + int64_t(slots.next()) * width : nullptr;
            for (int i = 0; i < PER; i++) ask_for(x + (SLOTS_AT_ONCE + i) * width, width);
            Word<T>::spread(x, y, width, block + s / PER * wide);
        }
        add_sums<T>(m, probs + from / PER, ld, block, wide, (some + PER - 1) / PER, wide, out, wide, false);
    }
}

// exp(score * scaling - the largest of them) in place of n scores, zeros up to whole lanes; returns their sum.
static inline float exponentials(float* scores, int64_t n, float scaling) {
    const int64_t padded = whole_lanes(n);
    for (int64_t j = n; j < padded; j++) scores[j] = -INFINITY;
    vf largest = splat(-INFINITY);
    for (int64_t j = 0; j < padded; j += LANES) {
        const vf scaled = load(scores + j) * scaling;
        const vi more = scaled > largest;
        largest = (vf)((more & (vi)scaled) | (~more & (vi)largest));
        store(scores + j, scaled);
    }
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
    vf total = {};
    for (int64_t j = 0; j < padded; j += LANES) {
        const vf e = exp(load(scores + j) - most);
        store(scores + j, e);
        total += e;
    }
    return sum(total);
}

// Rows that read the keys and values of one head together, by `n_heads` query heads each.
template <class T> struct Reader {
    const Run *first, *last;  // the runs of slots that it sees
    int64_t n_seen;
    const T* query;  // (n_heads, width)
    T* out;
};

// What rows read. Slots that all of them see first, which is the text that a tree or a chunk hangs on, are turned and paired
// once for all; every row's sums go over its own slots in their order either way.
template <class T>
static void attend(
    const Reader<T>* rows, int n_rows, int n_heads, int width, float scaling, const T* keys, const T* values, float* scratch) {
    const int n = n_rows * n_heads;
    const int64_t wide = columns_of(width);
    int64_t most = 0, together = rows[0].first < rows[0].last ? rows[0].first->length : 0;
    for (int r = 0; r < n_rows; r++) {
        const Reader<T>& row = rows[r];
        most = std::max(most, row.n_seen);
        const bool alike = together && row.first < row.last && row.first->start == rows[0].first->start;
        together = alike ? std::min<int64_t>(together, row.first->length) : 0;
    }
    together -= together % Word<T>::PER;
    const int64_t ld = whole_lanes(most) + LANES;  // of scores, which are written in whole lanes
    float *scores = scratch, *mixed = scores + n * ld, *query = mixed + n * wide, *block = query + n * wide;
    for (int h = 0; h < n; h++)
        for (int w = 0; w * Word<T>::PER < width; w += LANES)
            store(query + h * wide + w, Word<T>::get(rows[h / n_heads].query + h % n_heads * width, w, width));
    const Slots start{rows[0].first, 0};
    scores_of<T>(n, query, start, together, keys, width, block, scores, ld);
    for (int r = 0, h = 0; r < n_rows; r++, h += n_heads)
        scores_of<T>(n_heads, query + h * wide, {rows[r].first, together}, rows[r].n_seen - together, keys, width, block,
                     scores + h * ld + together, ld);
    float totals[MOST_TOGETHER];
    for (int h = 0; h < n; h++) {
        const int64_t seen = rows[h / n_heads].n_seen;
        totals[h] = exponentials(scores + h * ld, seen, scaling);
        Word<T>::pack(scores + h * ld, whole_lanes(seen));
    }
    std::fill(mixed, mixed + n * wide, 0.0f);
    mix<T>(n, scores, ld, start, together, values, width, block, mixed);
    for (int r = 0, h = 0; r < n_rows; r++, h += n_heads)
        mix<T>(n_heads, scores + h * ld + together / Word<T>::PER, ld, {rows[r].first, together}, rows[r].n_seen - together,
               values, width, block, mixed + h * wide);
    for (int h = 0; h < n; h++) {
        T* to = rows[h / n_heads].out + h % n_heads * width;
        for (int i = 0; i < width; i++) to[i] = rounded<T>(mixed[h * wide + Word<T>::column(i)] / totals[h]);
    }
}
