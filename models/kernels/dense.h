// Dense products C[m][n] = sum over k of X[m][k] * W[n][k], with W in the model's layout.
//
// The order of an element's sum does not depend on m, n or its tile: in each block of BLOCK inputs, each lane sums chunks of
// Chunk<T>::SIZE inputs; then `sum` adds the lanes; then the blocks are added in order. So a pass over many rows gives the same
// bits as passes over one row.
#pragma once
#include <algorithm>
#include "tiles.h"

constexpr int BLOCK = 2048;
constexpr int PREFETCH_CHUNKS = 8;  // distance in chunks of inputs to the weights that are prefetched to the first-level cache
constexpr int MAX_STREAMED_ROWS = 96;  // up to so many rows stay in the cache while weights stream; with more rows, weights stay
#if defined(WITH_AVX512)
constexpr int ACCUMULATORS = 24;  // accumulators of a tile, which fit the registers
constexpr int TILE_OUTPUTS = 4;   // outputs of a tile
#else
constexpr int ACCUMULATORS = 8;
constexpr int TILE_OUTPUTS = 2;
#endif

// The inputs of one multiply-add instruction, and the instruction.
template <class T> struct Chunk;

template <> struct Chunk<float> {
    static constexpr int SIZE = LANES;
    typedef vf V;
    static V get(const float* from) { return load(from); }
    static V get_part(const float* from, int n) {
        float padded[SIZE] = {};
        memcpy(padded, from, n * sizeof(float));
        return load(padded);
    }
    static vf add(vf acc, V x, V w) { return fma(x, w, acc); }
};

#if defined(WITH_AVX512) && defined(__AVX512BF16__)
template <> struct Chunk<bf16> {
    static constexpr int SIZE = 32;
    typedef __m512i V;
    static V get(const bf16* from) { return _mm512_loadu_si512(from); }
    static V get_part(const bf16* from, int n) { return _mm512_maskz_loadu_epi16((1ull << n) - 1, from); }
    static vf add(vf acc, V x, V w) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w); }
};
#else
template <> struct Chunk<bf16> {
    static constexpr int SIZE = 2 * LANES;
    typedef vu V;  // pairs of inputs
    static V get(const bf16* from) {
        V pairs;
        memcpy(&pairs, from, sizeof pairs);
        return pairs;
    }
    static V get_part(const bf16* from, int n) {
        bf16 padded[SIZE] = {};
        memcpy(padded, from, n * sizeof(bf16));
        return get(padded);
    }
    static vf add(vf acc, V x, V w) {
        acc = fma((vf)(x << 16), (vf)(w << 16), acc);
        return fma((vf)(x & 0xffff0000u), (vf)(w & 0xffff0000u), acc);
    }
};
#endif

#if defined(WITH_AVX512)
// The sums of the lanes of four vectors, each in the order of `sum`.
static inline __m128 sums(vf v0, vf v1, vf v2, vf v3) {
    __m512 a = (__m512)v0, b = (__m512)v1, c = (__m512)v2, d = (__m512)v3;
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    // quarters: a0 a1 b0 b1 and c0 c1 d0 d1; a0 + a1, …
    __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    q = _mm512_add_ps(q, _mm512_permute_ps(q, 0x4e));
    q = _mm512_add_ps(q, _mm512_permute_ps(q, 0xb1));
    return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, q));
}
#endif

// The products of R rows and B outputs over one block of inputs. Meanwhile, n_ahead rows of weights from `ahead` on are
// prefetched, at an even rate.
template <class T, int R, int B>
static inline __attribute__((always_inline)) void tile(
    const T* x, int64_t ldx, const T* w, int64_t ldw, int k, float* c, int64_t ldc, bool first, const T* ahead,
    int n_ahead) {
    using S = Chunk<T>;
    // With few rows, reading takes longer than computing: prefetch row by row, as weights are in memory. The divisions cost
    // nothing then.
    constexpr bool in_order = LANES == 16 && R <= 4;
    vf acc[R][B] = {};
    const int n_chunks = k / S::SIZE;
    int at = 0;
    for (; at + S::SIZE <= k; at += S::SIZE) {
        typename S::V ws[B];
        for (int b = 0; b < B; b++) {
            ws[b] = S::get(w + b * ldw + at);
            // With more rows, computing takes longer, and would wait for weights from the second-level cache.
            if (R > 4) __builtin_prefetch(w + b * ldw + at + PREFETCH_CHUNKS * S::SIZE, 0, 3);
        }
        for (int b = 0; b < n_ahead; b++) {
            const int chunk = at / S::SIZE * n_ahead + b;
            const T* from = in_order ? ahead + chunk / n_chunks * ldw + chunk % n_chunks * S::SIZE : ahead + b * ldw + at;
            __builtin_prefetch(from, 0, 2);
        }
        for (int r = 0; r < R; r++) {
            typename S::V xs = S::get(x + r * ldx + at);
            for (int b = 0; b < B; b++) acc[r][b] = S::add(acc[r][b], xs, ws[b]);
        }
    }
    if (at < k) {
        typename S::V ws[B];
        for (int b = 0; b < B; b++) ws[b] = S::get_part(w + b * ldw + at, k - at);
        for (int r = 0; r < R; r++) {
            typename S::V xs = S::get_part(x + r * ldx + at, k - at);
            for (int b = 0; b < B; b++) acc[r][b] = S::add(acc[r][b], xs, ws[b]);
        }
    }
    for (int r = 0; r < R; r++) {
        float* to = c + r * ldc;
#if defined(WITH_AVX512)
        if constexpr (B == 4 || B == 3) {
            const __mmask8 mask = (1 << B) - 1;
            const __m128 s = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][B - 1]);
            _mm_mask_storeu_ps(to, mask, first ? s : _mm_add_ps(_mm_maskz_loadu_ps(mask, to), s));
            continue;
        }
