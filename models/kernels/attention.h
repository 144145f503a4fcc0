// Attention of rows over the slots that each of them sees, in the order of the slots: the same sums whether these slots lie
// together (plain decoding) or have gaps (a tree), and however many rows the pass has.
//
// What a row sees has places: its i-th slot the place `oldest` + i, which is the slot's number in plain decoding. Sums go over
// blocks of places that begin at the same places for all rows. Where a row does not see a place, it counts as exactly 0.
//
// Both products are sums over words of 32 bits, one lane of a vector per slot (scores) or per value (what is read): nothing is
// added up across lanes. Keys are turned for that, and values paired, for all heads that read them. Tiles take keys as they
// lie and turn the queries.
#pragma once
#include "dense.h"
#include "view.h"

// Words of rows of T, and their products.
template <class T> struct Word {  // one value each
    static constexpr int PER = 1;
    static constexpr int UNIT = PER;  // places that are summed together
    static vf get(const T* x, int word, int n) { return part_of(x, word, n); }
    // A row of n values for the columns of what is read, in whole lanes.
    static void spread(const T* x, const T*, int n, float* to) {
        for (int i = 0; i < n; i += LANES) store(to + i, part_of(x, i, n));
    }
    // The channel of which `spread` makes a column.
    static constexpr int channel(int column) { return column; }
    static void put(float* words, int64_t at, vf value) { store(words + at, value); }
    static vf add(vf acc, vf a, vf b) { return fma(a, b, acc); }
    // Columns divided by a number, as a row of n values.
    static void divide(const float* x, float by, int n, T* to) {
        for (int i = 0; i < n; i += LANES) {
            T own[LANES];
            store(own, load(x + i) / by);
            memcpy(to + i, own, std::min(LANES, n - i) * sizeof(T));
        }
    }
};

