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
constexpr int AHEAD = 8192;  // bytes of codes of all blocks of a tile that are asked for before they are used
constexpr int GROUPS_AHEAD = 3;  // groups between asking for a block's scales and using them

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

// A number for each output of a block, in as many vectors as it takes.
constexpr int VECTORS = OUTPUTS / LANES;
struct Sixteen {
    vf v[VECTORS] = {};
};
template <class S> static inline Sixteen sixteen(const S* from) {
    Sixteen f;
    for (int i = 0; i < VECTORS; i++) f.v[i] = load(from + i * LANES);
    return f;
}
static inline void add_product(Sixteen& sum, const Sixteen& a, const Sixteen& b) {
    for (int i = 0; i < VECTORS; i++) sum.v[i] = fma(a.v[i], b.v[i], sum.v[i]);
}
static inline void add_product(Sixteen& sum, const Sixteen& a, float b) {
    for (int i = 0; i < VECTORS; i++) sum.v[i] = fma(a.v[i], splat(b), sum.v[i]);
}
static inline Sixteen product(Sixteen a, const Sixteen& b) {
    for (int i = 0; i < VECTORS; i++) a.v[i] *= b.v[i];
    return a;
}
static inline Sixteen minus(Sixteen a, float b) {
    for (vf& each : a.v) each -= b;
    return a;
}
static inline Sixteen times(Sixteen a, float b) {
    for (vf& each : a.v) each *= b;
    return a;
}

