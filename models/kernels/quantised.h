// Products with weights of 8 or 4 bits, of drafts and of quantised targets: activations are rounded to 8 bits per group of inputs, sums of a group
// are integers and exact, and groups are added up in one order.
//
// Weights lie in blocks of 16 outputs; a weight is (code - half) * scale + zero, half 8 or 128. Codes of 8 bits: for every
// 4 inputs a line of 64 bytes, output by output. Codes of 4 bits: for every 8 inputs a line, the first 4 in the low halves.
// Codes of 6 bits: for every 16 inputs two such lines of their lower 4 bits, and one of the upper 2, whose lowest bits are
// those of the first four inputs; codes of 5 bits: for every 32 inputs four lines, and one of the upper bits.
// Scales: per block and group 16 scales, then 16 zeros, in bfloat16. Those of targets are as `ScaleType` says.
#pragma once
#include "dense.h"

constexpr int OUTPUTS = 16;  // of a block
constexpr int FINEST = 32;   // inputs that share a scale of theirs at least; weights of 16 inputs may share one
constexpr int TILE_CODES = 64;  // inputs of a tile of codes
constexpr int AHEAD = 8192;  // bytes of codes of all blocks of a tile that are asked for before they are used
constexpr int ROWS_TOGETHER = 4;  // of a tile
constexpr int SPREAD_INPUTS = 2048;  // of blocks that are spread for many rows
constexpr int GROUPS_AHEAD = 3;  // groups between asking for a block's scales and using them

// The activations of some rows as codes: value ~ code * scale.
struct Rounded {
    int8_t* codes;  // (rows, n_in)
    float* scales;  // (rows, groups)
    float* sums;    // (rows, groups): the sum of a group's codes * scale
    float* halves;  // (rows, 2 * groups): the same of half a group, where groups are of 32
};

// Round one row of `n_in` values; what lies behind the last of them, up to whole groups, counts as 0.
template <class T>
static void round_row(const T* x, int n_in, int group, int8_t* codes, float* scales, float* sums, float* halves) {
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
        int parts[2] = {};  // sums of the codes of either half
        for (int half = 0; half < 2; half++) {
            vi total = {};
            for (int i = at + half * group / 2; i < at + (half + 1) * group / 2; i += LANES) {
                const vf v = i < n_in ? part_of(x, i, n_in) : vf{};
                const vi code = (vi)(v * inverse + magic) - (vi)magic;
                const vb bytes = __builtin_convertvector(code, vb);
                memcpy(codes + i, &bytes, sizeof bytes);
                total += code;
            }
            for (int i = 0; i < LANES; i++) parts[half] += total[i];
        }
        scales[g] = scale;
        sums[g] = scale * float(parts[0] + parts[1]);
        if (group == FINEST) halves[2 * g] = scale * float(parts[0]), halves[2 * g + 1] = scale * float(parts[1]);
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
// Vectors are named by their index: a reference to one would promise the alignment of its whole width, which `vf` has not.
static inline Sixteen minus(Sixteen a, float b) {
    for (int i = 0; i < VECTORS; i++) a.v[i] -= b;
    return a;
}
static inline Sixteen times(Sixteen a, float b) {
    for (int i = 0; i < VECTORS; i++) a.v[i] *= b;
    return a;
}

#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
constexpr int LINE_LANES = 16, BLOCKS_TOGETHER = 4;  // words of a vector of codes; blocks of a tile, what the registers hold
#elif defined(__AVX2__)
constexpr int LINE_LANES = 8, BLOCKS_TOGETHER = 1;
#else
constexpr int LINE_LANES = 4, BLOCKS_TOGETHER = 1;
#endif
// Rows from which on reading spread blocks takes less time than unpacking codes of `bits` bits for every four rows.
constexpr int few_to_spread(int bits) {
#if defined(WITH_AVX512) && defined(__AVX512VNNI__)
    return bits == 5 ? 12 : 24;
#else
    return INT32_MAX;  // spread codes take longer here than those of fewer bits
#endif
}
// Bytes of spread blocks, with scales for every 16 inputs.
constexpr int64_t SPREAD_ROOM = BLOCKS_TOGETHER * (SPREAD_INPUTS * OUTPUTS + SPREAD_INPUTS / 16 * 2 * OUTPUTS * sizeof(float));
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
static inline Quads bits_of(Quads q, int shift, int mask) {
    for (int i = 0; i < LINE_VECTORS; i++) q.w[i] = (shift < 0 ? q.w[i] << -shift : q.w[i] >> shift) & uint16_t(mask * 257);
    return q;
}
static inline Quads joined(Quads a, const Quads& b) {
    for (int i = 0; i < LINE_VECTORS; i++) a.w[i] |= b.w[i];
    return a;
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

// The codes of a block for INPUTS inputs, which lie in LINES lines of 64 bytes.
template <int BITS> struct Unit {
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
            quads[i] = bits_of(halves, 0, 15), quads[i + 1] = bits_of(halves, 4, 15);
        }
        if constexpr (BITS > 4) {
            constexpr int MORE = BITS - 4;  // bits above the halves
            const Quads above = line(codes + N / 2 * 64);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) quads[i] = joined(quads[i], bits_of(above, i * MORE - 4, ((1 << MORE) - 1) << 4));
        }
    }
    // Add its products with INPUTS codes of a row.
    void add_to(Sums& sums, const int8_t* x) const {
        int32_t xs[N];
        memcpy(xs, x, INPUTS);
        if constexpr (BITS == 8) sums.add(quads[0], xs[0]);
        else
            for (int i = 0; i < N; i += 2) sums.add_pair(quads[i], xs[i], quads[i + 1], xs[i + 1]);
    }
};