#if defined(WITH_AVX512) && defined(__AVX512BF16__)
template <> struct Word<bf16> {  // two values each
    static constexpr int PER = 2;
#if defined(WITH_TILES)
    static constexpr int UNIT = TILE_INPUTS;
#else
    static constexpr int UNIT = PER;
#endif
    // Words `word`, … of a row of n values.
    static vf get(const bf16* x, int word, int n) {
        const int left = n - 2 * word;
        return (vf)(left >= 32 ? _mm512_loadu_si512(x + 2 * word) : _mm512_maskz_loadu_epi16((1ull << left) - 1, x + 2 * word));
    }
    // Two rows of n values, value beside value, in an order that `divide` undoes.
    static void spread(const bf16* x, const bf16* y, int n, float* to) {
        for (int i = 0; i < n; i += 32) {
            const __m512i a = (__m512i)get(x, i / 2, n), b = (__m512i)get(y, i / 2, n);
            store(to + i, (vf)_mm512_unpacklo_epi16(a, b));
            store(to + i + 16, (vf)_mm512_unpackhi_epi16(a, b));
        }
    }
    static constexpr int channel(int column) {
        const int lane = column % 16;
        return column / 32 * 32 + lane / 4 * 8 + column % 32 / 16 * 4 + lane % 4;
    }
    // Values `at`, … of a row of words; the floats that they take the place of have been read.
    static void put(float* words, int64_t at, vf value) {
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
        memcpy((bf16*)words + at, &rounded, sizeof rounded);
    }
    static vf add(vf acc, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
    static void divide(const float* x, float by, int n, bf16* to) {
        for (int i = 0; i < n; i += 32) {
            const vu low = (vu)as_stored<bf16>(load(x + i) / by), high = (vu)as_stored<bf16>(load(x + i + 16) / by);
            const __m512i row = _mm512_packus_epi32((__m512i)(low >> 16), (__m512i)(high >> 16));
            _mm512_mask_storeu_epi16(to + i, uint32_t(n - i >= 32 ? ~0u : (1u << (n - i)) - 1), row);
        }
    }
};
#endif

constexpr int PLACES = 512;          // of a block
constexpr int MOST_TOGETHER = 128;   // heads of all rows that are computed together
constexpr int BESIDE = PLACES + 48;  // floats between scores of heads: products are written in whole tiles
constexpr int WIDEST_HEAD = 1024;
constexpr int SLOTS_AT_ONCE = 64;
constexpr int ASKED = 6144;  // bytes between using keys or values and asking for others
#if defined(WITH_AVX512)
constexpr int TALL = 6, DEEP = 4;  // heads by vectors that the registers hold sums of
#else
constexpr int TALL = 3, DEEP = 2;
#endif

static inline int64_t whole_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
static inline int64_t columns_of(int64_t width) { return (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

// Floats of scratch memory that `attend` needs at most.
static inline int64_t scratch_of(int64_t width) {
    return (MOST_TOGETHER + LANES) * BESIDE + (4 * MOST_TOGETHER + PLACES / 2) * columns_of(width);
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

// The lanes of a and b that a corner of the turned square takes; GCC and clang name the operation differently.
template <int STEP, bool LOW, int... I>
static inline vf corner(vf a, vf b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (I & STEP ? LANES + I - (LOW ? STEP : 0) : I + (LOW ? 0 : STEP))...);
#else
    return __builtin_shuffle(a, b, vi{(I & STEP ? LANES + I - (LOW ? STEP : 0) : I + (LOW ? 0 : STEP))...});
#endif
}

// Each value's neighbour in its pair.
template <int... I> static inline vf neighbours(vf x, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, (I ^ 1)...);
#else
    return __builtin_shuffle(x, vi{(I ^ 1)...});
#endif
}
static inline vf neighbours(vf x) { return neighbours(x, std::make_integer_sequence<int, LANES>{}); }

// Turn a square of LANES by LANES words: swap its halves' corners, then those of its quarters, ….
template <int STEP = LANES / 2> static inline __attribute__((always_inline)) void turn(vf* rows) {
    constexpr std::make_integer_sequence<int, LANES> lanes;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        const vf a = rows[i], b = rows[i + STEP];
        rows[i] = corner<STEP, true>(a, b, lanes), rows[i + STEP] = corner<STEP, false>(a, b, lanes);
    }
    if constexpr (STEP > 1) turn<STEP / 2>(rows);
}

// The slots of a row one after the other, from the one at `at` of its first run on.
struct Slots {
    const Run* run;
    int64_t at;
    void enter() {
        while (at >= run->length) at -= run->length, run++;
    }
    int32_t next() {
        enter();
        return int32_t(run->start + at++);
    }
};

// Ask for the row of T that lies ASKED bytes behind one, a cache line each 64 bytes. More than memory has under way would take
// the place of what is still to be read in the nearest cache.
template <class T> static inline void ask_behind(const T* row, int width) {
    for (int i = 0; i < width; i += 64 / int(sizeof(T))) __builtin_prefetch(row + ASKED / sizeof(T) + i, 0, 3);
}

// Queries of m heads as `scores_of` takes them, by way of `room` where they have to be turned.
template <class T> static const float* turned(int, const float* query, int, float*) { return query; }

// Scores of m heads' queries, as words (m, columns_of(width)), with the keys of n slots.
template <class T>
static void scores_of(int m, const float* query, Slots slots, int n, const T* keys, int width, float* block, float* scores) {
    const int n_words = (width + Word<T>::PER - 1) / Word<T>::PER;
    for (int from = 0; from < n; from += SLOTS_AT_ONCE) {
        const int some = std::min(SLOTS_AT_ONCE, n - from);
        for (int s = 0; s < some; s += LANES) {
            const T* own[LANES];  // behind the last slot it stands again: that score is overwritten or never read
            for (int i = 0; i < LANES; i++) {
                own[i] = s + i < some ? keys + int64_t(slots.next()) * width : own[i - 1];
                ask_behind(own[i], width);
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
        add_sums<T>(m, query, columns_of(width), block, SLOTS_AT_ONCE, n_words, whole_lanes(some), scores + from, BESIDE, true);
    }
}

// Spread the values of places [from, to), those of slots from place `first` on; others, and those behind `last`, are 0.
template <class T>
static void spread(Slots& slots, int first, int last, int from, int to, const T* values, int width, float* block) {
    constexpr int PER = Word<T>::PER;
    static const T none[WIDEST_HEAD] = {};
    auto next = [&](int place) {
        if (place < first || place >= last) return none;
        const T* row = values + int64_t(slots.next()) * width;
        ask_behind(row, width);
        return row;
    };
    for (int place = from; place < to; place += PER, block += columns_of(width)) {
        const T* x = next(place);
        Word<T>::spread(x, PER > 1 ? next(place + 1) : nullptr, width, block);
    }
}

// Add probabilities of n places, as words, times their values to `out` (m, columns_of(width)). The first slot has the place
// `first` among them; before it probabilities are 0.
template <class T>
static void mix(int m, const float* probs, Slots slots, int first, int n, const T* values, int width, float* block, float* out) {
    constexpr int PER = Word<T>::PER;
    const int64_t wide = columns_of(width);
    for (int from = 0; from < n; from += SLOTS_AT_ONCE) {
        const int to = std::min(from + SLOTS_AT_ONCE, n);
        spread(slots, first, n, from, to, values, width, block);
        add_sums<T>(m, probs + from / PER, BESIDE, block, wide, (to - from + PER - 1) / PER, wide, out, wide, false);
    }
}

#if defined(WITH_TILES)
template <> const float* turned<bf16>(int m, const float* query, int width, float* room) {
    const int64_t wide = columns_of(width), whole = whole_tiles(width);
    for (int h = 0; h < m; h += SIDE)
        turn_rows((const bf16*)(query + h * wide), 2 * wide, std::min(SIDE, m - h), width, 0, int(whole),
                  (bf16*)room + h * whole);
    return room;
}

// Heads behind the last of m get scores, too, up to a whole tile: their own come later, or are not read there.
template <>
void scores_of<bf16>(int m, const float* query, Slots slots, int n, const bf16* keys, int width, float* block, float* scores) {
    const bf16* own = (const bf16*)block;
    slots.enter();
    if (slots.run->length - slots.at >= n) own = keys + int64_t(slots.next()) * width;
    else
        for (int s = 0; s < n; s++) memcpy((bf16*)block + s * width, keys + int64_t(slots.next()) * width, width * sizeof(bf16));
    tile_products((const bf16*)query, m, own, width, n, width, scores, BESIDE);
}

// What at most G times 16 heads read in 32 columns, added to C; n: whole tiles of places.
template <int G>
static inline void mix_tiles(int m, const float* probs, int n, const float* block, int64_t wide, float* out) {
    alignas(64) float padded[SIDE][2 * SIDE];  // in place of what is no whole tile
    const bool whole = m == G * SIDE;
    auto in_place = [&](int t) { return whole || t < 2 * (G - 1); };
    auto of = [&](int t) { return (in_place(t) ? out + t / 2 * SIDE * wide : padded[0]) + t % 2 * SIDE; };
    auto stride = [&](int t) { return (in_place(t) ? wide : 2 * SIDE) * sizeof(float); };
    float* rest = out + (G - 1) * SIDE * wide;
    const int n_rest = whole ? 0 : m - (G - 1) * SIDE;
    for (int h = 0; h < n_rest; h++) memcpy(padded[h], rest + h * wide, sizeof padded[h]);
    unrolled<2 * G>([&](auto t) { load_tile<t>(of(t), stride(t)); });
    for (int at = 0; at < n; at += TILE_INPUTS, block += SIDE * wide) {
        unrolled<2>([&](auto d) { load_tile<6 + d>(block + d * SIDE, wide * sizeof(float)); });
        unrolled<G>([&](auto g) {
            load_tile<4 + g>((const bf16*)(probs + g * SIDE * BESIDE) + at, BESIDE * sizeof(float));
            unrolled<2>([&](auto d) { add_bf16<2 * g + d, 4 + g, 6 + d>(); });
        });
    }
    unrolled<2 * G>([&](auto t) { store_tile<t>(of(t), stride(t)); });
    for (int h = 0; h < n_rest; h++) memcpy(rest + h * wide, padded[h], sizeof padded[h]);
}

template <>
void mix<bf16>(
    int m, const float* probs, Slots slots, int first, int n, const bf16* values, int width, float* block, float* out) {
    const int64_t wide = columns_of(width), whole = whole_tiles(n);
    spread(slots, first, n, 0, int(whole), values, width, block);
    for (int h = 0; h < m; h += 2 * SIDE)
        for (int64_t d = 0; d < wide; d += 2 * SIDE) {
            const float* own = probs + h * BESIDE;
            if (m - h > SIDE) mix_tiles<2>(std::min(m - h, 2 * SIDE), own, int(whole), block + d, wide, out + h * wide + d);
            else mix_tiles<1>(m - h, own, int(whole), block + d, wide, out + h * wide + d);
        }
}
#endif

constexpr float LOG2_E = 1.44269504f;

struct Total {  // of exponentials
    float largest = -3e38f;  // exponent of 2, which they are relative to
    float sum = 0;
};

// Bound scores: c tanh(x / c).
static inline vf capped(vf x, float c) {
    const vf y = x / c, squared = y * y;
    // Near 0 the quotient of exponentials would lose what distinguishes it from 0: the series there.
    const vf near = y * (1.0f + squared * (-0.33333333f + squared * (0.13333333f + squared * (-0.05396825f + squared * 0.02186949f))));
    const vf far = 1.0f - 2.0f / (exp(y * 2.0f) + 1.0f);
    const vi is_near = squared < 0.0625f;
    return (vf)((is_near & (vi)near) | (~is_near & (vi)far)) * c;
}

// exp(score * scaling - the largest so far), scores capped where there is a `softcap`, as words of T, in place of a head's
// scores at places [from, to) of n; zeros elsewhere. Returns what sums of earlier places are to be multiplied by.
template <class T> static inline float exponentials(
    float* scores, int from, int to, int n, float scaling, float softcap, Total& total) {
    if (softcap > 0) {
        for (int j = 0; j < n; j += LANES) store(scores + j, capped(load(scores + j) * scaling, softcap));
        scaling = 1;
    }
    std::fill(scores, scores + from, -INFINITY);
    std::fill(scores + to, scores + n, -INFINITY);
    const float unit = scaling * LOG2_E;
    vf most = splat(-INFINITY);
    for (int j = 0; j < n; j += LANES) most = larger(load(scores + j), most);
    float largest = total.largest;
    for (int i = 0; i < LANES; i++) largest = std::max(largest, most[i] * unit);
    vf sums = {};
    for (int j = 0; j < n; j += LANES) {
        const vf e = exp2(fma(load(scores + j), splat(unit), splat(-largest)));
        Word<T>::put(scores, j, e);
        sums += e;
    }
    const float factor = total.largest == largest ? 1.0f : exp2(splat(total.largest - largest))[0];
    total = {largest, total.sum * factor + sum(sums)};
    return factor;
}

// Rows that read the keys and values of one head together, by `n_heads` query heads each.
template <class T> struct Reader {
    const Run *first, *last;  // the runs of slots that it sees
    int64_t oldest, n_seen;
    const T* query;  // (n_heads, width)
    T* out;
    const T* sinks;  // (n_heads,) scores of no slot, null: none
    int64_t end() const { return oldest + n_seen; }
    // Whether places and slots have the same numbers in its first run.
    bool in_place() const { return first < last && first->start == oldest; }
};

// Slots that some rows read together; before the first and behind the last of them there may be ones that a row does not see.
struct Together {
    Run run;
    bool possible;
};

// One run of slots for each row: all that any of them sees. Else, what hangs on one text: whole units of what all rows see.
template <class T> static Together together_of(const Reader<T>* rows, int n_rows, const T* values, int width) {
    bool in_place = true, one_run = true;
    int64_t from = INT64_MAX, all_from = 0, to = 0, all_to = INT64_MAX;
    for (int r = 0; r < n_rows; r++) {
        const Reader<T>& row = rows[r];
        in_place &= row.in_place(), one_run &= row.last - row.first == 1;
        if (!in_place) return {{0, 0}, n_rows == 1};
        const int64_t end = row.oldest + row.first->length;
        from = std::min(from, row.oldest), all_from = std::max(all_from, row.oldest);
        to = std::max(to, end), all_to = std::min(all_to, end);
    }
    // 0 times what is no number would be none.
    auto finite = [&](int64_t first, int64_t last) {
        vi odd = {};
        const int n = int(std::max<int64_t>(0, last - first)) * width;
        for (int i = 0; i < n; i += LANES) odd |= ~(vi)((vf)((vi)part_of(values + first * width, i, n) & 0x7fffffff) < INFINITY);
        for (int i = 0; i < LANES; i++)
            if (odd[i]) return false;
        return true;
    };
    if (!one_run) to = all_to - all_to % Word<T>::UNIT;
    const bool possible = n_rows == 1 || (finite(from, std::min(all_from, to)) && finite(all_to, to));
    return {{int32_t(from), int32_t(std::max<int64_t>(0, to - from))}, possible};
}

// Copies of a key head's slots from slot 0 on: whole blocks of PLACES. `coded_slots.h` says how they lie.
struct CodedHead {
    const uint8_t* units;
    int64_t n_slots;
};
static void coded_scores(int, const float*, int64_t, const uint8_t*, int, int8_t*, float*);
static void coded_mix(int, const float*, const uint8_t*, int, int8_t*, float*, int64_t);
static int64_t unit_bytes(int width);

// What rows read. `coded`: all of them see its slots, and read these copies in place of keys and values.
template <class T>
static void attend(
    const Reader<T>* rows, int n_rows, int n_heads, int width, float scaling, float softcap, const T* keys,
    const T* values, CodedHead coded, float* scratch) {
    constexpr int UNIT = Word<T>::UNIT;
    const Together together = together_of(rows, n_rows, values, width);
    if (!together.possible) {
        for (int r = 0; r < n_rows; r++) attend(rows + r, 1, n_heads, width, scaling, softcap, keys, values, coded, scratch);
        return;
    }
    const int n = n_rows * n_heads;
    const int64_t wide = columns_of(width);
    float *scores = scratch, *mixed = scores + (n + LANES) * BESIDE, *query = mixed + n * wide;
    float *room = query + n * wide, *own_room = room + MOST_TOGETHER * wide, *block = own_room + MOST_TOGETHER * wide;
    int64_t oldest = INT64_MAX, end = 0;
    for (int r = 0; r < n_rows; r++) oldest = std::min(oldest, rows[r].oldest), end = std::max(end, rows[r].end());
    for (int h = 0; h < n; h++)
        for (int w = 0; w * Word<T>::PER < width; w += LANES)
            store(query + h * wide + w, Word<T>::get(rows[h / n_heads].query + h % n_heads * width, w, width));
    const float* all_turned = turned<T>(n, query, width, room);
    if (coded.n_slots)  // which need no turned queries of single rows
        for (int h = 0; h < n; h++)
            for (int i = 0; i < width; i += LANES)
                store(own_room + h * wide + i, load(rows[h / n_heads].query + h % n_heads * width + i));
    Total totals[MOST_TOGETHER];
    std::fill(mixed, mixed + n * wide, 0.0f);
    for (int64_t at = oldest - oldest % PLACES; at < end; at += PLACES) {
        // work(first head, number of heads, slots, place of the first of them, first place, number of places) for what rows
        // read together in this block, and for what each row reads alone.
        auto each_part = [&](auto&& work) {
            auto part = [&](int h, int m, const Run* run, int64_t oldest, int64_t from, int64_t to) {
                from = std::max(from, at), to = std::min(to, at + PLACES);
                const int64_t first = std::max(from, oldest);
                if (first < to) work(h, m, Slots{run, first - oldest}, int(first - from), int(from - at), int(to - from));
            };
            const int64_t from = together.run.start, to = from + together.run.length;
            part(0, n, &together.run, from, from - from % UNIT, to);
            for (int r = 0; r < n_rows; r++) {
                const Reader<T>& row = rows[r];
                const int64_t own = row.oldest - row.oldest % UNIT;
                part(r * n_heads, n_heads, row.first, row.oldest, together.run.length ? std::max(own, to) : own, row.end());
            }
        };
        const bool by_codes = at < coded.n_slots;
        const uint8_t* unit = coded.units + at / PLACES * unit_bytes(width);
        if (by_codes) coded_scores(n, own_room, wide, unit, width, (int8_t*)block, scores);
        else each_part([&](int h, int m, Slots slots, int first, int place, int n_places) {
            const float* own = m == n ? all_turned : turned<T>(m, query + h * wide, width, own_room);
            scores_of<T>(m, own, slots, n_places - first, keys, width, block, scores + h * BESIDE + place + first);
        });
        const int n_places = int(std::min<int64_t>(PLACES, columns_of(end - at)));
        for (int h = 0; h < n; h++) {
            const Reader<T>& row = rows[h / n_heads];
            auto within = [&](int64_t place) { return int(std::min<int64_t>(std::max<int64_t>(0, place - at), n_places)); };
            float* own = mixed + h * wide;
            const auto make = by_codes ? exponentials<float> : exponentials<T>;
            const float factor = make(
                scores + h * BESIDE, within(row.oldest), within(row.end()), n_places, scaling, softcap, totals[h]);
            if (factor != 1)
                for (int64_t i = 0; i < wide; i += LANES) store(own + i, load(own + i) * factor);
        }
        if (by_codes) coded_mix(n, scores, unit, width, (int8_t*)block, mixed, wide);
        else each_part([&](int h, int m, Slots slots, int first, int place, int n_places) {
            mix<T>(m, scores + h * BESIDE + place / Word<T>::PER, slots, first, n_places, values, width, block, mixed + h * wide);
        });
    }
    for (int h = 0; h < n; h++) {
        const Reader<T>& row = rows[h / n_heads];
        float sum = totals[h].sum;
        if (row.sinks) sum += exp2(splat(to_float(row.sinks[h % n_heads]) * LOG2_E - totals[h].largest))[0];
        Word<T>::divide(mixed + h * wide, sum, width, row.out + h % n_heads * width);
    }
}
