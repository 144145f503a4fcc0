// Norms, activations and rounding of rows, value by value.
#pragma once
#include <cmath>
#include "layout.h"

namespace {

float gelu_erf(float x) {  // x * Phi(x); erf as in Abramowitz and Stegun 7.1.26, with an error of at most 1.5e-7
    const float z = std::fabs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    const float poly = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    float e[LANES];
    store(e, exp(splat(-z * z)));
    const float erf = 1.0f - poly * e[0];
    return 0.5f * x * (1.0f + (x < 0 ? -erf : erf));
}

vf blend(vi which, vf a, vf b) { return (vf)((which & (vi)a) | (~which & (vi)b)); }

vf smaller(vf a, vf b) { return blend(a < b, a, b); }

vf activated(vf x, const Mlp& mlp) {
    const int32_t kind = mlp.activation;
    if (kind == SILU) return x / (exp(-x) + 1.0f);
    if (kind == GELU_TANH) {  // x * sigmoid(2 u): 0.5 (1 + tanh u)
        const vf u = (x + x * x * x * 0.044715f) * 1.5957691216f;
        return x / (exp(-u) + 1.0f);
    }
    if (kind == RELU || kind == RELU_SQUARED) {
        const vf positive = (vf)((x > 0.0f) & (vi)x);
        return kind == RELU ? positive : positive * positive;
    }
    if (kind == XIELU) {  // arXiv:2411.13010
        const float* c = mlp.curve;
        const vf low = exp(blend(x < c[3], x, splat(c[3]))) - 1.0f - x;
        return blend(x > 0.0f, x * x * c[0], low * c[1]) + x * c[2];
    }
    if (kind == CLAMPED) {
        const vf low = smaller(x, splat(mlp.curve[0]));
        return low / (exp(low * -mlp.curve[1]) + 1.0f);
    }
    float lanes[LANES];
    store(lanes, x);
    for (float& lane : lanes) lane = gelu_erf(lane);
    return load((const float*)lanes);
}

// y = f(x) for n values, vector by vector. f also gets the index of a vector's first value. The last vector is padded.
template <class T, class F> void transform(int n, const T* x, T* y, F&& f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, f(load(x + i), i));
    if (i < n) {
        T from[LANES] = {}, to[LANES];
        memcpy(from, x + i, (n - i) * sizeof(T));
        store(to, f(load((const T*)from), i));
        memcpy(y + i, to, (n - i) * sizeof(T));
    }
}

template <class T> void round_to(T* to, const float* from, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = rounded<T>(from[i]);
}

template <class T> void normalise(const Norm& norm, const T* x, int n, T* y) {
    if (norm.kind == NO_NORM) {
        if (y != x) memcpy(y, x, n * sizeof(T));
        return;
    }
    const T *weight = (const T*)norm.weight, *bias = (const T*)norm.bias;
    float mean = 0;
    if (norm.kind == LAYER) {
        vf total = {};
        for (int i = 0; i < n; i += LANES) total += part_of(x, i, n);
        mean = sum(total) / float(n);
    }
    vf squares = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf d = load(x + i) - mean;
        squares = fma(d, d, squares);
    }
    float rest = 0;
    for (; i < n; i++) rest += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(n) + norm.eps);
    transform(n, x, y, [&](vf v, int at) {
        const vf w = part_of(weight, at, n);
        if (norm.kind == RMS) return as_stored<T>(v * scale) * w;
        if (norm.kind == RMS_WIDE) return v * scale * w;
        if (norm.kind == RMS_PLUS_ONE) return v * scale * (w + 1.0f);
        const vf scaled = (v - mean) * scale * w;
        return bias ? scaled + part_of(bias, at, n) : scaled;
    });
}

// The activation of n gates times `up`; without `up`, the activation alone.
template <class T> inline void apply_gate(const Mlp& mlp, const float* gate, const float* up, int n, T* to) {
    for (int at = 0; at < n; at += LANES) {
        vf before = as_stored<T>(part_of(gate, at, n));
        if (mlp.gate_scale != 1) before = as_stored<T>(before * mlp.gate_scale);
        vf a = as_stored<T>(activated(before, mlp));
        if (up) {
            vf factor = as_stored<T>(part_of(up, at, n));
            if (mlp.activation == CLAMPED)  // gpt-oss multiplies by clamp(up) + 1
                factor = as_stored<T>(smaller(larger(factor, splat(-mlp.curve[0])), splat(mlp.curve[0])) + 1.0f);
            a = a * factor;
        }
        if (at + LANES <= n) {
            store(to + at, a);
        } else {
            T values[LANES];
            store(values, a);
            memcpy(to + at, values, (n - at) * sizeof(T));
        }
    }
}

}  // namespace
