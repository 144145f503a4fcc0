// The end of a layer after its sub-layers, and the per-layer inputs that it reads (Gemma 4); a part of `pass.cpp`.
#pragma once
#include "runner.h"

namespace {

template <class T>
void Runner<T>::layer_end(const Step& step, const LayerEnd& part, const RowList& list, int thread) {
    const int n = part.gate.n_out;
    if (n) {
        const Norm none{};
        project(&part.gate, 1, normed_input(none, list, (const T*)pass_.hidden, &part.gate, 1, thread), list, thread);
        parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            const T* input = (const T*)pass_.inputs + int64_t(row_of(list, i)) * pass_.n_inputs + int64_t(step.layer) * n;
            transform(n, inner_ + i * n, inner_ + i * n, [&](vf v, int at) {
                return as_stored<T>(activated(v, part.mlp)) * part_of(input, at, n);
            });
        });
        add_to_residual(part.out, part.after, 1, map_input(inner_, part.out, list.n, thread), list, thread);
    }
    if (part.scale != 1)
        parallel_for(REST, thread, list.n, 1, [&](int64_t i, int64_t) {
            T* x = hidden(row_of(list, i));
            transform(pass_.n_hidden, x, x, [&](vf v, int) { return v * part.scale; });
        });
}

template <class T> void Runner<T>::layer_inputs(const LayerInputs& part, const RowList& list, int thread) {
    const int total = part.map.n_out, width = part.width;
    const Norm none{};
    project(&part.map, 1, normed_input(none, list, (const T*)pass_.hidden, &part.map, 1, thread), list, thread);
    parallel_for(REST, thread, list.n * (total / width), 16, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; item++) {
            T *x = inner_ + item * width, *to = (T*)pass_.inputs + item * width;
            transform(width, x, x, [&](vf v, int) { return v * part.map_scale; });
            normalise(part.norm, x, width, x);
            transform(width, x, to, [&](vf v, int at) { return as_stored<T>(v + part_of(to, at, width)) * part.sum_scale; });
        }
    });
}

}  // namespace
