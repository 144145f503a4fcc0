// Vectors as wide as those of the target's instruction set, and the types that models are stored in.
// Compiled with -ffp-contract=off, so that product and sum are fused only where `fma` is called.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WITH_AVX512 1
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t vub __attribute__((vector_size(LANES), aligned(1), may_alias));

struct bf16 {
    uint16_t bits;
};
struct f16 {  // only scales have this type
    uint16_t bits;
};

static inline vf splat(float x) {
#if defined(WITH_AVX512)
    return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (vf)_mm256_set1_ps(x);
#else
    return vf{x, x, x, x};
#endif
}

static inline vf fma(vf a, vf b, vf c) {
#if defined(WITH_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float to_float(f16 x) {
    // Shift exponent and mantissa to a float32's, whose exponent bias is 112 larger. Infinities and NaNs stay such.
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
    const uint32_t odd = rest >= 0x0f800000 ? 0x7f800000 : 0;
    float value, unit;
    memcpy(&value, &rest, 4);
    const uint32_t two_to_112 = uint32_t(127 + 112) << 23;
    memcpy(&unit, &two_to_112, 4);
    value *= unit;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits |= sign | odd;
    memcpy(&value, &bits, 4);
    return value;
}

// Round to the nearest, ties to even; NaN stays NaN.
template <class T> static inline T rounded(float x);
template <> inline float rounded<float>(float x) { return x; }
template <> inline bf16 rounded<bf16>(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16{uint16_t((bits >> 16) | 0x40)};
    return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// `widened`: bytes or 16-bit numbers as 32-bit ones; `store_bytes` and `store_words`: the low 8 or 16 bits of these. Intrinsics,
// because gcc converts vectors of bytes byte by byte, and those of 16-bit numbers by halves.
#if defined(WITH_AVX512)
static inline vi widened(const int8_t* from) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
static inline vi widened(const uint8_t* from) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
static inline vi widened(const uint16_t* from) { return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)); }
static inline void store_bytes(void* to, vi value) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)value)); }
static inline void store_words(void* to, vi value) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)value)); }
#elif defined(__AVX2__)
static inline vi widened(const int8_t* from) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
static inline vi widened(const uint8_t* from) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
static inline vi widened(const uint16_t* from) { return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)); }
static inline void store_bytes(void* to, vi value) {
    const __m256i low = _mm256_shuffle_epi8((__m256i)value, _mm256_set1_epi32(0x0c080400));
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((__m128i*)to, bytes);
}
static inline void store_words(void* to, vi value) { *(vh*)to = __builtin_convertvector(value, vh); }
#elif defined(__aarch64__)
static inline uint8x8_t four_bytes(const void* from) {
    uint32_t bytes;
    memcpy(&bytes, from, 4);
    return vreinterpret_u8_u32(vdup_n_u32(bytes));
}
static inline vi widened(const int8_t* from) {
    return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(from)))));
}
static inline vi widened(const uint8_t* from) { return (vi)vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(from)))); }
static inline vi widened(const uint16_t* from) { return (vi)vmovl_u16(vld1_u16(from)); }
static inline void store_bytes(void* to, vi value) {
    const int16x4_t words = vmovn_s32((int32x4_t)value);
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(words, words))), 0);
    memcpy(to, &bytes, 4);
}
static inline void store_words(void* to, vi value) { *(vh*)to = __builtin_convertvector(value, vh); }
#else
static inline vi widened(const int8_t* from) { return __builtin_convertvector(*(const vb*)from, vi); }
static inline vi widened(const uint8_t* from) { return __builtin_convertvector(*(const vub*)from, vi); }
static inline vi widened(const uint16_t* from) { return __builtin_convertvector(*(const vh*)from, vi); }
static inline void store_bytes(void* to, vi value) { *(vb*)to = __builtin_convertvector(value, vb); }
static inline void store_words(void* to, vi value) { *(vh*)to = __builtin_convertvector(value, vh); }
#endif