// What the scales of a block and group are: those of drafts, in bfloat16, and whole numbers beside scales of a type, for 16
// outputs each; numbers in float16 that are added (PAIRS) or none (CENTRED); and, per SUPER inputs, numbers in float16 for all
// groups of these and numbers of 8 bits for each: scales and what is taken off (SUPER_PAIRS), or signed scales alone. SPREAD
// blocks have both as they are used, in float32.
enum ScaleType : int32_t {
    ZERO_VALUES, ZERO_CODES_BF16, ZERO_CODES_F16, ZERO_CODES_F32, PAIRS, CENTRED, SUPER_PAIRS, SUPER_CENTRED, SPREAD
};
constexpr int ANY = -1;  // in place of a constant type of scales
constexpr int SUPER = 256;

// Weights of one map; `codes` and `scales` as above, `n_in` in whole groups.
struct Packed {
    const uint8_t* codes;
    const uint8_t* scales;
    int n_in, group, scale_type, groups;
    int super_shift = 0;      // groups of SUPER inputs, as a power of 2
    int64_t group_bytes = 0;  // of the scales of a block, on average

    Packed(const void* its_codes, const void* its_scales, int its_inputs, int its_group, int its_type)
        : codes((const uint8_t*)its_codes), scales((const uint8_t*)its_scales), n_in(its_inputs), group(its_group),
          scale_type(its_type), groups(its_inputs / its_group) {
        while (group << super_shift < SUPER) super_shift++;
        const int numbers = scale_type == CENTRED || scale_type == SUPER_CENTRED ? 1 : 2;
        const int size = scale_type == ZERO_CODES_F32 ? 4 : 2;
        group_bytes = numbers * OUTPUTS * (scale_type < SUPER_PAIRS ? size : 1);
        if (scale_type >= SUPER_PAIRS) group_bytes += numbers * OUTPUTS * 2 >> super_shift;
    }
    int64_t block_bytes() const { return int64_t(n_in) * OUTPUTS; }  // of 8 bits

    // The numbers that are for all groups of SUPER inputs of a block, those that are taken off negated.
    struct Shared {
        Sixteen scale, less;
    };
    static bool is_super(int type) { return type == SUPER_PAIRS || type == SUPER_CENTRED; }
    bool begins_super(int g, int type) const { return is_super(type) && !(g & ((1 << super_shift) - 1)); }
    const uint8_t* super_at(int block, int g) const {
        return scales + (((int64_t(block) * groups + g) >> super_shift) * group_bytes << super_shift);
    }
    Shared shared_by(int block, int g) const {
        const f16* at = (const f16*)super_at(block, g);
        return {sixteen(at), scale_type == SUPER_PAIRS ? times(sixteen(at + OUTPUTS), -1.0f) : Sixteen{}};
    }

