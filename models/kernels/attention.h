// Attention of rows over the slots that each row sees. A row's sums are the same whether its slots are consecutive (plain
// decoding) or have gaps (a tree), and however many rows the pass has.
//
// Slots that a row sees have places: the i-th slot is at place `oldest` + i, which in plain decoding is the slot's number.
// Sums go over blocks of places, which begin at the same places for all rows. A place that a row does not see adds exactly 0.
//
// Both products are sums over words of 32 bits. A vector has a lane per slot (scores) or per value (outputs), so nothing is
// added across lanes. For that, keys are transposed and values interleaved in pairs, once for all heads that read them. Tile
// instructions read keys as they are stored, and need transposed queries.
#pragma once
#include "dense.h"
#include "view.h"
#include "words.h"

constexpr int PLACES = 512;  // places of a block
constexpr int MAX_HEADS = 128;  // heads, of all rows together, that are computed in one call
constexpr int SCORE_STRIDE = PLACES + 48;  // floats from one head's scores to the next: products are written in whole tiles
constexpr int MAX_HEAD_WIDTH = 1024;
constexpr int SLOT_BATCH = 64;  // slots whose keys or values are laid out at a time

static inline int64_t whole_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
static inline int64_t columns_of(int64_t width) { return (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

// The most floats of scratch memory that `attend` needs.
static inline int64_t scratch_of(int64_t width) {
    return (MAX_HEADS + LANES) * SCORE_STRIDE + (4 * MAX_HEADS + PLACES / 2) * columns_of(width);
}

// One exchange of a transposition: take the lanes of a and b for a corner of the square.
template <int STEP, bool LOW, int... I>
static inline vf corner(vf a, vf b, std::integer_sequence<int, I...>) {
    return shuffled<(I & STEP ? LANES + I - (LOW ? STEP : 0) : I + (LOW ? 0 : STEP))...>(a, b);
}

// Swap the two values of each pair of lanes.
template <int... I> static inline vf swap_pairs(vf x, std::integer_sequence<int, I...>) {
    return shuffled<(I ^ 1)...>(x, x);
}
static inline vf swap_pairs(vf x) { return swap_pairs(x, std::make_integer_sequence<int, LANES>{}); }

// Transpose a square of LANES by LANES words: exchange corners of its halves, then of its quarters, and so on.
template <int STEP = LANES / 2> static inline __attribute__((always_inline)) void transpose(vf* rows) {
    constexpr std::make_integer_sequence<int, LANES> lanes;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        const vf a = rows[i], b = rows[i + STEP];
        rows[i] = corner<STEP, true>(a, b, lanes), rows[i + STEP] = corner<STEP, false>(a, b, lanes);
    }
    if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

// Iterates over the slots of a row, from index `at` of its first run on.
struct Slots {
    const Run* run;
    int64_t at;
    void skip_finished_runs() {
        while (at >= run->length) at -= run->length, run++;
    }
    int32_t next() {
        skip_finished_runs();
        return int32_t(run->start + at++);
    }
    // The row of the next slot, null: this run has no more.
    template <class T> const void* ahead(const T* rows, int width) const {
        return at < run->length ? rows + (run->start + at) * width : nullptr;
    }
};

// Queries of m heads in the layout of `scores_of`; a transposed copy is written to `to` if tiles need one.
template <class T> static const float* tiled_queries(int, const float* query, int, float*) { return query; }

// Scores of m queries, words (m, columns_of(width)), with the keys of n slots.
template <class T>
static void scores_of(int m, const float* query, Slots slots, int n, const T* keys, int width, float* block, float* scores) {
    const int n_words = (width + Word<T>::PER - 1) / Word<T>::PER;
    for (int from = 0; from < n; from += SLOT_BATCH) {
        const int n_slots = std::min(SLOT_BATCH, n - from);
        for (int s = 0; s < n_slots; s += LANES) {
            const T* rows[LANES];  // the last slot fills up the vector: its further scores are overwritten or never read
            for (int i = 0; i < LANES; i++)
                rows[i] = s + i < n_slots ? keys + int64_t(slots.next()) * width : rows[i - 1];
            for (int w = 0; w < n_words; w += LANES) {
                vf square[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) square[i] = Word<T>::get(rows[i], w, width);
                transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) store(block + (w + i) * SLOT_BATCH + s, square[i]);
            }
        }
        const LaidOut laid_out{block, SLOT_BATCH, slots.ahead(keys, width)};
        add_sums<T>(m, query, columns_of(width), laid_out, n_words, int(whole_lanes(n_slots)), scores + from, SCORE_STRIDE, true);
    }
}

// The values of at most SLOT_BATCH places, by their slots' rows. They are read where they are stored, for few heads, or laid out
// once for all heads.
template <class T> struct ValueRows {
    const T* rows[SLOT_BATCH];
    int width;
    const void* ahead;
    // Take the rows of places [from, to). The next slots are at places [first, last); other places have zeros.
    void take(Slots& slots, int first, int last, int from, int to, const T* values) {
        static const T none[MAX_HEAD_WIDTH] = {};
        std::fill(rows, rows + SLOT_BATCH, none);
        for (int place = std::max(from, first); place < std::min(to, last); place++)
            rows[place - from] = values + int64_t(slots.next()) * width;
        ahead = slots.ahead(values, width);
    }
    template <int D> void get(int64_t k, int at, vf* to) const {
        constexpr int PER = Word<T>::PER;
        prefetch_part<D>(ahead, k * columns_of(width) + at);
        Word<T>::template columns<D>(rows[PER * k], rows[PER * k + PER - 1], at, width, to);
    }
    // Lay out n places as vectors of columns.
    void lay_out(int n, float* block) const {
        const int wide = int(columns_of(width));
        for (int k = 0; k * Word<T>::PER < n; k++, block += wide)
            for (int at = 0; at < wide; at += 2 * LANES) {
                vf part[2];
                get<2>(k, at, part);
                store(block + at, part[0]), store(block + at + LANES, part[1]);
            }
    }
};

// Add probabilities of n places, as words, times their values to `out` (m, columns_of(width)). The first slot is at place
// `first`; before it probabilities are 0.
template <class T>
static void mix(int m, const float* probs, Slots slots, int first, int n, const T* values, int width, float* block, float* out) {
    constexpr int PER = Word<T>::PER;
    const int64_t wide = columns_of(width);
    ValueRows<T> batch{{}, width, nullptr};
    for (int from = 0; from < n; from += SLOT_BATCH) {
        const int to = std::min(from + SLOT_BATCH, n), n_words = (to - from + PER - 1) / PER;
        batch.take(slots, first, n, from, to, values);
        const float* a = probs + from / PER;
        if (m <= SUM_ROWS) add_sums<T, 2>(m, a, SCORE_STRIDE, batch, n_words, int(wide), out, wide, false);
        else {
            batch.lay_out(to - from, block);
            add_sums<T>(m, a, SCORE_STRIDE, LaidOut{block, wide, nullptr}, n_words, int(wide), out, wide, false);
        }
    }
}

#if defined(WITH_TILES)
template <> const float* tiled_queries<bf16>(int m, const float* query, int width, float* to) {
    const int64_t wide = columns_of(width), whole = whole_tiles(width);
    for (int h = 0; h < m; h += SIDE)
        tile_rows((const bf16*)(query + h * wide), 2 * wide, std::min(SIDE, m - h), width, 0, int(whole),
                  (bf16*)to + h * whole);
    return to;
}

// Scores are written for whole tiles of heads. Those after the last of m heads are overwritten later, or never read.
template <>
void scores_of<bf16>(int m, const float* query, Slots slots, int n, const bf16* keys, int width, float* block, float* scores) {
    const bf16* rows = (const bf16*)block;
    slots.skip_finished_runs();
    if (slots.run->length - slots.at >= n) rows = keys + int64_t(slots.next()) * width;
    else
        for (int s = 0; s < n; s++) memcpy((bf16*)block + s * width, keys + int64_t(slots.next()) * width, width * sizeof(bf16));
    tile_products((const bf16*)query, m, rows, width, n, width, scores, SCORE_STRIDE);
}

// Add to `out` the weighted values of 2 * SIDE columns for at most G * SIDE heads. n: places, in whole tiles.
template <int G>
static inline void add_value_tiles(int m, const float* probs, int n, const float* block, int64_t wide, float* out) {
    alignas(64) float padded[SIDE][2 * SIDE];  // stands for the last rows if they do not fill a tile
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
            load_tile<4 + g>((const bf16*)(probs + g * SIDE * SCORE_STRIDE) + at, SCORE_STRIDE * sizeof(float));
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
    ValueRows<bf16> batch{{}, width, nullptr};
    for (int from = 0; from < whole; from += SLOT_BATCH) {
        const int to = std::min(from + SLOT_BATCH, int(whole));
        batch.take(slots, first, n, from, to, values);
        batch.lay_out(to - from, block + from / 2 * wide);
    }
    for (int h = 0; h < m; h += 2 * SIDE)
        for (int64_t d = 0; d < wide; d += 2 * SIDE) {
            const float* head = probs + h * SCORE_STRIDE;
            float* to = out + h * wide + d;
            if (m - h > SIDE) add_value_tiles<2>(std::min(m - h, 2 * SIDE), head, int(whole), block + d, wide, to);
            else add_value_tiles<1>(m - h, head, int(whole), block + d, wide, to);
        }
}
#endif

constexpr float LOG2_E = 1.44269504f;

struct SoftmaxTotal {  // the running sum of exponentials of an online softmax
    float largest = -3e38f;  // the largest exponent of 2 so far; exponentials are relative to it
    float sum = 0;
};

// Softcap: c tanh(x / c).
static inline vf softcapped(vf x, float c) {
    const vf y = x / c, squared = y * y;
    // Near 0 the quotient of exponentials would cancel, so a series replaces it.
    const vf near = y * (1.0f + squared * (-0.33333333f + squared * (0.13333333f + squared * (-0.05396825f + squared * 0.02186949f))));
    const vf far = 1.0f - 2.0f / (exp(y * 2.0f) + 1.0f);
    const vi is_near = squared < 0.0625f;
    return (vf)((is_near & (vi)near) | (~is_near & (vi)far)) * c;
}

// Replace a head's scores at places [from, to) of n by exp(score * scaling - largest so far), as words of T, and those at
// other places by zeros. `softcap`: bound of scores, 0: none. Returns the factor that sums of earlier places need.
template <class T> static inline float exponentiate(
    float* scores, int from, int to, int n, float scaling, float softcap, SoftmaxTotal& total) {
    if (softcap > 0) {
        for (int j = 0; j < n; j += LANES) store(scores + j, softcapped(load(scores + j) * scaling, softcap));
        scaling = 1;
    }
    std::fill(scores, scores + from, -INFINITY);
    std::fill(scores + to, scores + n, -INFINITY);
    const float unit = scaling * LOG2_E;
    vf peak = splat(-INFINITY);
    for (int j = 0; j < n; j += LANES) peak = larger(load(scores + j), peak);
    float largest = total.largest;
    for (int i = 0; i < LANES; i++) largest = std::max(largest, peak[i] * unit);
    vf sums = {};
    for (int j = 0; j < n; j += LANES) {
        const vf e = exp2(fma(load(scores + j), splat(unit), splat(-largest)));
        Word<T>::store_words(scores, j, e);
        sums += e;
    }
    const float factor = total.largest == largest ? 1.0f : exp2(splat(total.largest - largest))[0];
    total = {largest, total.sum * factor + sum(sums)};
    return factor;
}

// A row that reads the keys and values of one key head, with `n_heads` query heads.
template <class T> struct AttentionRow {
    const Run *first, *last;  // the runs of slots that it sees
    int64_t oldest, n_seen;
    const T* query;  // (n_heads, width)
    T* out;
    const T* sinks;  // (n_heads,) scores without a slot, null: none
    int64_t end() const { return oldest + n_seen; }
    // Whether places equal slot numbers in its first run.
    bool in_place() const { return first < last && first->start == oldest; }
};

// A run of slots that some rows read together, if possible. A row need not see the slots at its ends.
struct SharedRun {
    Run run;
    bool possible;
};

// The run that rows read together. If each row sees a single run, it has all slots that any row sees; otherwise, the slots that
// all rows see, in whole units.
template <class T> static SharedRun shared_run_of(const AttentionRow<T>* rows, int n_rows, const T* values, int width) {
    bool in_place = true, one_run = true;
    int64_t from = INT64_MAX, all_from = 0, to = 0, all_to = INT64_MAX;
    for (int r = 0; r < n_rows; r++) {
        const AttentionRow<T>& row = rows[r];
        in_place &= row.in_place(), one_run &= row.last - row.first == 1;
        if (!in_place) return {{0, 0}, n_rows == 1};
        const int64_t end = row.oldest + row.first->length;
        from = std::min(from, row.oldest), all_from = std::max(all_from, row.oldest);
        to = std::max(to, end), all_to = std::min(all_to, end);
    }
    // A slot that a row does not see has probability 0, but 0 times infinity or NaN would be NaN.
    auto finite = [&](int64_t first, int64_t last) {
        vi non_finite = {};
        const int n = int(std::max<int64_t>(0, last - first)) * width;
        for (int i = 0; i < n; i += LANES)
            non_finite |= ~(vi)((vf)((vi)part_of(values + first * width, i, n) & 0x7fffffff) < INFINITY);
        for (int i = 0; i < LANES; i++)
            if (non_finite[i]) return false;
        return true;
    };
    if (!one_run) to = all_to - all_to % Word<T>::UNIT;
    const bool possible = n_rows == 1 || (finite(from, std::min(all_from, to)) && finite(all_to, to));
    return {{int32_t(from), int32_t(std::max<int64_t>(0, to - from))}, possible};
}

// Copies in 4 bits of a key head's first slots, in whole blocks of PLACES; `coded_slots.h` describes their layout.
struct CodedHead {
    const uint8_t* units;
    int64_t n_slots;
};
static void coded_scores(int, const float*, int64_t, const uint8_t*, int, int8_t*, float*);
static void add_coded_values(int, const float*, const uint8_t*, int, int8_t*, float*, int64_t);
static int64_t unit_bytes(int width);

// Write each row's weighted sums of values to its `out`. `coded`: copies of slots that all rows see, read in place of these.
template <class T>
static void attend(
    const AttentionRow<T>* rows, int n_rows, int n_heads, int width, float scaling, float softcap, const T* keys,
    const T* values, CodedHead coded, float* scratch) {
    constexpr int UNIT = Word<T>::UNIT;
    const SharedRun shared = shared_run_of(rows, n_rows, values, width);
    if (!shared.possible) {
        for (int r = 0; r < n_rows; r++) attend(rows + r, 1, n_heads, width, scaling, softcap, keys, values, coded, scratch);
        return;
    }
    const int n = n_rows * n_heads;
    const int64_t wide = columns_of(width);
    float *scores = scratch, *mixed = scores + (n + LANES) * SCORE_STRIDE, *query = mixed + n * wide;
    float *tiled = query + n * wide, *row_tiled = tiled + MAX_HEADS * wide, *block = row_tiled + MAX_HEADS * wide;
    int64_t oldest = INT64_MAX, end = 0;
    for (int r = 0; r < n_rows; r++) oldest = std::min(oldest, rows[r].oldest), end = std::max(end, rows[r].end());
    for (int h = 0; h < n; h++)
        for (int w = 0; w * Word<T>::PER < width; w += LANES)
            store(query + h * wide + w, Word<T>::get(rows[h / n_heads].query + h % n_heads * width, w, width));
    const float* all_tiled = tiled_queries<T>(n, query, width, tiled);
    if (coded.n_slots)  // the copies need queries in floats; `row_tiled` is free, because all rows read these slots together
        for (int h = 0; h < n; h++)
            for (int i = 0; i < width; i += LANES)
                store(row_tiled + h * wide + i, load(rows[h / n_heads].query + h % n_heads * width + i));
    SoftmaxTotal totals[MAX_HEADS];
    std::fill(mixed, mixed + n * wide, 0.0f);
    for (int64_t at = oldest - oldest % PLACES; at < end; at += PLACES) {
        // Call work(first head, number of heads, slots, place of the first slot, first place, number of places) for the part
        // of this block that rows read together, and for each part that a row reads alone.
        auto each_part = [&](auto&& work) {
            auto compute = [&](int h, int m, const Run* run, int64_t oldest, int64_t from, int64_t to) {
                from = std::max(from, at), to = std::min(to, at + PLACES);
                const int64_t first = std::max(from, oldest);
                if (first < to) work(h, m, Slots{run, first - oldest}, int(first - from), int(from - at), int(to - from));
            };
            const int64_t from = shared.run.start, to = from + shared.run.length;
            compute(0, n, &shared.run, from, from - from % UNIT, to);
            for (int r = 0; r < n_rows; r++) {
                const AttentionRow<T>& row = rows[r];
                const int64_t begin = row.oldest - row.oldest % UNIT;
                compute(r * n_heads, n_heads, row.first, row.oldest, shared.run.length ? std::max(begin, to) : begin, row.end());
            }
        };
        const bool by_codes = at < coded.n_slots;
        const uint8_t* unit = coded.units + at / PLACES * unit_bytes(width);
        if (by_codes) coded_scores(n, row_tiled, wide, unit, width, (int8_t*)block, scores);
        else each_part([&](int h, int m, Slots slots, int first, int place, int n_places) {
            const float* queries = m == n ? all_tiled : tiled_queries<T>(m, query + h * wide, width, row_tiled);
            scores_of<T>(m, queries, slots, n_places - first, keys, width, block, scores + h * SCORE_STRIDE + place + first);
        });
        const int n_places = int(std::min<int64_t>(PLACES, columns_of(end - at)));
        for (int h = 0; h < n; h++) {
            const AttentionRow<T>& row = rows[h / n_heads];
            auto within = [&](int64_t place) { return int(std::min<int64_t>(std::max<int64_t>(0, place - at), n_places)); };
            float* sums = mixed + h * wide;
            const auto make = by_codes ? exponentiate<float> : exponentiate<T>;
            const float factor = make(
                scores + h * SCORE_STRIDE, within(row.oldest), within(row.end()), n_places, scaling, softcap, totals[h]);
            if (factor != 1)
                for (int64_t i = 0; i < wide; i += LANES) store(sums + i, load(sums + i) * factor);
        }
        if (by_codes) add_coded_values(n, scores, unit, width, (int8_t*)block, mixed, wide);
        else each_part([&](int h, int m, Slots slots, int first, int place, int n_places) {
            const float* probs = scores + h * SCORE_STRIDE + place / Word<T>::PER;
            mix<T>(m, probs, slots, first, n_places, values, width, block, mixed + h * wide);
        });
    }
    for (int h = 0; h < n; h++) {
        const AttentionRow<T>& row = rows[h / n_heads];
        float sum = totals[h].sum;
        if (row.sinks) sum += exp2(splat(to_float(row.sinks[h % n_heads]) * LOG2_E - totals[h].largest))[0];
        Word<T>::divide(mixed + h * wide, sum, width, row.out + h % n_heads * width);
    }
}
