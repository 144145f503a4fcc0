// Codes of 13 bits for the values of a row that a Mamba-1 layer keeps; a part of `pass.cpp`. `models/coded_values.py` says why
// and how they are laid out.
#pragma once
#include "vec.h"

namespace {

constexpr int EXPONENT_STEPS = 31;  // steps between the largest exponent of a row and the exponent just below code 1

static inline int exponent_of(bf16 value) { return value.bits >> 7 & 0xff; }

// The exponent just below code 1 of a row.
static inline int base_of(const bf16* values, int n) {
    int largest = 0;
    for (int i = 0; i < n; i++) largest = std::max(largest, exponent_of(values[i]));
    return std::max(0, largest - EXPONENT_STEPS);
}

static inline void trim(bf16* values, int n) {
    const int base = base_of(values, n);
    if (base == 0) return;
    for (int i = 0; i < n; i++) values[i].bits &= exponent_of(values[i]) > base ? 0xffff : 0x8000;
}

// Code `n` trimmed values, a multiple of 16.
static inline void code_values(const bf16* values, int n, uint16_t* to) {
    const int base = base_of(values, n), half = n / 2, eighth = n / 8;
    uint8_t *rest = (uint8_t*)(to + 1), *low = rest + n, *high = low + half;
    *to = uint16_t(base);
    auto code = [&](int i) { return std::max(0, exponent_of(values[i]) - base); };
    for (int i = 0; i < n; i++) rest[i] = uint8_t((values[i].bits >> 8 & 0x80) | (values[i].bits & 0x7f));
    for (int i = 0; i < half; i++) low[i] = uint8_t((code(i) & 15) | (code(half + i) & 15) << 4);
    memset(high, 0, eighth);
    for (int bit = 0; bit < 8; bit++)
        for (int i = 0; i < eighth; i++) high[i] |= uint8_t((code(bit * eighth + i) >> 4) << bit);
}

static inline void decode_values(const uint16_t* from, int n, bf16* values) {
    const int base = *from, half = n / 2, eighth = n / 8;
    const uint8_t *rest = (const uint8_t*)(from + 1), *low = rest + n, *high = low + half;
    for (int bit = 0; bit < 8; bit++) {
        const uint8_t *four = low + bit % 4 * eighth, *others = rest + bit * eighth;
        const int shift = bit / 4 * 4;
        for (int i = 0; i < eighth; i++) {
            const int code = (four[i] >> shift & 15) | (high[i] >> bit & 1) << 4;
            const int exponent = code ? code + base : 0;
            values[bit * eighth + i].bits = uint16_t((others[i] & 0x80) << 8 | exponent << 7 | (others[i] & 0x7f));
        }
    }
}

}  // namespace
