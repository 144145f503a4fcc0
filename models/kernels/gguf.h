// Packs weights of GGUF files for `quantised.h`, and de-quantises packed weights.
//
// A block of a file has the codes of some inputs of one output, and their scales, in the layouts of ggml's quants.h.
#pragma once
#include "quantised.h"

// An unpacked block of a file. A weight is (code - middle) * scale, code * scale + m, or, with scales for each group,
// code * d * scale - m * min.
struct Decoded {
    uint8_t codes[SUPER];
    uint16_t d, m;  // float16: factors of scales and of minimums
    uint8_t scales[SUPER / 16], mins[SUPER / 16];
};

// A type of tensors: its number in files, the bytes and inputs of a block, and the packed form.
struct GgufType {
    int number, bytes, inputs, bits, group;
    ScaleType scale_type;
    Table table;
    void (*decode)(const uint8_t* from, Decoded& to);
};

static inline uint16_t half_at(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return bits;
}

// Unpack 32 codes from 16 bytes: byte i has code i in its low half, and code i + 16 in its high half. `upper`: the fifth bits.
static inline void decode_halves(const uint8_t* from, uint8_t* codes, uint32_t upper = 0) {
    for (int i = 0; i < 16; i++) {
        codes[i] = (from[i] & 15) | (upper >> i & 1) << 4;
        codes[i + 16] = from[i] >> 4 | (upper >> (i + 16) & 1) << 4;
    }
}

static void decode_q4_0(const uint8_t* from, Decoded& to) { to.d = half_at(from), decode_halves(from + 2, to.codes); }
static void decode_q4_1(const uint8_t* from, Decoded& to) {
    to.d = half_at(from), to.m = half_at(from + 2), decode_halves(from + 4, to.codes);
}
static void decode_q5_0(const uint8_t* from, Decoded& to) {
    uint32_t upper;
    memcpy(&upper, from + 2, 4);
    to.d = half_at(from), decode_halves(from + 6, to.codes, upper);
}
static void decode_q5_1(const uint8_t* from, Decoded& to) {
    uint32_t upper;
    memcpy(&upper, from + 4, 4);
    to.d = half_at(from), to.m = half_at(from + 2), decode_halves(from + 8, to.codes, upper);
}
static void decode_q8_0(const uint8_t* from, Decoded& to) {
    to.d = half_at(from);
    for (int i = 0; i < 32; i++) to.codes[i] = from[2 + i] ^ 128;
}

