// Products with weights of 8 or 4 bits, of drafts and of quantised targets: activations are rounded to 8 bits per group of inputs, sums of a group
// are integers and exact, and groups are added up in one order.
//
// Weights lie in blocks of 16 outputs; a weight is (code - half) * scale + zero, half 8 or 128. Codes of 8 bits: for every
// 4 inputs 64 bytes, output by output. Codes of 4 bits: for every 8 inputs 64 bytes, the first 4 in the low halves.
// Scales: per block and group 16 scales, then 16 zeros, in bfloat16. Those of targets are in the type that the checkpoint
// has, and zeros are whole numbers: a weight is (code - half + zero) * scale.
#pragma once
#include "dense.h"

constexpr int OUTPUTS = 16;  // of a block
constexpr int TILE_CODES = 64;  // inputs of a tile of codes
constexpr int AHEAD = 2048;  // bytes of codes that are asked for before they are used

// The activations of some rows as codes: value ~ code * scale.
struct Rounded {
    int8_t* codes;  // (rows, n_in)
    float* scales;  // (rows, groups)
    float* sums;    // (rows, groups): the sum of a group's codes * scale
};

// Round one row of `n_in` values; what lies behind the last of them, up to whole groups, counts as 0.
template <class T> static void round_row(const T* x, int n_in, int group, int8_t* codes, float* scales, float* sums) {
    static_assert(32 % LANES == 0, "groups are whole vectors");
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    for (int g = 0, at = 0; at < n_in; g++, at += group) {
        vf most = {};
        vi odd = {};  // codes cannot say that a value is no number; the scale can
        for (int i = at; i < std::min(at + group, n_in); i += LANES) {
            const vf v = (vf)((vi)part_of(x, i, n_in) & 0x7fffffff);
            odd |= ~(vi)(v < splat(INFINITY));
            most = larger(v, most);
        }
        float largest = 0;
        bool numbers = true;
        for (int i = 0; i < LANES; i++) largest = std::max(largest, most[i]), numbers &= !odd[i];
        const float scale = numbers ? largest / 127 : NAN, inverse = largest > 1e-30f ? 127 / largest : 0;
        vi total = {};
        for (int i = at; i < at + group; i += LANES) {
            const vf v = i < n_in ? part_of(x, i, n_in) : vf{};
            const vi code = (vi)(v * inverse + magic) - (vi)magic;
            const vb bytes = __builtin_convertvector(code, vb);
            memcpy(codes + i, &bytes, sizeof bytes);
            total += code;
        }
        int sum = 0;
        for (int i = 0; i < LANES; i++) sum += total[i];
        scales[g] = scale;
        sums[g] = scale * float(sum);
    }
}

#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
struct Sums {  // one integer per output of a block
    __m512i v = _mm512_setzero_si512();
    static __m512i quads(const uint8_t* from) { return _mm512_loadu_si512(from); }
    void add(__m512i w, int32_t x) { v = _mm512_dpbusd_epi32(v, w, _mm512_set1_epi32(x)); }
};
static inline __m512i low_halves(__m512i w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
static inline __m512i high_halves(__m512i w) {
    return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15));
}
static inline vf converted(const Sums& s) { return (vf)_mm512_cvtepi32_ps(s.v); }
template <class S> static inline vf sixteen(const S* from) { return load(from); }
typedef vf Sixteen;
#else
struct Quads {
    uint8_t w[64];
};
struct Sums {
    int32_t v[OUTPUTS] = {};
    static Quads quads(const uint8_t* from) {
        Quads q;
        memcpy(q.w, from, 64);
        return q;
    }
    void add(const Quads& q, int32_t x) {
        int8_t xs[4];
        memcpy(xs, &x, 4);
#if defined(__AVX2__)
        // Products of halves with 8 bits fit 16 bits in pairs; those of whole codes would not.
        const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), all = _mm256_set1_epi32(x);
        for (int h = 0; h < 2; h++) {
            __m256i w = _mm256_loadu_si256((const __m256i*)(q.w + 32 * h)), sum;
            memcpy(&sum, v + 8 * h, 32);
            __m256i lows = _mm256_maddubs_epi16(_mm256_and_si256(w, low), all);
            __m256i highs = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 4), low), all);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(lows, ones));
            sum = _mm256_add_epi32(sum, _mm256_slli_epi32(_mm256_madd_epi16(highs, ones), 4));
            memcpy(v + 8 * h, &sum, 32);
        }
#else
        for (int o = 0; o < OUTPUTS; o++)
            for (int i = 0; i < 4; i++) v[o] += int32_t(q.w[4 * o + i]) * xs[i];
