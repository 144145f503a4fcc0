// Products with quantised weights, for drafts and for quantised models. Activations are rounded to 8 bits, with a scale per group
// of inputs. The sum over a group is an exact integer, and the groups' sums are added in a fixed order.
//
// Weights are in blocks of 16 outputs (`codes.h`); a weight is (code - middle) * scale + zero. For each block and group there
// are 16 scales and 16 zeros, in bfloat16 for drafts; `ScaleType` lists the other encodings.
#pragma once
#include "codes.h"

constexpr int MIN_GROUP = 32;    // smallest group of activations; a group of weights may have 16 inputs
constexpr int TILE_CODES = 64;  // inputs of a tile of codes
constexpr int CODE_PREFETCH_BYTES = 8192;  // distance in bytes, over all blocks of a tile, to the codes that are prefetched
constexpr int TILE_ROWS = 4;  // rows of a tile
constexpr int UNPACKED_INPUTS = 2048;  // inputs of blocks that are unpacked at once for many rows
constexpr int SCALE_PREFETCH_GROUPS = 3;  // distance in groups to the scales that are prefetched

// The activations of some rows as codes: value ~ code * scale.
struct ActivationCodes {
    int8_t* codes;  // (rows, n_in)
    float* scales;  // (rows, groups)
    float* sums;    // (rows, groups): scale * the sum of a group's codes
    float* halves;  // (rows, 2 * groups): the same for each half of a group, if groups have MIN_GROUP inputs

    // The part that begins at a row. `n_in`: values of a row; `group`: inputs of a group of weights.
    ActivationCodes at(int64_t row, int n_in, int group) const {
        const int64_t size = std::max(group, MIN_GROUP), groups = (n_in + size - 1) / size;
        return {codes + row * groups * size, scales + row * groups, sums + row * groups, halves + 2 * row * groups};
    }
};

// Round one row of n_in values; the last group is filled up with zeros.
template <class T>
static void quantise(const T* x, int n_in, int group, int8_t* codes, float* scales, float* sums, float* halves) {
    static_assert(32 % LANES == 0, "groups are whole vectors");
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    for (int g = 0, at = 0; at < n_in; g++, at += group) {
        vf peak = {};
        vi non_finite = {};  // an infinity or NaN makes the scale NaN, because codes cannot express it
        for (int i = at; i < std::min(at + group, n_in); i += LANES) {
            const vf v = (vf)((vi)part_of(x, i, n_in) & 0x7fffffff);
            non_finite |= ~(vi)(v < splat(INFINITY));
            peak = larger(v, peak);
        }
        const float most = largest(peak);
        const float scale = any(non_finite) ? NAN : most / 127, inverse = most > 1e-30f ? 127 / most : 0;
        int parts[2] = {};  // sums of the codes in each half of the group
        for (int half = 0; half < 2; half++) {
            vi total = {};
            for (int i = at + half * group / 2; i < at + (half + 1) * group / 2; i += LANES) {
                const vf v = i < n_in ? part_of(x, i, n_in) : vf{};
                const vi code = (vi)(v * inverse + magic) - (vi)magic;
                store_bytes(codes + i, code);
                total += code;
            }
            parts[half] = sum(total);
        }
        scales[g] = scale;
        sums[g] = scale * float(parts[0] + parts[1]);
        if (group == MIN_GROUP) halves[2 * g] = scale * float(parts[0]), halves[2 * g + 1] = scale * float(parts[1]);
    }
}

// 2 ^ (byte - 128): half the scales that E8M0 bytes stand for.
static inline vf half_powers(const uint8_t* from) {
    const vi power = widened(from);
    const vi least = (power == 0) & (1 << 22);  // 2^-127 is subnormal
    return (vf)(power << 23 | least) * 0.5f;
}