    // Scales of a block's group, and what a code of 0 stands for. `type`: of the scales, a constant where that saves time.
    inline __attribute__((always_inline)) void scales_of(
        int type, int block, int g, float half, const Shared& shared, Sixteen& scale, Sixteen& zero) const {
        if (is_super(type)) {
            const int numbers = type == SUPER_PAIRS ? 2 * OUTPUTS : OUTPUTS;
            const uint8_t* own = super_at(block, g) + 2 * numbers + (g & ((1 << super_shift) - 1)) * numbers;
            if (type == SUPER_PAIRS) {
                scale = product(shared.scale, sixteen(own)), zero = product(shared.less, sixteen(own + OUTPUTS));
            } else {
                scale = product(shared.scale, sixteen((const int8_t*)own)), zero = times(scale, -half);
            }
            return;
        }
        const uint8_t* at = scales + (int64_t(block) * groups + g) * group_bytes;
        if (type == SPREAD) {
            scale = sixteen((const float*)at), zero = sixteen((const float*)at + OUTPUTS);
            return;
        }
        if (type == ZERO_VALUES) {
            scale = sixteen((const bf16*)at), zero = sixteen((const bf16*)at + OUTPUTS);
            add_product(zero, scale, -half);
        } else if (type == ZERO_CODES_BF16) {
            by_codes((const bf16*)at, half, scale, zero);
        } else if (type == ZERO_CODES_F16) {
            by_codes((const f16*)at, half, scale, zero);
        } else if (type == ZERO_CODES_F32) {
            by_codes((const float*)at, half, scale, zero);
        } else if (type == PAIRS) {
            scale = sixteen((const f16*)at), zero = sixteen((const f16*)at + OUTPUTS);
        } else {
            scale = sixteen((const f16*)at), zero = times(scale, -half);
        }
    }
    void ask_for_scales(int64_t at) const { __builtin_prefetch(scales + at * group_bytes, 0, 2); }
    template <class S> static void by_codes(const S* from, float half, Sixteen& scale, Sixteen& zero) {
        scale = sixteen(from), zero = product(scale, minus(sixteen(from + OUTPUTS), half));
    }
};