#endif
    }
};
static inline Quads low_halves(const Quads& q) {
    Quads low;
    for (int i = 0; i < 64; i++) low.w[i] = q.w[i] & 15;
    return low;
}
static inline Quads high_halves(const Quads& q) {
    Quads high;
    for (int i = 0; i < 64; i++) high.w[i] = q.w[i] >> 4;
    return high;
}
struct Sixteen {
    float v[OUTPUTS] = {};
};
static inline Sixteen converted(const Sums& s) {
    Sixteen f;
    for (int o = 0; o < OUTPUTS; o++) f.v[o] = float(s.v[o]);
    return f;
}
template <class S> static inline Sixteen sixteen(const S* from) {
    Sixteen f;
    for (int o = 0; o < OUTPUTS; o++) f.v[o] = to_float(from[o]);
    return f;
}
#endif

static inline void add_product(Sixteen& sum, const Sixteen& a, float b) {
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
    sum = fma(a, splat(b), sum);
#else
    for (int o = 0; o < OUTPUTS; o++) sum.v[o] += a.v[o] * b;
#endif
}
static inline void add_product(Sixteen& sum, const Sixteen& a, const Sixteen& b) {
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
    sum = fma(a, b, sum);
#else
    for (int o = 0; o < OUTPUTS; o++) sum.v[o] += a.v[o] * b.v[o];
#endif
}
static inline Sixteen product(Sixteen a, const Sixteen& b) {
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
    return a * b;
#else
    for (int o = 0; o < OUTPUTS; o++) a.v[o] *= b.v[o];
    return a;
#endif
}
static inline Sixteen minus(Sixteen a, float b) {
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
    return a - b;
#else
    for (float& each : a.v) each -= b;
    return a;
#endif
}
static inline Sixteen times(Sixteen a, float b) {
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
    return a * b;
#else
    for (float& each : a.v) each *= b;
    return a;
#endif
}

enum ScaleType : int32_t { ZERO_VALUES, ZERO_CODES_BF16, ZERO_CODES_F16, ZERO_CODES_F32 };

// Weights of one map; `codes` and `scales` as above, `n_in` in whole groups.
struct Packed {
    const uint8_t* codes;
    const void* scales;
    int n_in, group, scale_type;
    int64_t block_bytes() const { return int64_t(n_in) * OUTPUTS; }  // of 8 bits

    // Scales of a block's group, and what a code of 0 stands for; `at`: blocks and groups before it.
    void scales_of(int64_t at, float half, Sixteen& scale, Sixteen& zero) const {
        at *= 2 * OUTPUTS;
        if (scale_type == ZERO_VALUES) {
            scale = sixteen((const bf16*)scales + at), zero = sixteen((const bf16*)scales + at + OUTPUTS);
            add_product(zero, scale, -half);
        } else if (scale_type == ZERO_CODES_BF16) {
            by_codes((const bf16*)scales + at, half, scale, zero);
        } else if (scale_type == ZERO_CODES_F16) {
            by_codes((const f16*)scales + at, half, scale, zero);
        } else {
            by_codes((const float*)scales + at, half, scale, zero);
        }
    }
    template <class S> static void by_codes(const S* from, float half, Sixteen& scale, Sixteen& zero) {
        scale = sixteen(from), zero = product(scale, minus(sixteen(from + OUTPUTS), half));
    }
};