// From so many rows on, it is faster to unpack blocks once for all rows than to unpack codes for every four rows.
constexpr int min_rows_to_unpack(int bits) {
#if defined(WITH_DOTS)
    return bits == 5 ? 12 : 48;
#else
    return INT32_MAX;  // never: here, products with unpacked blocks take longer
#endif
}
constexpr int UNPACKED_BLOCKS = 4;  // blocks that are unpacked at a time
// Bytes of unpacked blocks, with scales and zeros for every 16 inputs.
constexpr int64_t UNPACKED_BYTES =
    UNPACKED_BLOCKS * (UNPACKED_INPUTS * OUTPUTS + UNPACKED_INPUTS / 16 * 2 * OUTPUTS * sizeof(float));
// Encodings of the scales and zeros of a block and group, for 16 outputs each.
// ZERO_VALUES: of drafts: scales and zeros in bfloat16.
// ZERO_CODES_…: of checkpoints: scales, and zeros as integers in the same type; a weight is (code - middle + zero) * scale.
// PAIRS: float16 scales, and zeros that are added to code * scale. CENTRED: float16 scales only.
// SUPER_PAIRS, SUPER_CENTRED: for every SUPER inputs a float16 factor of scales (and one of zeros), and for each group 8-bit
// scales and zeros, which are subtracted; or signed 8-bit scales only.
// EXPONENTS: powers of two, a byte each; codes of E2M1 stand for doubled values.
// UNPACKED: scales and zeros in float32, as products need them.
enum ScaleType : int32_t {
    ZERO_VALUES, ZERO_CODES_BF16, ZERO_CODES_F16, ZERO_CODES_F32, PAIRS, CENTRED, EXPONENTS, SUPER_PAIRS, SUPER_CENTRED,
    UNPACKED
};
constexpr int ANY = -1;  // as a template argument: the type of scales is not a compile-time constant
constexpr int SUPER = 256;

// The weights of a map; n_in is a multiple of the group.
struct Packed {
    const uint8_t* codes;
    const uint8_t* scales;
    int n_in, group, scale_type, groups;
    int super_shift = 0;      // SUPER inputs have 2 ^ super_shift groups
    int64_t group_bytes = 0;  // bytes of a group's scales in a block, with its part of those for SUPER inputs

    Packed(const void* codes, const void* scales, int n_in, int group, int type)
        : codes((const uint8_t*)codes), scales((const uint8_t*)scales), n_in(n_in), group(group), scale_type(type),
          groups(n_in / group) {
        while (group << super_shift < SUPER) super_shift++;
        const int numbers = scale_type == CENTRED || scale_type == SUPER_CENTRED || scale_type == EXPONENTS ? 1 : 2;
        const int size = scale_type == ZERO_CODES_F32 ? 4 : scale_type == EXPONENTS ? 1 : 2;
        group_bytes = numbers * OUTPUTS * (scale_type < SUPER_PAIRS ? size : 1);
        if (scale_type >= SUPER_PAIRS) group_bytes += numbers * OUTPUTS * 2 >> super_shift;
    }
    int64_t block_bytes() const { return int64_t(n_in) * OUTPUTS; }  // for codes of 8 bits

    // The factors of a slice's scales and zeros that all groups of SUPER inputs share. Factors of zeros are negated.
    struct SuperFactors {
        vf scale, zero;
    };
    static bool has_super(int type) { return type == SUPER_PAIRS || type == SUPER_CENTRED; }
    bool is_super_start(int g, int type) const { return has_super(type) && !(g & ((1 << super_shift) - 1)); }
    const uint8_t* super_at(int block, int g) const {
        return scales + (((int64_t(block) * groups + g) >> super_shift) * group_bytes << super_shift);
    }
    SuperFactors super_factors(int slice, int g) const {
        const f16* at = (const f16*)super_at(slice / VECTORS, g) + slice % VECTORS * LANES;
        return {load(at), scale_type == SUPER_PAIRS ? load(at + OUTPUTS) * -1.0f : vf{}};
    }