// Load through the vector type: with AVX2, gcc turns `memcpy` into two copies of halves, and the next read stalls on both.
static inline vf load(const float* from) { return *(const vf*)from; }
static inline vf load(const bf16* from) { return (vf)((vu)widened(&from->bits) << 16); }
static inline vf load(const f16* from) {
#if defined(WITH_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
#else
    vf value;
    for (int i = 0; i < LANES; i++) value[i] = to_float(from[i]);
    return value;
#endif
}
static inline vf load(const int8_t* from) { return __builtin_convertvector(widened(from), vf); }
static inline vf load(const uint8_t* from) { return __builtin_convertvector(widened(from), vf); }
static inline void store(float* to, vf value) { *(vf*)to = value; }
static inline void store(bf16* to, vf value) {
    vu bits = (vu)value;
    vu even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu is_nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
    store_words(to, (vi)((is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & even)));
}
// LANES values from index i on, with zeros after the n-th.
template <class T> static inline vf part_of(const T* x, int i, int n) {
    if (i + LANES <= n) return load(x + i);
    T padded[LANES] = {};
    memcpy(padded, x + i, (n - i) * sizeof(T));
    return load((const T*)padded);
}

// Round to T: the value that a store as T and a load would give.
template <class T> static inline vf as_stored(vf value) {
    if constexpr (sizeof(T) == 4) return value;
    vu bits = (vu)value;
    vu even = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    vu is_nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
    return (vf)((is_nan & (bits | 0x400000u)) | (~is_nan & even));
}
template <class T> static inline float as_stored(float value) { return to_float(rounded<T>(value)); }

// The larger of each pair of lanes; b if either is NaN.
static inline vf larger(vf a, vf b) {
#if defined(WITH_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const vi more = a > b;
    return (vf)((more & (vi)a) | (~more & (vi)b));
#endif
}

// The lanes of a and b with these numbers; those of b follow those of a. gcc before version 12 has no __builtin_shufflevector.
template <int... LANE, class V> static inline V shuffled(V a, V b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, LANE...);
#else
    return __builtin_shuffle(a, b, vi{LANE...});
#endif
}
// Combine the lanes, always in the same order: the upper half with the lower one, until one lane is left.
template <int N, class V, int... LANE> static inline V rotated(V v, std::integer_sequence<int, LANE...>) {
    return shuffled<(LANE + N) % LANES...>(v, v);
}
template <int N = LANES / 2, class V, class F> static inline auto folded(V v, F combine) {
    if constexpr (N == 0) return v[0];
    else return folded<N / 2>(combine(v, rotated<N>(v, std::make_integer_sequence<int, LANES>())), combine);
}
static inline float sum(vf v) { return folded(v, [](vf a, vf b) { return a + b; }); }
static inline int32_t sum(vi v) { return folded(v, [](vi a, vi b) { return a + b; }); }
static inline float largest(vf v) { return folded(v, [](vf a, vf b) { return larger(a, b); }); }
static inline bool any(vi mask) { return folded(mask, [](vi a, vi b) { return a | b; }) != 0; }

// e^x, accurate to about 2 units in the last place; 0 below -87, infinity above 88.7, NaN for NaN.
static inline vf exp(vf x) {
    const vf low = splat(-87.3f), high = splat(88.8f);
    const vf clipped = -larger(-high, -x);
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf shifted = fma(clipped, splat(1.44269504f), magic), n = shifted - magic;
    vf r = fma(n, splat(-0.693145752f), clipped);
    r = fma(n, splat(-1.42860677e-6f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
#if defined(WITH_AVX512)
    return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
    // 2^n as a product of two factors, because n can be 128.
    vi k = (vi)shifted - (vi)magic, half = k >> 1;
    vf result = p * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
    const vi is_low = x < low, is_nan = x != x;
    return (vf)((~is_low & ~is_nan & (vi)result) | (is_nan & (vi)x));
#endif
}

// 2^x for x up to 127, accurate to about 1 unit in the last place; 0 below -126, NaN for NaN.
static inline vf exp2(vf x) {
    const vf low = splat(-126.0f);
#if defined(WITH_AVX512)
    const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vf magic = splat(12582912.0f), shifted = x + magic, n = shifted - magic;
#endif
    const vf r = x - n;
    vf p = fma(splat(1.3264727e-3f), r, splat(9.6715127e-3f));
    p = fma(p, r, splat(5.5507337e-2f));
    p = fma(p, r, splat(2.4022242e-1f));
    p = fma(p, r, splat(6.9314698e-1f));
    p = fma(p, r, splat(1.0f));
#if defined(WITH_AVX512)
    return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
    const vf result = p * (vf)(((vi)shifted - (vi)magic + 127) << 23);
    const vi is_low = x < low, is_nan = x != x;
    return (vf)((~is_low & ~is_nan & (vi)result) | (is_nan & (vi)x));
#endif
}