// R rows by B blocks of 16 outputs. `next`: blocks from each of these on to the one that this thread takes next.
template <int BITS, int R, int B>
static inline void packed_tile(
    const Packed& w, int block, const Rounded& x, int row, int k, float* c, int64_t ldc, bool first, int next) {
    constexpr int INPUTS = BITS == 4 ? 8 : 4;  // of 64 bytes
    const int groups = w.n_in / w.group;
    const int64_t bytes = w.block_bytes() * BITS / 8, group_bytes = bytes / groups;
    const uint8_t* codes[B];
    for (int b = 0; b < B; b++) codes[b] = w.codes + (block + b) * bytes;
    Sixteen acc[R][B] = {};
    for (int g = 0; g < groups; g++) {
        Sums sums[R][B];
        const int64_t ahead = AHEAD + (g * group_bytes + AHEAD < bytes ? 0 : (next - 1) * bytes);
        for (int at = g * w.group; at < (g + 1) * w.group; at += INPUTS) {
            for (int b = 0; b < B; b++) {
                auto ws = Sums::quads(codes[b]);
                if (first) __builtin_prefetch(codes[b] + ahead, 0, 2);
                codes[b] += 64;
                for (int r = 0; r < R; r++) {
                    int32_t xs[2];
                    memcpy(xs, x.codes + int64_t(row + r) * k + at, INPUTS);
                    if constexpr (BITS == 4) {
                        sums[r][b].add(low_halves(ws), xs[0]);
                        sums[r][b].add(high_halves(ws), xs[1]);
                    } else {
                        sums[r][b].add(ws, xs[0]);
                    }
                }
            }
        }
        for (int b = 0; b < B; b++) {
            Sixteen scale, zero;
            w.scales_of(int64_t(block + b) * groups + g, float(1 << (BITS - 1)), scale, zero);
            for (int r = 0; r < R; r++) {
                const int64_t own = int64_t(row + r) * groups + g;
                add_product(acc[r][b], converted(sums[r][b]), times(scale, x.scales[own]));
                add_product(acc[r][b], zero, x.sums[own]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) memcpy(c + r * ldc + b * OUTPUTS, &acc[r][b], OUTPUTS * sizeof(float));
}

template <int BITS, int B, int R>
static inline void packed_tile_of(
    int m, const Packed& w, int block, const Rounded& x, int row, float* c, int64_t ldc, int next) {
    if (m == R) {
        packed_tile<BITS, R, B>(w, block, x, row, w.n_in, c, ldc, row == 0, next);
    } else if constexpr (R > 1) {
        packed_tile_of<BITS, B, R - 1>(m, w, block, x, row, c, ldc, next);
    }
}

#if defined(WITH_TILES)
// As `packed_tile`, of G times 16 rows by one block, by tiles; sums of codes are whole numbers: the bits are the same.
template <int BITS, int G>
static inline void packed_sides(const Packed& w, int block, const Rounded& x, int row, int k, float* c, int64_t ldc) {
    const int groups = w.n_in / w.group;
    const uint8_t* codes = w.codes + block * (w.block_bytes() * BITS / 8);
    vf acc[G * SIDE] = {};
    alignas(64) uint8_t unpacked[SIDE][64];
    alignas(64) int32_t sums[G * SIDE][SIDE];
    for (int g = 0; g < groups; g++) {
        unrolled<G>([&](auto s) { zero_tile<s>(); });
        for (int at = g * w.group; at < (g + 1) * w.group; at += TILE_CODES) {
            for (int i = 0; i < SIDE * BITS / 8; i++, codes += 64) {
                if (row == 0) __builtin_prefetch(codes + AHEAD, 0, 2);
                if constexpr (BITS == 4) {
                    const __m512i own = _mm512_loadu_si512(codes);
                    _mm512_store_si512(unpacked[2 * i], low_halves(own));
                    _mm512_store_si512(unpacked[2 * i + 1], high_halves(own));
                }
            }
            load_tile<7>(BITS == 4 ? unpacked[0] : codes - SIDE * 64, 64);
            unrolled<G>([&](auto s) {
                load_tile<4 + s>(x.codes + int64_t(row + s * SIDE) * k + at, k);
                add_bytes<s, 4 + s, 7>();
            });
        }
        unrolled<G>([&](auto s) { store_tile<s>(sums[s * SIDE], sizeof sums[0]); });
        vf scale, zero;
        w.scales_of(int64_t(block) * groups + g, float(1 << (BITS - 1)), scale, zero);
        for (int r = 0; r < G * SIDE; r++) {
            const int64_t own = int64_t(row + r) * groups + g;
            const vf sum = (vf)_mm512_cvtepi32_ps(_mm512_load_si512(sums[r]));
            acc[r] = fma(zero, splat(x.sums[own]), fma(sum, scale * x.scales[own], acc[r]));
        }
    }
    for (int r = 0; r < G * SIDE; r++) store(c + r * ldc, acc[r]);
}
#endif

// C of rows 0 … m - 1 and blocks first … last - 1, (m, 16 * (last - first)) with rows `ldc` apart. What this thread will
// probably be asked for next begins `next` blocks behind the first.
template <int BITS>
static void packed_products(
    const Packed& w, const Rounded& x, int m, int first, int last, float* c, int64_t ldc, int next) {
    constexpr int MOST = 4;  // rows of a tile
#if defined(WITH_TILES)
    if (m >= 2 * MOST && w.group % TILE_CODES == 0) {
        for (int block = first; block < last; block++)
            for (int row = 0; row < m; row += 2 * SIDE) {
                float* own = c + row * ldc + (block - first) * OUTPUTS;
                if (m - row > SIDE) packed_sides<BITS, 2>(w, block, x, row, w.n_in, own, ldc);
                else packed_sides<BITS, 1>(w, block, x, row, w.n_in, own, ldc);
            }
        return;
    }
#endif
    for (int row = 0; row < m; row += MOST, c += MOST * ldc) {
        const int rows = std::min(MOST, m - row);
        int block = first;
        for (; block + 4 <= last; block += 4)
            packed_tile_of<BITS, 4, MOST>(rows, w, block, x, row, c + (block - first) * OUTPUTS, ldc, next);
        for (; block < last; block++)
            packed_tile_of<BITS, 1, MOST>(rows, w, block, x, row, c + (block - first) * OUTPUTS, ldc, 1);  // the one behind it
    }
}
