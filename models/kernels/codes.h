// Codes of weights: how those of a block lie, what they stand for, and their products with the codes of a row.
//
// A block has 16 outputs. Codes of 8 bits: for every 4 inputs a line of 64 bytes, output by output. Codes of 4 bits: for every
// 8 inputs a line, the first 4 in the low halves. Codes of 6 bits: for every 16 inputs two such lines of their lower 4 bits,
// and one of the upper 2, whose lowest bits are those of the first four inputs; codes of 5 bits: for every 32 inputs four
// lines, and one of the upper bits.
#pragma once
#include "dense.h"

constexpr int OUTPUTS = 16;  // of a block
constexpr int VECTORS = OUTPUTS / LANES;
// A number for each output of a block, in as many vectors as it takes.
struct Sixteen {
    vf v[VECTORS] = {};
};

// A kind of codes: their bits, plus KINDS times the table that they are places in. Without a table they are numbers.
constexpr int KINDS = 16;
enum Table : int32_t { NUMBERS, E2M1, IQ4 };  // floats of 4 bits, doubled (OCP MX); ggml's table of 4 bits
constexpr int kind_of(int bits, int table) { return bits + KINDS * table; }
constexpr int bits_of(int kind) { return kind % KINDS; }
constexpr int table_of(int kind) { return kind / KINDS; }
// What is taken off a number before it is multiplied by the scale.
constexpr int middle_of(int kind) { return table_of(kind) == E2M1 ? 12 : table_of(kind) == IQ4 ? 128 : 1 << (bits_of(kind) - 1); }
// The most that a number is.
constexpr int most_of(int kind) { return table_of(kind) == E2M1 ? 24 : table_of(kind) == IQ4 ? 241 : (1 << bits_of(kind)) - 1; }
constexpr uint8_t TABLES[3][16] = {
    {},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
};

#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
constexpr int LINE_LANES = 16, BLOCKS_TOGETHER = 4;  // words of a vector of codes; blocks of a tile, what the registers hold
#elif defined(__AVX2__)
constexpr int LINE_LANES = 8, BLOCKS_TOGETHER = 1;
#else
constexpr int LINE_LANES = 4, BLOCKS_TOGETHER = 1;
#endif
typedef uint16_t vq __attribute__((vector_size(LINE_LANES * 4), aligned(2), may_alias));
constexpr int LINE_VECTORS = OUTPUTS / LINE_LANES;

// Codes of four inputs for each output of a block, or what is made of them.
struct Quads {
    vq w[LINE_VECTORS];
};
static inline Quads line(const uint8_t* from) {
    Quads q;
    for (int i = 0; i < LINE_VECTORS; i++) q.w[i] = *(const vq*)(from + i * LINE_LANES * 4);
    return q;
}
// The bits of `mask`, of each byte, after a shift to the right, or to the left where it is below 0.
static inline Quads masked(Quads q, int shift, int mask) {
    for (int i = 0; i < LINE_VECTORS; i++) q.w[i] = (shift < 0 ? q.w[i] << -shift : q.w[i] >> shift) & uint16_t(mask * 257);
    return q;
}
static inline Quads joined(Quads a, const Quads& b) {
    for (int i = 0; i < LINE_VECTORS; i++) a.w[i] |= b.w[i];
    return a;
}

// What a table has at the places that are the bytes, each below 16.
static inline Quads looked_up(Quads q, const uint8_t* table) {
    for (int i = 0; i < LINE_VECTORS; i++) {
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
        const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
        q.w[i] = (vq)_mm512_shuffle_epi8(all, (__m512i)q.w[i]);
#elif defined(__AVX2__)
        const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
        q.w[i] = (vq)_mm256_shuffle_epi8(all, (__m256i)q.w[i]);
#elif defined(__aarch64__)
        q.w[i] = (vq)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)q.w[i]);
#else
        uint8_t bytes[LINE_LANES * 4];
        memcpy(bytes, &q.w[i], sizeof bytes);
        for (uint8_t& each : bytes) each = table[each];
        memcpy(&q.w[i], bytes, sizeof bytes);
#endif
    }
    return q;
}