static void decode_iq4_xs(const uint8_t* from, Decoded& to) {
    const int high = half_at(from + 2);
    to.d = half_at(from);
    for (int g = 0; g < 8; g++) {
        to.scales[g] = uint8_t(((from[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4) - 32);
        decode_halves(from + 8 + 16 * g, to.codes + 32 * g);
    }
}
static void decode_mxfp4(const uint8_t* from, Decoded& to) { to.scales[0] = from[0], decode_halves(from + 1, to.codes); }
// Checkpoints of gpt-oss store a scale byte, and then bytes with two consecutive codes each, the first in the low half.
static void decode_mxfp4_pairs(const uint8_t* from, Decoded& to) {
    to.scales[0] = from[0];
    for (int i = 0; i < 16; i++) to.codes[2 * i] = from[1 + i] & 15, to.codes[2 * i + 1] = from[1 + i] >> 4;
}

static void decode_q2_k(const uint8_t* from, Decoded& to) {
    for (int g = 0; g < 16; g++) to.scales[g] = from[g] & 15, to.mins[g] = from[g] >> 4;
    for (int i = 0; i < SUPER; i++) to.codes[i] = from[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
    to.d = half_at(from + 80), to.m = half_at(from + 82);
}
static void decode_q3_k(const uint8_t* from, Decoded& to) {
    const uint8_t *upper = from, *lower = from + 32, *scales = from + 96;
    for (int i = 0; i < SUPER; i++) {
        const int low = lower[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        to.codes[i] = uint8_t(low + (upper[i % 32] >> i / 32 & 1 ? 8 : 4));
    }
    for (int g = 0; g < 16; g++) {
        const int low = scales[g % 8] >> g / 8 * 4 & 15, high = scales[8 + g % 4] >> g / 4 * 2 & 3;
        to.scales[g] = uint8_t((low | high << 4) - 32);
    }
    to.d = half_at(from + 108);
}
// Unpack the scales and minimums of eight groups, 6 bits each, from 12 bytes.
static inline void decode_pairs(const uint8_t* from, Decoded& to) {
    to.d = half_at(from), to.m = half_at(from + 2), from += 4;
    for (int g = 0; g < 4; g++) {
        to.scales[g] = from[g] & 63, to.mins[g] = from[4 + g] & 63;
        to.scales[4 + g] = (from[8 + g] & 15) | (from[g] >> 6) << 4;
        to.mins[4 + g] = from[8 + g] >> 4 | (from[4 + g] >> 6) << 4;
    }
}
// Unpack 256 codes: each 32 bytes have 32 codes in their low halves, and the next 32 in their high halves.
static inline void decode_runs(const uint8_t* from, uint8_t* codes) {
    for (int run = 0; run < 4; run++)
        for (int i = 0; i < 32; i++) {
            codes[64 * run + i] = from[32 * run + i] & 15, codes[64 * run + 32 + i] = from[32 * run + i] >> 4;
        }
}
static void decode_q4_k(const uint8_t* from, Decoded& to) { decode_pairs(from, to), decode_runs(from + 16, to.codes); }
static void decode_q5_k(const uint8_t* from, Decoded& to) {
    decode_pairs(from, to), decode_runs(from + 48, to.codes);
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++) to.codes[32 * g + i] |= (from[16 + i] >> g & 1) << 4;
}
static void decode_q6_k(const uint8_t* from, Decoded& to) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 64; i++) {
            uint8_t* codes = to.codes + 128 * half + i;
            codes[0] = from[64 * half + i] & 15, codes[64] = from[64 * half + i] >> 4;
        }
    for (int i = 0; i < SUPER; i++) to.codes[i] |= (from[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
    memcpy(to.scales, from + 192, 16);
    to.d = half_at(from + 208);
}

constexpr int CHECKPOINT_MXFP4 = 1039;  // not a GGUF type: MXFP4 blocks of gpt-oss's checkpoints, each after its scale
static const GgufType GGUF_TYPES[] = {
    {2, 18, 32, 4, 32, CENTRED, NUMBERS, decode_q4_0},
    {3, 20, 32, 4, 32, PAIRS, NUMBERS, decode_q4_1},
    {6, 22, 32, 5, 32, CENTRED, NUMBERS, decode_q5_0},
    {7, 24, 32, 5, 32, PAIRS, NUMBERS, decode_q5_1},
    {8, 34, 32, 8, 32, CENTRED, NUMBERS, decode_q8_0},
    {10, 84, SUPER, 4, 16, SUPER_PAIRS, NUMBERS, decode_q2_k},
    {11, 110, SUPER, 4, 16, SUPER_CENTRED, NUMBERS, decode_q3_k},
    {12, 144, SUPER, 4, 32, SUPER_PAIRS, NUMBERS, decode_q4_k},
    {13, 176, SUPER, 5, 32, SUPER_PAIRS, NUMBERS, decode_q5_k},
    {14, 210, SUPER, 6, 16, SUPER_CENTRED, NUMBERS, decode_q6_k},
    {20, 18, 32, 4, 32, CENTRED, IQ4, decode_q4_0},
    {23, 136, SUPER, 4, 32, SUPER_CENTRED, IQ4, decode_iq4_xs},
    {39, 17, 32, 4, 32, EXPONENTS, E2M1, decode_mxfp4},
    {CHECKPOINT_MXFP4, 17, 32, 4, 32, EXPONENTS, E2M1, decode_mxfp4_pairs},
};

static const GgufType* gguf_type(int number) {
    for (const GgufType& type : GGUF_TYPES)
        if (type.number == number) return &type;
    return nullptr;
}

// Write the codes of n inputs, whole units, of a block's outputs as lines (`codes.h`).
template <int BITS> static void write_lines(const Decoded* outputs, int n, uint8_t* to) {
    constexpr int MORE = BITS - 4, N = Unit<BITS>::N;
    auto quad = [&](int output, int i) {
        uint32_t word;
        memcpy(&word, outputs[output].codes + 4 * i, 4);
        return word;
    };
    uint32_t words[OUTPUTS];
    auto put = [&] { memcpy(to, words, sizeof words), to += sizeof words; };
    for (int first = 0; first < n / 4; first += N) {
        for (int i = first; i < first + N; i += BITS == 8 ? 1 : 2) {
            for (int o = 0; o < OUTPUTS; o++)
                words[o] = BITS == 8 ? quad(o, i) : (quad(o, i) & 0x0f0f0f0f) | (quad(o, i + 1) & 0x0f0f0f0f) << 4;
            put();
        }
        if (BITS % 4 == 0) continue;
        for (int o = 0; o < OUTPUTS; o++) {
            words[o] = 0;
            for (int i = 0; i < N; i++) words[o] |= (quad(o, first + i) >> 4 & 0x0f0f0f0f) << i * MORE;
        }
        put();
    }
}

static void write_codes(int bits, const Decoded* outputs, int n, uint8_t* to) {
    if (bits == 4) write_lines<4>(outputs, n, to);
    else if (bits == 5) write_lines<5>(outputs, n, to);
    else if (bits == 6) write_lines<6>(outputs, n, to);
    else write_lines<8>(outputs, n, to);
}

static void write_scales(const GgufType& type, const Decoded* outputs, uint8_t* to) {
    auto put = [&](auto part) {
        for (int o = 0; o < OUTPUTS; o++) {
            const auto number = part(outputs[o]);
            memcpy(to, &number, sizeof number), to += sizeof number;
        }
    };
    if (type.scale_type == EXPONENTS) return put([](const Decoded& output) { return output.scales[0]; });
    const bool pairs = type.scale_type == PAIRS || type.scale_type == SUPER_PAIRS;
    put([](const Decoded& output) { return output.d; });
    if (pairs) put([](const Decoded& output) { return output.m; });
    if (type.scale_type < SUPER_PAIRS) return;
    for (int g = 0; g < SUPER / type.group; g++) {
        put([g](const Decoded& output) { return output.scales[g]; });
        if (pairs) put([g](const Decoded& output) { return output.mins[g]; });
    }
}

// Pack one block of outputs. `rows`: the file's data for each; null after the last output: weights of 0.
static void repack_block(const GgufType& type, const uint8_t* const* rows, const Packed& to, int block) {
    const int n_blocks = to.n_in / type.inputs;
    uint8_t* codes = (uint8_t*)to.codes + block * (to.block_bytes() * type.bits / 8);
    uint8_t* scales = (uint8_t*)to.scales + int64_t(block) * to.groups * to.group_bytes;
    Decoded outputs[OUTPUTS] = {};
    for (int b = 0; b < n_blocks; b++) {
        for (int o = 0; o < OUTPUTS; o++)
            if (rows[o]) type.decode(rows[o] + int64_t(b) * type.bytes, outputs[o]);
        write_codes(type.bits, outputs, type.inputs, codes);
        write_scales(type, outputs, scales);
        codes += type.inputs * OUTPUTS * type.bits / 8, scales += type.inputs / type.group * to.group_bytes;
    }
}

// De-quantise the weights of one output; each is rounded once.
template <int KIND> static void dequantise(const Packed& from, int64_t output, float* to) {
    using U = Unit<KIND>;
    const int block = int(output / OUTPUTS), slice = int(output / LANES), lane = int(output % LANES);
    const uint8_t* codes = from.codes + block * (from.block_bytes() * bits_of(KIND) / 8) + slice % VECTORS * LANES * 4;
    float scales[LANES], zeros[LANES];
    for (int g = 0; g < from.groups; g++) {
        vf scale, zero;
        const auto factors = from.has_super(from.scale_type) ? from.super_factors(slice, g) : Packed::SuperFactors{};
        from.load_scales(from.scale_type, slice, g, float(midpoint_of(KIND)), factors, scale, zero);
        store(scales, scale), store(zeros, zero);
        for (int at = 0; at < from.group; at += U::INPUTS, codes += U::LINES * 64) {
            const U unit(codes);
            for (int i = 0; i < U::INPUTS; i++) {
                const uint8_t code = ((const uint8_t*)&unit.quads[i / 4])[4 * lane + i % 4];
                *to++ = std::fma(scales[lane], float(code), zeros[lane]);
            }
        }
    }
}