// R rows by B blocks of 16 outputs. `next`: blocks from each of these on to the one that this thread takes next. The groups
// of `w` are those of the rows from `group` on; sums begin with what is in `c` unless it is the first.
template <int BITS, int TYPE, int R, int B>
static inline void packed_tile(
    const Packed& w, int block, const Rounded& x, int row, int k, int group, float* c, int64_t ldc, bool first, int next) {
    using U = Unit<BITS>;
    const int type = TYPE == ANY ? w.scale_type : TYPE;
    const int groups = w.groups, split = w.group < FINEST;  // whether half a group of the row is one of the weights
    const int64_t bytes = w.block_bytes() * BITS / 8, group_bytes = bytes / groups, row_groups = k / w.group;
    const float* row_sums = split ? x.halves : x.sums;
    const uint8_t* codes[B];
    for (int b = 0; b < B; b++) codes[b] = w.codes + (block + b) * bytes;
    Sixteen acc[R][B] = {};
    if (group)
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] = sixteen(c + r * ldc + b * OUTPUTS);
    Packed::Shared shared[B];
    for (int g = 0; g < groups; g++) {
        Sums sums[R][B];
        if (w.begins_super(g, type))
            for (int b = 0; b < B; b++) shared[b] = w.shared_by(block + b, g);
        const int64_t ahead = AHEAD / B + (g * group_bytes + AHEAD / B < bytes ? 0 : (next - 1) * bytes);
        const int64_t later = GROUPS_AHEAD + (g + GROUPS_AHEAD < groups ? 0 : int64_t(next - 1) * groups);
        for (int at = (group + g) * w.group; at < (group + g + 1) * w.group; at += U::INPUTS) {
            for (int b = 0; b < B; b++) {
                const U unit(codes[b]);
                if (first)
                    for (int i = 0; i < U::LINES; i++) __builtin_prefetch(codes[b] + ahead + i * 64, 0, 2);
                codes[b] += U::LINES * 64;
                for (int r = 0; r < R; r++) unit.add_to(sums[r][b], x.codes + int64_t(row + r) * k + at);
            }
        }
        for (int b = 0; b < B; b++) {
            Sixteen scale, zero;
            if (first) w.ask_for_scales(int64_t(block + b) * groups + g + later);
            w.scales_of(type, block + b, g, float(1 << (BITS - 1)), shared[b], scale, zero);
            for (int r = 0; r < R; r++) {
                const int64_t own = (row + r) * row_groups + group + g;
                add_product(acc[r][b], converted(sums[r][b]), times(scale, x.scales[own >> split]));
                add_product(acc[r][b], zero, row_sums[own]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++)
            for (int i = 0; i < VECTORS; i++) store(c + r * ldc + b * OUTPUTS + i * LANES, acc[r][b].v[i]);
}

template <int BITS, int TYPE, int B, int R>
static inline void packed_tile_of(
    int m, const Packed& w, int block, const Rounded& x, int row, int k, int group, float* c, int64_t ldc, bool first,
    int next) {
    if (m == R) {
        packed_tile<BITS, TYPE, R, B>(w, block, x, row, k, group, c, ldc, first, next);
    } else if constexpr (R > 1) {
        packed_tile_of<BITS, TYPE, B, R - 1>(m, w, block, x, row, k, group, c, ldc, first, next);
    }
}

// Rows 0 … m - 1 by blocks first … last - 1, a tile after the other.
template <int BITS, int TYPE>
static void packed_tiles(
    const Packed& w, const Rounded& x, int m, int k, int group, int first, int last, float* c, int64_t ldc, int next) {
    for (int row = 0; row < m; row += ROWS_TOGETHER, c += ROWS_TOGETHER * ldc) {
        const int rows = std::min(ROWS_TOGETHER, m - row);
        int block = first;
        auto tiles = [&](auto together, auto most) {
            constexpr int B = together;
            for (; block + B <= last; block += B)
                packed_tile_of<BITS, TYPE, B, most>(
                    rows, w, block, x, row, k, group, c + (block - first) * OUTPUTS, ldc, row == 0 && next,
                    block + 2 * B <= last ? B : next);
        };
        // Codes that are unpacked for their rows take registers, too: half as many blocks then.
        constexpr int HALF = BLOCKS_TOGETHER > 1 ? BLOCKS_TOGETHER / 2 : 1;
        if constexpr (TYPE == SPREAD || HALF == BLOCKS_TOGETHER) {
            tiles(std::integral_constant<int, BLOCKS_TOGETHER>(), std::integral_constant<int, ROWS_TOGETHER>());
        } else if (rows <= ROWS_TOGETHER / 2) {
            tiles(std::integral_constant<int, BLOCKS_TOGETHER>(), std::integral_constant<int, ROWS_TOGETHER / 2>());
        } else {
            tiles(std::integral_constant<int, HALF>(), std::integral_constant<int, ROWS_TOGETHER>());
        }
        tiles(std::integral_constant<int, 1>(), std::integral_constant<int, ROWS_TOGETHER>());
    }
}

// Spread groups [from, to) of a block: a line for every 4 inputs, and scales as they are used.
template <int BITS> static void spread_block(const Packed& w, int block, int from, int to, uint8_t* codes, float* scales) {
    using U = Unit<BITS>;
    const uint8_t* at = w.codes + block * (w.block_bytes() * BITS / 8) + int64_t(from) * w.group * OUTPUTS * BITS / 8;
    Packed::Shared shared;
    for (int g = from; g < to; g++, scales += 2 * OUTPUTS) {
        Sixteen scale, zero;
        if (g == from || w.begins_super(g, w.scale_type)) shared = w.is_super(w.scale_type) ? w.shared_by(block, g) : shared;
        w.scales_of(w.scale_type, block, g, float(1 << (BITS - 1)), shared, scale, zero);
        for (int i = 0; i < VECTORS; i++)
            store(scales + i * LANES, scale.v[i]), store(scales + OUTPUTS + i * LANES, zero.v[i]);
        for (int i = 0; i < w.group; i += U::INPUTS, at += U::LINES * 64, codes += sizeof(U)) {
            const U unit(at);
            memcpy(codes, unit.quads, sizeof unit.quads);
        }
    }
}

#if defined(WITH_TILES)
// As `packed_tile`, of G times 16 rows by one block, by tiles; sums of codes are whole numbers: the bits are the same.
template <int BITS, int G>
static inline void packed_sides(const Packed& w, int block, const Rounded& x, int row, int k, float* c, int64_t ldc) {
    const int groups = w.groups;
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
                    const Unit<4> own(codes);
                    memcpy(unpacked[2 * i], own.quads, sizeof own.quads);
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
        w.scales_of(w.scale_type, block, g, float(1 << (BITS - 1)), {}, scale, zero);
        for (int r = 0; r < G * SIDE; r++) {
            const int64_t own = int64_t(row + r) * groups + g;
            add_product(acc[r], converted({_mm512_load_si512(sums[r])}), times(scale, x.scales[own]));
            add_product(acc[r], zero, x.sums[own]);
        }
    }
    for (int r = 0; r < G * SIDE; r++) store(c + r * ldc, acc[r].v[0]);
}
#endif

// f(type) for each of the types, as a constant, and for ANY at last.
template <int... TYPES, class F> static inline void unrolled_types(F&& f) {
    (f(std::integral_constant<int, TYPES>()), ...), f(std::integral_constant<int, ANY>());
}

// C of rows 0 … m - 1 and blocks first … last - 1, (m, 16 * (last - first)) with rows `ldc` apart. What this thread will
// probably be asked for next begins `next` blocks behind the first. `room`: SPREAD_ROOM bytes.
template <int BITS>
static void packed_products(
    const Packed& w, const Rounded& x, int m, int first, int last, float* c, int64_t ldc, int next, void* room) {
#if defined(WITH_TILES)
    if (BITS % 4 == 0 && m >= 2 * ROWS_TOGETHER && w.group % TILE_CODES == 0) {
        constexpr int WHOLE = BITS % 4 == 0 ? BITS : 8;  // other codes have no tiles
        for (int block = first; block < last; block++)
            for (int row = 0; row < m; row += 2 * SIDE) {
                float* own = c + row * ldc + (block - first) * OUTPUTS;
                if (m - row > SIDE) packed_sides<WHOLE, 2>(w, block, x, row, w.n_in, own, ldc);
                else packed_sides<WHOLE, 1>(w, block, x, row, w.n_in, own, ldc);
            }
        return;
    }
#endif
    if (m < few_to_spread(BITS)) {
        // The types of scales that codes of so many bits have in files and drafts are constants.
        constexpr int USUAL = BITS == 8 ? CENTRED : BITS == 6 ? SUPER_CENTRED : SUPER_PAIRS;
        constexpr int DRAFTS = BITS % 4 ? USUAL : ZERO_VALUES;
        constexpr int BARE = BITS == 6 ? USUAL : CENTRED, PLUS = BITS < 6 ? PAIRS : USUAL;
        bool done = false;
        unrolled_types<USUAL, DRAFTS, BARE, PLUS>([&](auto type) {
            if (done || (type != ANY && type != w.scale_type)) return;
            packed_tiles<BITS, type>(w, x, m, w.n_in, 0, first, last, c, ldc, next), done = true;
        });
        return;
    }
    // Many rows: a few blocks at a time are spread once for all of them.
    const int step = SPREAD_INPUTS / w.group;
    for (int block = first; block < last; block += BLOCKS_TOGETHER) {
        const int n = std::min(BLOCKS_TOGETHER, last - block);
        for (int from = 0; from < w.groups; from += step) {
            Packed part = w;
            part.groups = std::min(step, w.groups - from), part.n_in = part.groups * w.group;
            part.scale_type = SPREAD, part.group_bytes = 2 * OUTPUTS * sizeof(float);
            uint8_t* codes = (uint8_t*)room;
            float* scales = (float*)(codes + BLOCKS_TOGETHER * SPREAD_INPUTS * OUTPUTS);
            for (int b = 0; b < n; b++)
                spread_block<BITS>(w, block + b, from, from + part.groups, codes + b * part.block_bytes(),
                                   scales + b * part.groups * 2 * OUTPUTS);
            part.codes = codes, part.scales = (const uint8_t*)scales;
            packed_tiles<8, SPREAD>(part, x, m, w.n_in, from, 0, n, c + (block - first) * OUTPUTS, ldc, 0);
        }
    }
}