#endif
        for (int b = 0; b < B; b++) to[b] = first ? sum(acc[r][b]) : to[b] + sum(acc[r][b]);
    }
}

// The same for m rows, at most TILE / B.
template <class T, int B, int R = ACCUMULATORS / B>
static inline void tile_of(
    int m, const T* x, int64_t ldx, const T* w, int64_t ldw, int k, float* c, int64_t ldc, bool first, const T* ahead,
    int n_ahead) {
    if (m == R) {
        tile<T, R, B>(x, ldx, w, ldw, k, c, ldc, first, ahead, n_ahead);
    } else if constexpr (R > 1) {
        tile_of<T, B, R - 1>(m, x, ldx, w, ldw, k, c, ldc, first, ahead, n_ahead);
    }
}

template <class T, int OUTS>
static void products_by(
    const T* x, int64_t ldx, int m, const T* w, int64_t ldw, int n, int k, float* c, int64_t ldc, const T* next) {
    constexpr int MAX_ROWS = ACCUMULATORS / OUTS;
    const int n_row_groups = (m + MAX_ROWS - 1) / MAX_ROWS, group_rows = n_row_groups ? (m + n_row_groups - 1) / n_row_groups : 0;
    auto compute = [&](int row, int out, int at, const T* ahead, int n_ahead) {
        const int rows = std::min(group_rows, m - row), width = std::min(BLOCK, k - at);
        const T *xs = x + row * ldx + at, *ws = w + out * ldw + at;
        float* to = c + row * ldc + out;
        if (out + OUTS <= n) {
            tile_of<T, OUTS>(rows, xs, ldx, ws, ldw, width, to, ldc, at == 0, ahead, n_ahead);
        } else {
            for (int o = out; o < n; o++, ws += ldw, to++)
                tile_of<T, 1, MAX_ROWS>(rows, xs, ldx, ws, ldw, width, to, ldc, at == 0, ahead, o == out ? n_ahead : 0);
        }
    };
    if (m <= MAX_STREAMED_ROWS) {
        // Few rows: they stay in the cache while weights stream. A tile prefetches the next one's weights at an even rate,
        // because a processor stalls on too many outstanding loads.
        for (int out = 0; out < n; out += OUTS)
            for (int at = 0; at == 0 || at < k; at += BLOCK) {
                const T* ahead = at + BLOCK < k ? w + out * ldw + at + BLOCK : out + OUTS < n ? w + (out + OUTS) * ldw : next;
                for (int group = 0; group < n_row_groups; group++) {
                    const int from = group * OUTS / n_row_groups, to = (group + 1) * OUTS / n_row_groups;
                    compute(group * group_rows, out, at, ahead + from * ldw, to - from);
                }
            }
    } else {
        // Many rows: a block of this call's weights stays in the cache. Each tile prefetches a part of the next block.
        for (int at = 0; at == 0 || at < k; at += BLOCK) {
            const T* ahead = at + BLOCK < k ? w + at + BLOCK : next;
            for (int group = 0; group < n_row_groups; group++)
                for (int out = 0; out < n; out += OUTS)
                    compute(group * group_rows, out, at, ahead + out * ldw, out / OUTS % n_row_groups == group ? OUTS : 0);
        }
    }
}

// All of C, (m, n) with rows `ldc` apart; C is 0 if k is 0. `next`: the weights that this thread will probably use next.
template <class T>
static void products(
    const T* x, int64_t ldx, int m, const T* w, int64_t ldw, int n, int k, float* c, int64_t ldc, const T* next) {
#if defined(WITH_AVX512)
    if (m == 7 || m == 8) return products_by<T, 3>(x, ldx, m, w, ldw, n, k, c, ldc, next);  // all rows in one tile, not two
#endif
    products_by<T, TILE_OUTPUTS>(x, ldx, m, w, ldw, n, k, c, ldc, next);
}

