// Codes of weights: their layout in a block, the numbers that they stand for, and products with the codes of a row.
//
// A block has 16 outputs. A line is 64 bytes: four bytes for each output.
// 8 bits: a line for every 4 inputs.
// 4 bits: a line for every 8 inputs, the first 4 in the low halves of the bytes.
// 6 bits: for every 16 inputs, two such lines with the low 4 bits, and one with the high 2 bits, in which the first 4 inputs have
//         the lowest bits.
// 5 bits: for every 32 inputs, four lines with the low 4 bits, and one with the high bits.
#pragma once
#include "dense.h"

constexpr int OUTPUTS = 16;  // outputs of a block
constexpr int VECTORS = OUTPUTS / LANES;  // vectors of a line; the outputs of one are a slice of the block

// A kind of codes is their number of bits + KINDS * the table that they index. Without a table (NUMBERS) they are numbers. E2M1
// has the floats of 4 bits of OCP MX, doubled and shifted by 12; IQ4 is ggml's table, shifted by 128.
constexpr int KINDS = 16;
enum Table : int32_t { NUMBERS, E2M1, IQ4 };
constexpr int kind_of(int bits, int table) { return bits + KINDS * table; }
constexpr int bits_of(int kind) { return kind % KINDS; }
constexpr int table_of(int kind) { return kind / KINDS; }
// What is subtracted from a number before it is multiplied by the scale.
constexpr int midpoint_of(int kind) {
    return table_of(kind) == E2M1 ? 12 : table_of(kind) == IQ4 ? 128 : 1 << (bits_of(kind) - 1);
}
// The largest number of a kind.
constexpr int max_code_of(int kind) {
    return table_of(kind) == E2M1 ? 24 : table_of(kind) == IQ4 ? 241 : (1 << bits_of(kind)) - 1;
}
constexpr uint8_t TABLES[3][16] = {
    {},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
};

#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
#define WITH_DOTS 1  // instructions that add the products of four codes and four bytes of a row to a 32-bit sum
#endif

// A byte for each of four inputs and each output of a slice: codes, or the numbers that they stand for.
typedef uint16_t vq __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef int32_t Word32 __attribute__((aligned(1), may_alias));
typedef int16_t vs __attribute__((vector_size(LANES * 4), aligned(2), may_alias));

// Shift to the right (to the left if `shift` is negative), and mask each byte.
static inline vq masked(vq quad, int shift, int mask) {
    return (shift < 0 ? quad << -shift : quad >> shift) & uint16_t(mask * 257);
}

// Look up each byte, which must be below 16, in a table.
static inline vq lookup(vq quad, const uint8_t* table) {
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

// `broadcast` repeats four codes of a row for each output. `even` and `odd` extend the signed bytes of even, or of odd, inputs to
// 16 bits.
static inline vs broadcast(int32_t x) { return (vs)(vi{} + x); }
static inline vs even(vs x) { return x << 8 >> 8; }
static inline vs odd(vs x) { return x >> 8; }
// Sums of two products of 16-bit numbers. On processors without such an instruction, the products must fit 16 bits.
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

// The numbers of a slice for INPUTS inputs, unpacked from LINES lines of codes. `FOURS`: INPUTS for codes of 4 bits.
template <int KIND, int FOURS = 8> struct Unit {
    static constexpr int BITS = bits_of(KIND), TABLE = table_of(KIND);
    static constexpr int SHORT_QUADS = max_code_of(KIND) > 63 ? 1 : max_code_of(KIND) > 31 ? 2 : 4;  // quads summed in 16 bits
    static constexpr int INPUTS = BITS == 8 ? 4 : BITS == 4 ? FOURS : BITS == 6 ? 16 : 32, N = INPUTS / 4;
    static constexpr int LINES = INPUTS * BITS / 32;
    vq quads[N];

    // `codes`: the slice's vector in the first line.
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
            for (vq& quad : quads) quad = lookup(quad, TABLES[TABLE]);
        if constexpr (BITS > 4) {
            constexpr int HIGH_BITS = BITS - 4;  // high bits of a code
            const vq high = line(N / 2);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) quads[i] |= masked(high, i * HIGH_BITS - 4, ((1 << HIGH_BITS) - 1) << 4);
        }
    }
};

// Add the products of the codes of T slices and INPUTS codes of a row to the sum of each output.
template <int T, class U> static inline void add_products(const U (&units)[T], const int8_t* x, vi (&sums)[T]) {
    const auto* quads = (const Word32*)x;
#if defined(WITH_DOTS)
    for (int i = 0; i < U::N; i++)
        for (int t = 0; t < T; t++)
            sums[t] = (vi)_mm512_dpbusd_epi32((__m512i)sums[t], (__m512i)units[t].quads[i], _mm512_set1_epi32(quads[i]));
#else
    if constexpr (U::SHORT_QUADS == 1) {
        for (int i = 0; i < U::N; i++) {
            const vs bytes = broadcast(quads[i]), evens = even(bytes), odds = odd(bytes);
            for (int t = 0; t < T; t++) sums[t] += dot((vs)units[t].quads[i] & 255, evens);
            for (int t = 0; t < T; t++) sums[t] += dot((vs)(units[t].quads[i] >> 8), odds);
        }
    } else {
        constexpr int STEP = U::SHORT_QUADS < U::N ? U::SHORT_QUADS : U::N;
        for (int i = 0; i < U::N; i += STEP) {
            vs pairs[T] = {};
            for (int j = i; j < i + STEP; j++) {
                const vs bytes = broadcast(quads[j]);
                for (int t = 0; t < T; t++) pairs[t] += byte_pairs(units[t].quads[j], bytes);
            }
            for (int t = 0; t < T; t++) sums[t] += dot(pairs[t], vs{} + 1);
        }
    }
#endif
}