    // The scales of a slice and group, and the weights that a code of 0 stands for. `half`: the middle code. `type`: the scale
    // type, as a constant if possible.
    inline __attribute__((always_inline)) void load_scales(
        int type, int slice, int g, float half, const SuperFactors& factors, vf& scale, vf& zero) const {
        const int block = slice / VECTORS, first = slice % VECTORS * LANES;
        if (has_super(type)) {
            const int numbers = type == SUPER_PAIRS ? 2 * OUTPUTS : OUTPUTS;
            const uint8_t* bytes = super_at(block, g) + 2 * numbers + (g & ((1 << super_shift) - 1)) * numbers + first;
            if (type == SUPER_PAIRS) {
                scale = factors.scale * load(bytes), zero = factors.zero * load(bytes + OUTPUTS);
            } else {
                scale = factors.scale * load((const int8_t*)bytes), zero = scale * -half;
            }
            return;
        }
        const uint8_t* at = scales + (int64_t(block) * groups + g) * group_bytes;
        const auto of = [&](auto numbers) { scale = load(numbers + first), zero = load(numbers + OUTPUTS + first); };
        const auto by_codes = [&](auto numbers) { of(numbers), zero = scale * (zero - half); };
        if (type == UNPACKED) {
            of((const float*)at);
        } else if (type == ZERO_VALUES) {
            of((const bf16*)at), zero = fma(scale, splat(-half), zero);
        } else if (type == ZERO_CODES_BF16) {
            by_codes((const bf16*)at);
        } else if (type == ZERO_CODES_F16) {
            by_codes((const f16*)at);
        } else if (type == ZERO_CODES_F32) {
            by_codes((const float*)at);
        } else if (type == EXPONENTS) {
            scale = half_powers(at + first), zero = scale * -half;
        } else if (type == PAIRS) {
            of((const f16*)at);
        } else {
            scale = load((const f16*)at + first), zero = scale * -half;
        }
    }
    const uint8_t* scales_at(int block) const { return scales + int64_t(block) * groups * group_bytes; }
};

// The codes and scales that a thread will use next, to prefetch them; null: nothing is prefetched.
struct Prefetch {
    const uint8_t *codes, *scales;
};

// The units of consecutive slices.
template <class U, int T> struct Units {
    U of[T];
};
template <class U, int... SLICES> static inline Units<U, sizeof...(SLICES)> units_of(
    const uint8_t* line, std::integer_sequence<int, SLICES...>) {
    return {{U(line + SLICES * LANES * 4)...}};
}

// Inputs of a unit of codes of 4 bits. For a single row, a larger unit lets more products be summed in 16 bits.
#if defined(WITH_DOTS)
template <int R> constexpr int FOURS_OF = 8;
#else
template <int R> constexpr int FOURS_OF = R > 1 ? 8 : 16;
#endif

