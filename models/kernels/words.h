// Sums of products of words of 32 bits, which have one value each, or two of 16 bits: both products of attention are such sums.
#pragma once
#include "tiles.h"

// How values of type T are packed into words of 32 bits, and products of words.
template <class T> struct Word {  // one value each
    static constexpr int PER = 1;
    static constexpr int UNIT = PER;  // places that one product adds up
    static vf get(const T* x, int word, int n) { return part_of(x, word, n); }
    // D vectors of columns for `mix`, from column `at` on, of a row of n values; zeros after the last.
    template <int D> static void columns(const T* x, const T*, int at, int n, vf* to) {
        for (int d = 0; d < D; d++) to[d] = at + d * LANES < n ? part_of(x, at + d * LANES, n) : vf{};
    }
    // The channel of a column.
    static constexpr int channel(int column) { return column; }
    static void store_words(float* words, int64_t at, vf value) { store(words + at, value); }
    static vf add(vf acc, vf a, vf b) { return fma(a, b, acc); }
    // Divide columns by a number, and store them as a row of n values.
    static void divide(const float* x, float by, int n, T* to) {
        for (int i = 0; i < n; i += LANES) {
            T part[LANES];
            store(part, load(x + i) / by);
            memcpy(to + i, part, std::min(LANES, n - i) * sizeof(T));
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
    // A vector of words, from index `word` on, of a row of n values; zeros after the last.
    static vf get(const bf16* x, int word, int n) {
        const int left = n - 2 * word;
        return (vf)(left >= 32 ? _mm512_loadu_si512(x + 2 * word) : _mm512_maskz_loadu_epi16((1ull << left) - 1, x + 2 * word));
    }
    // Columns of two rows of n values, interleaved; `divide` undoes their order.
    template <int D> static void columns(const bf16* x, const bf16* y, int at, int n, vf* to) {
        static_assert(D % 2 == 0);
        for (int d = 0; d < D; d += 2) {
            const int word = at / 2 + d * 8;
            const __m512i a = (__m512i)get(x, word, n), b = (__m512i)get(y, word, n);
            to[d] = (vf)_mm512_unpacklo_epi16(a, b), to[d + 1] = (vf)_mm512_unpackhi_epi16(a, b);
        }
    }
    static constexpr int channel(int column) {
        const int lane = column % 16;
        return column / 32 * 32 + lane / 4 * 8 + column % 32 / 16 * 4 + lane % 4;
    }
    // Store values from index `at` on, in place of floats that have been read already.
    static void store_words(float* words, int64_t at, vf value) {
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

#if defined(WITH_AVX512)
constexpr int SUM_ROWS = 6, SUM_VECTORS = 4;  // heads and vectors of columns whose sums fit the registers
#else
constexpr int SUM_ROWS = 3, SUM_VECTORS = 2;
#endif

// Prefetch as much of the next batch of slots as D vectors are of this one, from word `at` on, into the second-level cache; the
// first level takes too few requests at a time. `ahead`: the next batch's rows, null: none. Inlined, because GCC removes calls of
// functions that do nothing but prefetch.
template <int D> static inline __attribute__((always_inline)) void prefetch_part(const void* ahead, int64_t at) {
    constexpr int WORDS = 64 / sizeof(float);
    if (!ahead) return;
    for (int i = 0; i < D * LANES; i += WORDS) __builtin_prefetch((const float*)ahead + at + i, 0, 2);
}

// Columns that lie in memory as vectors.
struct LaidOut {
    const float* from;
    int64_t stride;  // from one k to the next
    const void* ahead;
    template <int D> void get(int64_t k, int at, vf* to) const {
        prefetch_part<D>(ahead, k * stride + at);
        for (int d = 0; d < D; d++) to[d] = load(from + k * stride + at + d * LANES);
    }
};

// C[h][column] += sum over k of a[h][k] * b[k][column], for H rows and D vectors of columns. `fresh`: C is overwritten.
template <class T, int H, int D, class B>
static inline void sums_tile(
    const float* a, int64_t lda, const B& b, int at, int64_t n_k, float* c, int64_t ldc, bool fresh) {
    vf acc[H][D] = {};
    if (!fresh)
        for (int h = 0; h < H; h++)
            for (int d = 0; d < D; d++) acc[h][d] = load(c + h * ldc + d * LANES);
    for (int64_t k = 0; k < n_k; k++) {
        vf bs[D];
        b.template get<D>(k, at, bs);
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

// The same for m rows, at most SUM_ROWS.
template <class T, int D, int H = SUM_ROWS, class B>
static inline void sums_tile_of(
    int m, const float* a, int64_t lda, const B& b, int at, int64_t n_k, float* c, int64_t ldc, bool fresh) {
    if (m == H) sums_tile<T, H, D>(a, lda, b, at, n_k, c, ldc, fresh);
    else if constexpr (H > 1) sums_tile_of<T, D, H - 1>(m, a, lda, b, at, n_k, c, ldc, fresh);
}

// The same for m rows and n columns, whole lanes. LEAST: the fewest vectors of columns that B gives at a time.
template <class T, int LEAST = 1, class B>
static void add_sums(
    int m, const float* a, int64_t lda, const B& b, int64_t n_k, int n, float* c, int64_t ldc, bool fresh) {
    for (int h = 0; h < m; h += SUM_ROWS, a += SUM_ROWS * lda, c += SUM_ROWS * ldc) {
        const int n_rows = std::min(SUM_ROWS, m - h);
        int at = 0;
        for (; at + SUM_VECTORS * LANES <= n; at += SUM_VECTORS * LANES)
            sums_tile_of<T, SUM_VECTORS>(n_rows, a, lda, b, at, n_k, c + at, ldc, fresh);
        for (; at < n; at += LEAST * LANES) sums_tile_of<T, LEAST>(n_rows, a, lda, b, at, n_k, c + at, ldc, fresh);
    }
}