#if defined(WITH_TILES)
// Products in bfloat16 with tile instructions. The first factor is W, in the model's layout. The second is X in another layout:
// a row for each pair of inputs, and a column for each of 16 rows of X. An element is summed over all inputs in order,
// TILE_INPUTS at a time, whatever m and n are.
constexpr int CACHED_INPUTS = 512;    // 32 rows of so many inputs stay in the first-level cache
constexpr int TILE_INPUTS = 32;  // inputs of a tile of bfloat16

static inline int whole_tiles(int k) { return (k + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS; }

// Lay out inputs [from, to), in whole tiles, of m rows, at most 16, for tiles. Inputs after the k-th are 0.
static inline void tile_rows(const bf16* x, int64_t ldx, int m, int k, int from, int to, bf16* tiled) {
    for (int at = from; at < to; at += TILE_INPUTS) {
        __m512i v[SIDE] = {};
        for (int r = 0; r < m; r++)
            v[r] = at + TILE_INPUTS <= k ? Chunk<bf16>::get(x + r * ldx + at) : Chunk<bf16>::get_part(x + r * ldx + at, k - at);
        transpose(v);
        for (int i = 0; i < SIDE; i++) _mm512_store_si512(tiled + at * SIDE + i * TILE_INPUTS, v[i]);
    }
}

// The products of O * SIDE outputs and G * SIDE rows over inputs [from, to). Unless `from` is 0, they are added to `c`. Partial
// sums are stored transposed; after the last inputs, `c` is row by row.
template <int O, int G>
static inline void tiles(
    const bf16* x, int64_t group, const bf16* w, int64_t ldw, int n, int k, int from, int to, float* c, int64_t ldc) {
    auto of = [&](int t) { return c + t % G * SIDE * ldc + t / G * SIDE; };
    unrolled<O * G>([&](auto t) {
        if (from == 0) zero_tile<t>();
        else load_tile<t>(of(t), ldc * sizeof(float));
    });
    for (int at = from; at < to; at += TILE_INPUTS) {
        unrolled<G>([&](auto g) { load_tile<6 + g>(x + g * group + at * SIDE, SIDE * 4); });
        unrolled<O>([&](auto o) {
            constexpr int W = 4 + o % 2;
            const bf16* weights = w + o * SIDE * ldw + at;
            const int outputs = std::min(n - o * SIDE, SIDE);
            if (outputs == SIDE && at + TILE_INPUTS <= k) {
                load_tile<W>(weights, ldw * sizeof(bf16));
            } else {  // memory after the last output or input may have anything, or may not be readable
                alignas(64) bf16 padded[SIDE][TILE_INPUTS] = {};
                for (int i = 0; i < outputs; i++)
                    memcpy(padded[i], weights + i * ldw, std::min(k - at, TILE_INPUTS) * sizeof(bf16));
                load_tile<W>(padded, sizeof padded[0]);
            }
            unrolled<G>([&](auto g) { add_bf16<o * G + g, W, 6 + g>(); });
        });
    }
    unrolled<O * G>([&](auto t) {
        store_tile<t>(of(t), ldc * sizeof(float));
        if (to < k) return;
        __m512i v[SIDE];
        for (int i = 0; i < SIDE; i++) v[i] = _mm512_loadu_si512(of(t) + i * ldc);
        transpose(v);
        for (int i = 0; i < SIDE; i++) _mm512_storeu_si512(of(t) + i * ldc, v[i]);
    });
}

// As `products`, for rows that `tile_rows` has laid out. C must have room for whole tiles.
static void tile_products(
    const bf16* tiled, int m, const bf16* w, int64_t ldw, int n, int k, float* c, int64_t ldc) {
    constexpr int O = 2, ROWS = 2 * SIDE, OUTS = O * SIDE;
    const int whole = whole_tiles(k);
    const int step = m <= ROWS ? std::max(whole, CACHED_INPUTS) : CACHED_INPUTS;
    auto compute = [&](int row, int out, int from, int to) {
        const bf16* x = tiled + int64_t(row) * whole;
        float* sums = c + row * ldc + out;
        if (m - row > SIDE) tiles<O, 2>(x, int64_t(SIDE) * whole, w + out * ldw, ldw, n - out, k, from, to, sums, ldc);
        else tiles<O, 1>(x, 0, w + out * ldw, ldw, n - out, k, from, to, sums, ldc);
    };
    for (int at = 0; at == 0 || at < whole; at += step)
        for (int row = 0; row < m; row += ROWS)
            for (int out = 0; out < n; out += OUTS) compute(row, out, at, std::min(at + step, whole));
}
#endif