#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
constexpr int BLOCKS_TOGETHER = 4;  // of a tile: what the registers hold
static inline __m512i low_halves(__m512i w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
static inline __m512i high_halves(__m512i w) { return low_halves(_mm512_srli_epi16(w, 4)); }
struct Sums {  // one integer per output of a block: codes of 4 inputs each, times theirs
    __m512i v = _mm512_setzero_si512();
    static __m512i quads(const uint8_t* from) { return _mm512_loadu_si512(from); }
    void add(__m512i w, int32_t x) { v = _mm512_dpbusd_epi32(v, w, _mm512_set1_epi32(x)); }
    void add_halves(__m512i w, int32_t low, int32_t high) { add(low_halves(w), low), add(high_halves(w), high); }
};
static inline Sixteen converted(const Sums& s) { return {(vf)_mm512_cvtepi32_ps(s.v)}; }
#elif defined(__AVX2__)
constexpr int BLOCKS_TOGETHER = 1;
struct Quads {
    __m256i w[2];
};
struct Sums {
    __m256i v[2] = {};
    static Quads quads(const uint8_t* from) {
        return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
    }
    void add(const Quads& q, int32_t x) {
        const __m256i all = _mm256_set1_epi32(x), odd = _mm256_srai_epi16(all, 8);
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
        for (int i = 0; i < 2; i++) {
            const __m256i evens = _mm256_and_si256(q.w[i], _mm256_set1_epi16(255)), odds = _mm256_srli_epi16(q.w[i], 8);
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(evens, even));
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(odds, odd));
        }
    }
    // Products of halves with 8 bits fit 16 bits in pairs, and so do sums of two; those of whole codes would not.
    void add_halves(const Quads& q, int32_t low, int32_t high) {
        const __m256i halves = _mm256_set1_epi8(15);
        for (int i = 0; i < 2; i++) {
            const __m256i lows = _mm256_and_si256(q.w[i], halves);
            const __m256i highs = _mm256_and_si256(_mm256_srli_epi16(q.w[i], 4), halves);
            const __m256i pairs = _mm256_add_epi16(
                _mm256_maddubs_epi16(lows, _mm256_set1_epi32(low)), _mm256_maddubs_epi16(highs, _mm256_set1_epi32(high)));
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
constexpr int BLOCKS_TOGETHER = 1;
typedef int16_t vs __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
struct Quads {
    vs w[VECTORS];
};
struct Sums {
    vi v[VECTORS] = {};
    static Quads quads(const uint8_t* from) {
        Quads q;
        for (int i = 0; i < VECTORS; i++) q.w[i] = *(const vs*)(from + 4 * LANES * i);
        return q;
    }
    // Codes of every other input lie in 16 bits: their products fit there, and of halves the sums of four.
    static vs even(int32_t x) { return (vs)(vi{} + x) << 8 >> 8; }
    static vs odd(int32_t x) { return (vs)(vi{} + x) >> 8; }
    static vi quads_of(vs pairs) { return ((vi)pairs << 16 >> 16) + ((vi)pairs >> 16); }
    void add(const Quads& q, int32_t x) {
        for (int i = 0; i < VECTORS; i++)
            v[i] += quads_of((q.w[i] & 255) * even(x)) + quads_of((q.w[i] >> 8 & 255) * odd(x));
    }
    void add_halves(const Quads& q, int32_t low, int32_t high) {
        for (int i = 0; i < VECTORS; i++) {
            const vs w = q.w[i];
            v[i] += quads_of(
                (w & 15) * even(low) + (w >> 8 & 15) * odd(low) + (w >> 4 & 15) * even(high) + (w >> 12 & 15) * odd(high));
        }
    }
};
static inline Sixteen converted(const Sums& s) {
    Sixteen f;
    for (int i = 0; i < VECTORS; i++) f.v[i] = __builtin_convertvector(s.v[i], vf);
    return f;
}
#endif

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
    void ask_for_scales(int64_t at) const {
        __builtin_prefetch((const char*)scales + at * 2 * OUTPUTS * (scale_type == ZERO_CODES_F32 ? 4 : 2), 0, 2);
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
        const int64_t ahead = AHEAD / B + (g * group_bytes + AHEAD / B < bytes ? 0 : (next - 1) * bytes);
        const int64_t later = GROUPS_AHEAD + (g + GROUPS_AHEAD < groups ? 0 : int64_t(next - 1) * groups);
        for (int at = g * w.group; at < (g + 1) * w.group; at += INPUTS) {
            for (int b = 0; b < B; b++) {
                const auto ws = Sums::quads(codes[b]);
                if (first) __builtin_prefetch(codes[b] + ahead, 0, 2);
                codes[b] += 64;
                for (int r = 0; r < R; r++) {
                    int32_t xs[2];
                    memcpy(xs, x.codes + int64_t(row + r) * k + at, INPUTS);
                    if constexpr (BITS == 4) sums[r][b].add_halves(ws, xs[0], xs[1]);
                    else sums[r][b].add(ws, xs[0]);
                }
            }
        }
        for (int b = 0; b < B; b++) {
            const int64_t scales_at = int64_t(block + b) * groups + g;
            Sixteen scale, zero;
            if (first) w.ask_for_scales(scales_at + later);
            w.scales_of(scales_at, float(1 << (BITS - 1)), scale, zero);
            for (int r = 0; r < R; r++) {
                const int64_t own = int64_t(row + r) * groups + g;
                add_product(acc[r][b], converted(sums[r][b]), times(scale, x.scales[own]));
                add_product(acc[r][b], zero, x.sums[own]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++)
            for (int i = 0; i < VECTORS; i++) store(c + r * ldc + b * OUTPUTS + i * LANES, acc[r][b].v[i]);
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
    Sixteen acc[G * SIDE] = {};
    alignas(64) uint8_t unpacked[SIDE][64];
    alignas(64) int32_t sums[G * SIDE][SIDE];
    for (int g = 0; g < groups; g++) {
        unrolled<G>([&](auto s) { zero_tile<s>(); });
        for (int at = g * w.group; at < (g + 1) * w.group; at += TILE_CODES) {
            for (int i = 0; i < SIDE * BITS / 8; i++, codes += 64) {
                if (row == 0) __builtin_prefetch(codes + AHEAD / 4, 0, 2);
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
        Sixteen scale, zero;
        w.scales_of(int64_t(block) * groups + g, float(1 << (BITS - 1)), scale, zero);
        for (int r = 0; r < G * SIDE; r++) {
            const int64_t own = int64_t(row + r) * groups + g;
            add_product(acc[r], converted({_mm512_load_si512(sums[r])}), times(scale, x.scales[own]));
            add_product(acc[r], zero, x.sums[own]);
        }
    }
    for (int r = 0; r < G * SIDE; r++) store(c + r * ldc, acc[r].v[0]);
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
        auto tiles = [&](auto together) {
            constexpr int B = together;
            for (; block + B <= last; block += B)
                packed_tile_of<BITS, B, MOST>(
                    rows, w, block, x, row, c + (block - first) * OUTPUTS, ldc, block + 2 * B <= last ? B : next);
        };
        tiles(std::integral_constant<int, BLOCKS_TOGETHER>());
        tiles(std::integral_constant<int, 1>());
    }
}
