// Intel's AMX: each thread has eight tiles of 16 rows of 64 bytes, and adds products of two tiles to a third.
#pragma once
#include <utility>
#include "vec.h"

#if defined(WITH_AVX512) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define WITH_TILES 1
constexpr int SIDE = 16;  // rows of a tile, and words of 32 bits in a row

struct TileConfig {  // configures its thread's tiles to full size while it exists
    TileConfig() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int t = 0; t < 8; t++) shape.row_bytes[t] = SIDE * 4, shape.rows[t] = SIDE;
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~TileConfig() { asm volatile("tilerelease"); }
};

template <int T> static inline void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
// `stride`: bytes between rows.
template <int T> static inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> static inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// C[m][n] += sum over pairs p of A[m][2p] B[p][2n] + A[m][2p + 1] B[p][2n + 1], in the order of the pairs.
template <int C, int A, int B> static inline void add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same for groups of four bytes, signed by unsigned, with sums in 32-bit integers.
template <int C, int A, int B> static inline void add_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Call f(0) … f(N - 1) with compile-time constants, because a tile's number is part of the instruction.
template <class F, int... I> static inline void unrolled(F&& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F> static inline void unrolled(F&& f) { unrolled(f, std::make_integer_sequence<int, N>{}); }

// Transpose 16 rows of 16 words.
static inline void transpose(__m512i (&v)[SIDE]) {
    __m512i t[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4)
        for (int j = 0; j < 2; j++) {  // quarter q of v[i + j]: column 4 q + j of rows i … i + 3
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
        }
    for (int j = 0; j < 4; j++) {
        const __m512i even = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88), odd = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);
        const __m512i evens = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
        const __m512i odds = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(even, evens, 0x88), t[8 + j] = _mm512_shuffle_i32x4(even, evens, 0xdd);
        t[4 + j] = _mm512_shuffle_i32x4(odd, odds, 0x88), t[12 + j] = _mm512_shuffle_i32x4(odd, odds, 0xdd);
    }
    for (int i = 0; i < SIDE; i++) v[i] = t[i];
}
#else
struct TileConfig {};
#endif