// One integer per output of a block. `add` takes codes of 8 bits, `add_pair` two times four of at most 6 bits, whose products
// with 8 bits fit 16 bits, and so do sums of four.
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
struct Sums {
    __m512i v = _mm512_setzero_si512();
    void add(const Quads& q, int32_t x) { v = _mm512_dpbusd_epi32(v, (__m512i)q.w[0], _mm512_set1_epi32(x)); }
    void add_pair(const Quads& a, int32_t x, const Quads& b, int32_t y) { add(a, x), add(b, y); }
};
static inline Sixteen converted(const Sums& s) { return {(vf)_mm512_cvtepi32_ps(s.v)}; }
#elif defined(__AVX2__)
struct Sums {
    __m256i v[2] = {};
    void add(const Quads& q, int32_t x) {
        const __m256i all = _mm256_set1_epi32(x), odd = _mm256_srai_epi16(all, 8);
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
        for (int i = 0; i < 2; i++) {
            const __m256i w = (__m256i)q.w[i];
            const __m256i evens = _mm256_and_si256(w, _mm256_set1_epi16(255)), odds = _mm256_srli_epi16(w, 8);
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(evens, even));
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(odds, odd));
        }
    }
    void add_pair(const Quads& a, int32_t x, const Quads& b, int32_t y) {
        for (int i = 0; i < 2; i++) {
            const __m256i pairs = _mm256_add_epi16(
                _mm256_maddubs_epi16((__m256i)a.w[i], _mm256_set1_epi32(x)),
                _mm256_maddubs_epi16((__m256i)b.w[i], _mm256_set1_epi32(y)));
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
};
static inline Sixteen converted(const Sums& s) {
    Sixteen f;
    for (int i = 0; i < VECTORS; i++) f.v[i] = __builtin_convertvector(((const vi*)s.v)[i], vf);
    return f;
}
#else
typedef int16_t vs __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
struct Sums {
    vi v[VECTORS] = {};
    // Codes of every other input lie in 16 bits.
    static vs even(vs x) { return x << 8 >> 8; }
    static vs odd(vs x) { return x >> 8; }
    static vs all(int32_t x) { return (vs)(vi{} + x); }
    static vi quads_of(vs pairs) { return ((vi)pairs << 16 >> 16) + ((vi)pairs >> 16); }
    void add(const Quads& q, int32_t x) {
        for (int i = 0; i < VECTORS; i++)
            v[i] += quads_of(((vs)q.w[i] & 255) * even(all(x))) + quads_of((vs)(q.w[i] >> 8) * odd(all(x)));
    }
    static vs pairs(const vq& w, int32_t x) { return ((vs)w & 255) * even(all(x)) + (vs)(w >> 8) * odd(all(x)); }
    void add_pair(const Quads& a, int32_t x, const Quads& b, int32_t y) {
        for (int i = 0; i < VECTORS; i++) v[i] += quads_of(pairs(a.w[i], x) + pairs(b.w[i], y));
    }
};
static inline Sixteen converted(const Sums& s) {
    Sixteen f;
    for (int i = 0; i < VECTORS; i++) f.v[i] = __builtin_convertvector(s.v[i], vf);
    return f;
}
#endif

// The numbers of a block for INPUTS inputs, whose codes lie in LINES lines of 64 bytes.
template <int KIND> struct Unit {
    static constexpr int BITS = bits_of(KIND), TABLE = table_of(KIND);
    static constexpr int INPUTS = BITS == 8 ? 4 : BITS == 4 ? 8 : BITS == 6 ? 16 : 32, N = INPUTS / 4;
    static constexpr int LINES = INPUTS * BITS / 32;
    Quads quads[N];

    explicit Unit(const uint8_t* codes) {
        if constexpr (BITS == 8) {
            quads[0] = line(codes);
            return;
        }
        for (int i = 0; i < N; i += 2) {
            const Quads halves = line(codes + i / 2 * 64);
            quads[i] = masked(halves, 0, 15), quads[i + 1] = masked(halves, 4, 15);
        }
        if constexpr (TABLE != NUMBERS)
            for (Quads& each : quads) each = looked_up(each, TABLES[TABLE]);
        if constexpr (BITS > 4) {
            constexpr int MORE = BITS - 4;  // bits above the halves
            const Quads above = line(codes + N / 2 * 64);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) quads[i] = joined(quads[i], masked(above, i * MORE - 4, ((1 << MORE) - 1) << 4));
        }
    }
    // Add its products with INPUTS codes of a row.
    void add_to(Sums& sums, const int8_t* x) const {
        int32_t xs[N];
        memcpy(xs, x, INPUTS);
        if constexpr (most_of(KIND) > 63) {
            for (int i = 0; i < N; i++) sums.add(quads[i], xs[i]);
        } else {
            for (int i = 0; i < N; i += 2) sums.add_pair(quads[i], xs[i], quads[i + 1], xs[i + 1]);
        }
    }
};
