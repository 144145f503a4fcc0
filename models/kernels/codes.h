// Codes of weights: how those of a block lie, what they stand for, and their products with the codes of a row.
//
// A block has 16 outputs. Codes of 8 bits: for every 4 inputs a line of 64 bytes, output by output. Codes of 4 bits: for every
// 8 inputs a line, the first 4 in the low halves. Codes of 6 bits: for every 16 inputs two such lines of their lower 4 bits,
// and one of the upper 2, whose lowest bits are those of the first four inputs; codes of 5 bits: for every 32 inputs four
// lines, and one of the upper bits.
#pragma once
#include "dense.h"

constexpr int OUTPUTS = 16;  // of a block
constexpr int VECTORS = OUTPUTS / LANES;  // of a line, each with LANES outputs of the block: its slices

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
#define WITH_DOTS 1  // instructions that multiply four codes by four of a row and add the products to a sum of 32 bits
#endif

// Codes of four inputs for each output of a slice, or what is made of them.
typedef uint16_t vq __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef int32_t Word32 __attribute__((aligned(1), may_alias));
typedef int16_t vs __attribute__((vector_size(LANES * 4), aligned(2), may_alias));

// The bits of `mask`, of each byte, after a shift to the right, or to the left where it is below 0.
static inline vq masked(vq quad, int shift, int mask) {
    return (shift < 0 ? quad << -shift : quad >> shift) & uint16_t(mask * 257);
}

// What a table has at the places that are the bytes, each below 16.
static inline vq looked_up(vq quad, const uint8_t* table) {
#if defined(WITH_AVX512)
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (vq)_mm512_shuffle_epi8(all, (__m512i)quad);
#elif defined(__AVX2__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return (vq)_mm256_shuffle_epi8(all, (__m256i)quad);
#elif defined(__aarch64__)
    return (vq)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)quad);
#else
    uint8_t bytes[sizeof quad];
    memcpy(bytes, &quad, sizeof bytes);
    for (uint8_t& byte : bytes) byte = table[byte];
    memcpy(&quad, bytes, sizeof bytes);
    return quad;
#endif
}

// Four codes of a row beside each output, and the signed bytes among them: the first and the third, the second and the fourth.
static inline vs beside_all(int32_t x) { return (vs)(vi{} + x); }
static inline vs even(vs x) { return x << 8 >> 8; }
static inline vs odd(vs x) { return x >> 8; }
// Sums of two products of 16 bits; without instructions for that, of products that fit 16 bits.
static inline vi dot(vs a, vs b) {
#if defined(WITH_AVX512)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    const vs products = a * b;
    return ((vi)products << 16 >> 16) + ((vi)products >> 16);
#endif
}
// Sums of two products of codes of at most 7 bits and signed bytes.
static inline vs byte_pairs(vq codes, vs x) {
#if defined(WITH_AVX512)
    return (vs)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#elif defined(__AVX2__)
    return (vs)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
    return ((vs)codes & 255) * even(x) + (vs)(codes >> 8) * odd(x);
#endif
}

// The numbers of a slice for INPUTS inputs, whose codes lie in LINES lines of 64 bytes. `FOURS`: inputs of codes of 4 bits.
template <int KIND, int FOURS = 8> struct Unit {
    static constexpr int BITS = bits_of(KIND), TABLE = table_of(KIND);
    static constexpr int FEW = most_of(KIND) > 63 ? 1 : most_of(KIND) > 31 ? 2 : 4;  // quads that are summed in 16 bits
    static constexpr int INPUTS = BITS == 8 ? 4 : BITS == 4 ? FOURS : BITS == 6 ? 16 : 32, N = INPUTS / 4;
    static constexpr int LINES = INPUTS * BITS / 32;
    vq quads[N];

    // `codes`: the slice's part of the first line.
    explicit Unit(const uint8_t* codes) {
        const auto line = [&](int number) { return *(const vq*)(codes + number * 64); };
        if constexpr (BITS == 8) {
            quads[0] = line(0);
            return;
        }
        for (int i = 0; i < N; i += 2) {
            const vq halves = line(i / 2);
            quads[i] = masked(halves, 0, 15), quads[i + 1] = masked(halves, 4, 15);
        }
        if constexpr (TABLE != NUMBERS)
            for (vq& quad : quads) quad = looked_up(quad, TABLES[TABLE]);
        if constexpr (BITS > 4) {
            constexpr int MORE = BITS - 4;  // bits above the halves
            const vq above = line(N / 2);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) quads[i] |= masked(above, i * MORE - 4, ((1 << MORE) - 1) << 4);
        }
    }
};

// Add the products of T slices' codes with INPUTS codes of a row to a sum per output.
template <int T, class U> static inline void add_products(const U (&units)[T], const int8_t* x, vi (&sums)[T]) {
    const auto* quads = (const Word32*)x;
#if defined(WITH_DOTS)
    for (int i = 0; i < U::N; i++)
        for (int t = 0; t < T; t++)
            sums[t] = (vi)_mm512_dpbusd_epi32((__m512i)sums[t], (__m512i)units[t].quads[i], _mm512_set1_epi32(quads[i]));
#else
    if constexpr (U::FEW == 1) {
        for (int i = 0; i < U::N; i++) {
            const vs bytes = beside_all(quads[i]), evens = even(bytes), odds = odd(bytes);
            for (int t = 0; t < T; t++) sums[t] += dot((vs)units[t].quads[i] & 255, evens);
            for (int t = 0; t < T; t++) sums[t] += dot((vs)(units[t].quads[i] >> 8), odds);
        }
    } else {
        constexpr int TOGETHER = U::FEW < U::N ? U::FEW : U::N;
        for (int i = 0; i < U::N; i += TOGETHER) {
            vs pairs[T] = {};
            for (int j = i; j < i + TOGETHER; j++) {
                const vs bytes = beside_all(quads[j]);
                for (int t = 0; t < T; t++) pairs[t] += byte_pairs(units[t].quads[j], bytes);
            }
            for (int t = 0; t < T; t++) sums[t] += dot(pairs[t], vs{} + 1);
        }
    }
#endif
}
