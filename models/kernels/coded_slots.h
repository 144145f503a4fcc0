// Copies of keys and values in 4 bits, which drafts read in long contexts. Only committed slots have copies.
//
// A unit has PLACES slots, in pieces of PIECE slots. In a piece each channel has a step and a middle: a number is
// (code - 8) * step + middle. Channels have their own steps because channels of keys differ by orders of magnitude, while slots
// hardly differ. Queries are multiplied by the steps of keys and then rounded to 8 bits for each piece. The probabilities of a
// piece's slots are rounded to 8 bits, too. Codes have the layout of weights (`codes.h`): keys in blocks of 16 slots, with
// channels as inputs; values in blocks of 16 channels, with slots as inputs.
// Source: steps by channel of keys: Liu et al., KIVI (arXiv:2402.02750). DEVIATION: values have steps by channel, too.
#pragma once
#include "attention.h"
#include "quantised.h"

constexpr int PIECE = 128;
constexpr int PIECES = PLACES / PIECE;  // of a unit
constexpr int CHANNELS = 32;            // channels that are coded together; a head's width must be a multiple of them
constexpr int MIDDLE = 8;               // code of the middle
constexpr int CODED_PREFETCH_BYTES = 24576;  // distance in bytes from codes in use to those that are prefetched

#if defined(WITH_DOTS)
constexpr int CODED_HEADS = 6, CODED_SLICES = 2;  // heads and slices whose sums fit the registers
#else
constexpr int CODED_HEADS = 3, CODED_SLICES = 2;
#endif

static inline int64_t piece_bytes(int width) { return 2 * width * int64_t(sizeof(bf16)) + PIECE / 2 * width; }
static inline int64_t unit_bytes(int width) { return 2 * PIECES * piece_bytes(width); }

// The keys, or else the values, of a piece.
struct Piece {
    bf16 *steps, *middles;  // of each channel
    uint8_t* codes;

    Piece(const uint8_t* unit, int width, bool of_values, int number) {
        steps = (bf16*)(unit + ((of_values ? PIECES : 0) + number) * piece_bytes(width));
        middles = steps + width, codes = (uint8_t*)(middles + width);
    }
    // Codes of 8 inputs for 16 outputs.
    uint8_t* line(int n_inputs, int block, int number) const { return codes + (block * (n_inputs / 8) + number) * 64; }
};

// The values of LANES columns of a slot from column i on, in the column order of `Word<T>`.
template <class T> static inline vf columns(const T* slot, int i) {
    if constexpr (Word<T>::PER == 1) return load(slot + i);
    vf value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = to_float(slot[Word<T>::channel(i + lane)]);
    return value;
}

// Code numbers (PIECE, CHANNELS) by steps and middles of their channels, which are stored in `to` from channel `first` on. Calls
// sink(column, code), where code(slot) computes the codes of LANES columns.
template <class F> static inline void code_columns(const float (*rows)[CHANNELS], int first, Piece to, F&& sink) {
    for (int i = 0; i < CHANNELS; i += LANES) {
        vf negated_low = splat(-INFINITY), high = negated_low;  // the lowest number, negated, and the highest
        for (int s = 0; s < PIECE; s++) {
            const vf x = load(rows[s] + i);
            negated_low = larger(-x, negated_low), high = larger(x, high);
        }
        const vf low = -negated_low, middle = as_stored<bf16>(low + (high - low) * (8 / 15.0f));
        // The step is a little larger than needed, so that codes reach both ends after rounding.
        const vf step = as_stored<bf16>(larger((high - middle) / 7.0f, (middle - low) / 8.0f) * (1 + 1 / 256.0f));
        store(to.steps + first + i, step), store(to.middles + first + i, middle);
        const vf inverse = 1.0f / larger(step, splat(1e-30f)), magic = splat(12582912.0f);  // as in `quantise`
        sink(i, [&](int s) {
            const vf x = larger((load(rows[s] + i) - middle) * inverse + float(MIDDLE), vf{});
            return (vu)((vi)(-larger(-x, splat(-15.0f)) + magic) - (vi)magic);
        });
    }
}

// Code PIECE slots of T.
template <class T> static void code_piece(const T* slots, int width, bool of_values, Piece to) {
    alignas(64) float rows[PIECE][CHANNELS];
    alignas(64) uint8_t codes[PIECE][CHANNELS];
    for (int first = 0; first < width; first += CHANNELS) {
        for (int s = 0; s < PIECE; s++)
            for (int i = 0; i < CHANNELS; i += LANES) {
                const T* slot = slots + int64_t(s) * width + first;
                store(rows[s] + i, of_values ? columns(slot, i) : load(slot + i));
            }
        if (of_values) {
            code_columns(rows, first, to, [&](int i, auto&& code) {
                for (int s = 0; s < PIECE; s += 8) {
                    vu words = {};  // a byte has the codes of two slots
                    for (int j = 0; j < 4; j++) words |= (code(s + j) | code(s + 4 + j) << 4) << (8 * j);
                    *(vu*)(to.line(PIECE, (first + i) / OUTPUTS, s / 8) + i % OUTPUTS * 4) = words;
                }
            });
        } else {
            code_columns(rows, first, to, [&](int i, auto&& code) {
                for (int s = 0; s < PIECE; s++) store_bytes(codes[s] + i, (vi)code(s));
            });
            for (int s = 0; s < PIECE; s++)
                for (int i = 0; i < CHANNELS; i += 8) {
                    const auto* quads = (const Word32*)(codes[s] + i);
                    *(Word32*)(to.line(width, s / OUTPUTS, (first + i) / 8) + s % OUTPUTS * 4) = quads[0] | quads[1] << 4;
                }
        }
    }
}