// The products of R rows and S slices. The first group of `w` is group number `group` of the rows; unless that is 0, the
// products are added to `c`. `next`: the blocks that this thread will use next, to prefetch them; the slices must then begin
// with a block.
template <int KIND, int TYPE, int R, int S>
static inline void packed_tile(
    const Packed& w, int slice, const ActivationCodes& x, int row, int k, int group, float* c, int64_t ldc, Prefetch next) {
    using U = Unit<KIND, FOURS_OF<R>>;
    const int type = TYPE == ANY ? w.scale_type : TYPE;
    const int groups = w.groups, split = w.group < MIN_GROUP;  // `split`: a group of activations has two groups of weights
    const int64_t bytes = w.block_bytes() * bits_of(KIND) / 8, group_bytes = bytes / groups, row_groups = k / w.group;
    const float* row_sums = split ? x.halves : x.sums;
    constexpr int T = S < VECTORS ? S : VECTORS;  // slices of a block
    const uint8_t* codes[S / T];
    for (int s = 0; s < S; s += T) codes[s / T] = w.codes + (slice + s) / VECTORS * bytes + (slice + s) % VECTORS * LANES * 4;
    // Distance from the end of a block to the next one that is used.
    const int64_t to_codes = next.codes - (codes[0] + bytes), to_scales = next.scales - w.scales_at(slice / VECTORS + 1);
    constexpr int64_t PREFETCH = CODE_PREFETCH_BYTES / ((S + VECTORS - 1) / VECTORS);  // the prefetch distance in each block
    vf acc[R][S] = {};
    if (group)
        for (int r = 0; r < R; r++)
            for (int s = 0; s < S; s++) acc[r][s] = load(c + r * ldc + s * LANES);
    Packed::SuperFactors factors[S];
    for (int g = 0; g < groups; g++) {
        vi sums[R][S / T][T] = {};
        if (w.is_super_start(g, type))
            for (int s = 0; s < S; s++) factors[s] = w.super_factors(slice + s, g);
        const int64_t ahead = PREFETCH + (g * group_bytes + PREFETCH < bytes ? 0 : to_codes);
        const int64_t later = SCALE_PREFETCH_GROUPS * w.group_bytes + (g + SCALE_PREFETCH_GROUPS < groups ? 0 : to_scales);
        for (int at = (group + g) * w.group; at < (group + g + 1) * w.group; at += U::INPUTS) {
            for (int s = 0; s < S; s += T) {
                const uint8_t*& line = codes[s / T];
                const auto units = units_of<U>(line, std::make_integer_sequence<int, T>());
                if (next.codes)
                    for (int i = 0; i < U::LINES; i++) __builtin_prefetch(line + ahead + i * 64, 0, 2);
                line += U::LINES * 64;
                for (int r = 0; r < R; r++) add_products(units.of, x.codes + int64_t(row + r) * k + at, sums[r][s / T]);
            }
        }
        for (int s = 0; s < S; s++) {
            vf scale, zero;
            if (next.codes && s % VECTORS == 0)
                __builtin_prefetch(w.scales_at((slice + s) / VECTORS) + g * w.group_bytes + later, 0, 2);
            w.load_scales(type, slice + s, g, float(midpoint_of(KIND)), factors[s], scale, zero);
            for (int r = 0; r < R; r++) {
                const int64_t at = (row + r) * row_groups + group + g;
                acc[r][s] = fma(__builtin_convertvector(sums[r][s / T][s % T], vf), scale * x.scales[at >> split], acc[r][s]);
                acc[r][s] = fma(zero, splat(row_sums[at]), acc[r][s]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) store(c + r * ldc + s * LANES, acc[r][s]);
}

template <int KIND, int TYPE, int S, int R>
static inline void packed_tile_of(
    int m, const Packed& w, int slice, const ActivationCodes& x, int row, int k, int group, float* c, int64_t ldc,
    Prefetch next) {
    if (m == R) {
        packed_tile<KIND, TYPE, R, S>(w, slice, x, row, k, group, c, ldc, next);
    } else if constexpr (R > 1) {
        packed_tile_of<KIND, TYPE, S, R - 1>(m, w, slice, x, row, k, group, c, ldc, next);
    }
}

// The number of slices of a tile with few or many rows, so that sums and codes fit the registers. Unpacking codes takes
// registers, too: those of 5 bits are unpacked for 32 inputs at once.
#if defined(WITH_DOTS)
constexpr int slices_of(int, bool few) { return few ? 4 : 2; }
#else
constexpr int slices_of(int kind, bool few) { return few || bits_of(kind) != 5 ? 2 : 1; }
#endif

// The products of m rows and blocks first … last - 1, tile by tile.
template <int KIND, int TYPE>
static void packed_tiles(
    const Packed& w, const ActivationCodes& x, int m, int k, int group, int first, int last, float* c, int64_t ldc,
    Prefetch next) {
    const int64_t bytes = w.block_bytes() * bits_of(KIND) / 8;
    for (int row = 0; row < m; row += TILE_ROWS, c += TILE_ROWS * ldc) {
        const int rows = std::min(TILE_ROWS, m - row);
        int slice = first * VECTORS;
        auto tiles = [&](auto slices, auto most) {
            constexpr int S = slices, WHOLE_BLOCKS = S > VECTORS ? S : VECTORS;  // slices, in whole blocks
            for (; slice + S <= last * VECTORS; slice += S) {
                const int block = (slice + WHOLE_BLOCKS) / VECTORS;
                packed_tile_of<KIND, TYPE, S, most>(
                    rows, w, slice, x, row, k, group, c + (slice - first * VECTORS) * LANES, ldc,
                    row || !next.codes || slice % VECTORS        ? Prefetch{}
                    : slice + WHOLE_BLOCKS + S <= last * VECTORS ? Prefetch{w.codes + block * bytes, w.scales_at(block)}
                                                                 : next);
            }
        };
        if (rows <= TILE_ROWS / 2) {
            tiles(std::integral_constant<int, slices_of(KIND, true)>(), std::integral_constant<int, TILE_ROWS / 2>());
        } else {
            tiles(std::integral_constant<int, slices_of(KIND, false)>(), std::integral_constant<int, TILE_ROWS>());
        }
        tiles(std::integral_constant<int, 1>(), std::integral_constant<int, TILE_ROWS>());
    }
}

// Unpack groups [from, to) of a block: codes to 8 bits, with a line for every 4 inputs, and scales and zeros to float32.
template <int KIND> static void unpack_block(const Packed& w, int block, int from, int to, uint8_t* codes, float* scales) {
    using U = Unit<KIND>;
    const uint8_t* block_codes = w.codes + block * (w.block_bytes() * bits_of(KIND) / 8);
    const uint8_t* at = block_codes + int64_t(from) * w.group * OUTPUTS * bits_of(KIND) / 8;
    Packed::SuperFactors factors[VECTORS];
    for (int g = from; g < to; g++, scales += 2 * OUTPUTS) {
        const bool starts = w.has_super(w.scale_type) && (g == from || w.is_super_start(g, w.scale_type));
        for (int s = 0; s < VECTORS; s++) {
            const int slice = block * VECTORS + s;
            vf scale, zero;
            if (starts) factors[s] = w.super_factors(slice, g);
            w.load_scales(w.scale_type, slice, g, float(midpoint_of(KIND)), factors[s], scale, zero);
            store(scales + s * LANES, scale), store(scales + OUTPUTS + s * LANES, zero);
        }
        for (int i = 0; i < w.group; i += U::INPUTS, at += U::LINES * 64, codes += U::N * 64)
            for (int s = 0; s < VECTORS; s++) {
                const U unit(at + s * LANES * 4);
                for (int quad = 0; quad < U::N; quad++) *(vq*)(codes + quad * 64 + s * LANES * 4) = unit.quads[quad];
            }
    }
}

#if defined(WITH_TILES)
// As `packed_tile`, for G * SIDE rows and one block, with tile instructions. Sums of codes are exact integers, so the result
// has the same bits.
template <int KIND, int G>
static inline void packed_amx_tile(const Packed& w, int block, const ActivationCodes& x, int row, int k, float* c, int64_t ldc) {
    const int groups = w.groups;
    const uint8_t* codes = w.codes + block * (w.block_bytes() * bits_of(KIND) / 8);
    vf acc[G * SIDE] = {};
    alignas(64) uint8_t unpacked[SIDE][64];
    alignas(64) int32_t sums[G * SIDE][SIDE];
    for (int g = 0; g < groups; g++) {
        unrolled<G>([&](auto s) { zero_tile<s>(); });
        for (int at = g * w.group; at < (g + 1) * w.group; at += TILE_CODES) {
            for (int i = 0; i < SIDE * bits_of(KIND) / 8; i++, codes += 64) {
                if (row == 0) __builtin_prefetch(codes + CODE_PREFETCH_BYTES / 4, 0, 2);
                if constexpr (bits_of(KIND) == 4) {
                    const Unit<KIND> unit(codes);
                    memcpy(unpacked[2 * i], unit.quads, sizeof unit.quads);
                }
            }
            load_tile<7>(bits_of(KIND) == 4 ? unpacked[0] : codes - SIDE * 64, 64);
            unrolled<G>([&](auto s) {
                load_tile<4 + s>(x.codes + int64_t(row + s * SIDE) * k + at, k);
                add_bytes<s, 4 + s, 7>();
            });
        }
        unrolled<G>([&](auto s) { store_tile<s>(sums[s * SIDE], sizeof sums[0]); });
        vf scale, zero;
        w.load_scales(w.scale_type, block, g, float(midpoint_of(KIND)), Packed::SuperFactors{}, scale, zero);
        for (int r = 0; r < G * SIDE; r++) {
            const int64_t at = int64_t(row + r) * groups + g;
            acc[r] = fma((vf)_mm512_cvtepi32_ps(_mm512_load_si512(sums[r])), scale * x.scales[at], acc[r]);
            acc[r] = fma(zero, splat(x.sums[at]), acc[r]);
        }
    }
    for (int r = 0; r < G * SIDE; r++) store(c + r * ldc, acc[r]);
}
#endif

// Call f(type) for each of the types, as a constant, and then for ANY.
template <int... TYPES, class F> static inline void for_each_type(F&& f) {
    (f(std::integral_constant<int, TYPES>()), ...), f(std::integral_constant<int, ANY>());
}

// The products of m rows and blocks first … last - 1, to C (m, 16 * (last - first)) with rows `ldc` apart. `next`: the blocks
// that this thread will probably use next. `scratch`: UNPACKED_BYTES bytes.
template <int KIND>
static void packed_products(
    const Packed& w, const ActivationCodes& x, int m, int first, int last, float* c, int64_t ldc, Prefetch next, void* scratch) {
#if defined(WITH_TILES)
    constexpr int BITS = bits_of(KIND);
    if (BITS % 4 == 0 && m >= 2 * TILE_ROWS && w.group % TILE_CODES == 0) {
        constexpr int WHOLE = BITS % 4 == 0 ? KIND : 8;  // tiles support no other codes; 8 only lets this compile
        for (int block = first; block < last; block++)
            for (int row = 0; row < m; row += 2 * SIDE) {
                float* to = c + row * ldc + (block - first) * OUTPUTS;
                if (m - row > SIDE) packed_amx_tile<WHOLE, 2>(w, block, x, row, w.n_in, to, ldc);
                else packed_amx_tile<WHOLE, 1>(w, block, x, row, w.n_in, to, ldc);
            }
        return;
    }
#endif
    if (m < min_rows_to_unpack(bits_of(KIND))) {
        // The scale types that files and drafts have for codes of this kind are compiled as constants.
        constexpr int WIDTH = bits_of(KIND), TABLE = table_of(KIND);
        constexpr int PLAIN = WIDTH == 8 ? CENTRED : SUPER_PAIRS;
        constexpr int USUAL = TABLE == E2M1 ? EXPONENTS : TABLE == IQ4 || WIDTH == 6 ? SUPER_CENTRED : PLAIN;
        constexpr int DRAFTS = TABLE || WIDTH % 4 ? USUAL : ZERO_VALUES;
        constexpr int BARE = TABLE == E2M1 || WIDTH == 6 ? USUAL : CENTRED, PLUS = !TABLE && WIDTH < 6 ? PAIRS : USUAL;
        bool done = false;
        for_each_type<USUAL, DRAFTS, BARE, PLUS>([&](auto type) {
            if (done || (type != ANY && type != w.scale_type)) return;
            packed_tiles<KIND, type>(w, x, m, w.n_in, 0, first, last, c, ldc, next), done = true;
        });
        return;
    }
    // Many rows: unpack a few blocks at a time, once for all rows.
    const int step = UNPACKED_INPUTS / w.group;
    for (int block = first; block < last; block += UNPACKED_BLOCKS) {
        const int n = std::min(UNPACKED_BLOCKS, last - block);
        for (int from = 0; from < w.groups; from += step) {
            Packed part = w;
            part.groups = std::min(step, w.groups - from), part.n_in = part.groups * w.group;
            part.scale_type = UNPACKED, part.group_bytes = 2 * OUTPUTS * sizeof(float);
            uint8_t* codes = (uint8_t*)scratch;
            float* scales = (float*)(codes + UNPACKED_BLOCKS * UNPACKED_INPUTS * OUTPUTS);
            for (int b = 0; b < n; b++)
                unpack_block<KIND>(w, block + b, from, from + part.groups, codes + b * part.block_bytes(),
                                   scales + b * part.groups * 2 * OUTPUTS);
            part.codes = codes, part.scales = (const uint8_t*)scales;
            packed_tiles<8, UNPACKED>(part, x, m, w.n_in, from, 0, n, c + (block - first) * OUTPUTS, ldc, {});
        }
    }
}