// Code a unit of a key head's slots.
template <class T> static void code_unit(const T* keys, const T* values, int width, uint8_t* unit) {
    for (int p = 0; p < PIECES; p++) {
        code_piece(keys + int64_t(p) * PIECE * width, width, false, Piece(unit, width, false, p));
        code_piece(values + int64_t(p) * PIECE * width, width, true, Piece(unit, width, true, p));
    }
}

// Call sink(row, slice, sums of products) for H rows of codes and S slices.
template <int H, int S, class F>
static inline __attribute__((always_inline)) void coded_tile(
    const Piece& piece, int slice, int n_inputs, const int8_t* rows, int h, F&& sink) {
    using U = Unit<4>;
    constexpr int T = S < VECTORS ? S : VECTORS;  // slices of a block
    vi sums[H][S / T][T] = {};
    for (int at = 0; at < n_inputs; at += U::INPUTS)
        for (int s = 0; s < S; s += T) {
            const uint8_t* line = piece.line(n_inputs, (slice + s) / VECTORS, at / 8) + (slice + s) % VECTORS * LANES * 4;
            __builtin_prefetch(line + CODED_PREFETCH_BYTES, 0, 2);
            const auto units = units_of<U>(line, std::make_integer_sequence<int, T>());
            for (int r = 0; r < H; r++) add_products(units.of, rows + int64_t(h + r) * n_inputs + at, sums[r][s / T]);
        }
    for (int r = 0; r < H; r++)
        for (int s = 0; s < S; s++) sink(h + r, slice + s, __builtin_convertvector(sums[r][s / T][s % T], vf));
}

template <int H, class F>
static inline void coded_tiles(int m, const Piece& piece, int n_slices, int n_inputs, const int8_t* rows, int h, F&& sink) {
    if (m < H) {
        if constexpr (H > 1) coded_tiles<H - 1>(m, piece, n_slices, n_inputs, rows, h, sink);
        return;
    }
    static_assert(PIECE / LANES % CODED_SLICES == 0 && CHANNELS / LANES % CODED_SLICES == 0, "tiles are whole");
    for (int slice = 0; slice < n_slices; slice += CODED_SLICES)
        coded_tile<H, CODED_SLICES>(piece, slice, n_inputs, rows, h, sink);
}

// The same for m rows and all slices.
template <class F>
static inline void coded_sums(int m, const Piece& piece, int n_slices, int n_inputs, const int8_t* rows, F&& sink) {
    for (int h = 0; h < m; h += CODED_HEADS)
        coded_tiles<CODED_HEADS>(std::min(CODED_HEADS, m - h), piece, n_slices, n_inputs, rows, h, sink);
}

// Scores of m heads' queries, `stride` floats stride, with the slots of a unit. `codes`: scratch for m rows of codes.
static void coded_scores(
    int m, const float* query, int64_t stride, const uint8_t* unit, int width, int8_t* codes, float* scores) {
    float scale[MAX_HEADS], offset[MAX_HEADS], scaled[MAX_HEAD_WIDTH], halves[2];
    for (int p = 0; p < PIECES; p++) {
        const Piece piece(unit, width, false, p);
        for (int h = 0; h < m; h++) {
            vf products = {};
            for (int i = 0; i < width; i += LANES) {
                const vf q = load(query + h * stride + i);
                products = fma(q, load(piece.middles + i), products);
                store(scaled + i, q * load(piece.steps + i));
            }
            quantise(scaled, width, width, codes + h * width, scale + h, offset + h, halves);
            offset[h] = sum(products) - MIDDLE * offset[h];
        }
        coded_sums(m, piece, PIECE / LANES, width, codes, [&](int h, int slice, vf sums) {
            store(scores + h * SCORE_STRIDE + p * PIECE + slice * LANES, fma(sums, splat(scale[h]), splat(offset[h])));
        });
    }
}

// Add the probabilities of a unit's slots (m, SCORE_STRIDE) times their values to `out`, whose rows are `stride` floats stride.
static void add_coded_values(
    int m, const float* probs, const uint8_t* unit, int width, int8_t* codes, float* out, int64_t stride) {
    float scale[MAX_HEADS], code_sums[MAX_HEADS], total[MAX_HEADS], halves[2];
    for (int p = 0; p < PIECES; p++) {
        const Piece piece(unit, width, true, p);
        for (int h = 0; h < m; h++) {
            const float* head_probs = probs + h * SCORE_STRIDE + p * PIECE;
            vf sums = {};
            for (int i = 0; i < PIECE; i += LANES) sums += load(head_probs + i);
            quantise(head_probs, PIECE, PIECE, codes + h * PIECE, scale + h, code_sums + h, halves);
            // The total is of unrounded probabilities: what rounding takes from small ones counts as reading the middle.
            total[h] = sum(sums), code_sums[h] *= MIDDLE;
        }
        coded_sums(m, piece, width / LANES, PIECE, codes, [&](int h, int slice, vf sums) {
            const int at = slice * LANES;
            const vf codes = fma(sums, splat(scale[h]), splat(-code_sums[h]));
            float* to = out + h * stride + at;
            store(to, fma(load(piece.steps + at), codes, fma(load(piece.middles + at), splat(total[h]), load(to))));
        });
    }
}
