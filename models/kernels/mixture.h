// Chooses the experts of a row by the router's scores.
#pragma once
#include "vec.h"

constexpr int MAX_EXPERTS = 1024;  // per layer

// The dot products of a row and N weights, `stride` values apart, each summed in an order that depends neither on other rows nor
// on N. Several weights share the conversion of the row, and their sums do not wait for each other. `ahead`: distance in values
// to the weights that are prefetched, 0: none are.
template <int N, class T, class W>
static inline void dots(const T* x, const W* weights, int64_t stride, int n, int64_t ahead, float* to) {
    vf sums[N][2] = {};
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const vf x0 = load(x + i), x1 = load(x + i + LANES);
        for (int w = 0; w < N; w++) {
            const W* weight = weights + w * stride + i;
            if (ahead)
                for (size_t at = 0; at < 2 * LANES * sizeof(W); at += 64)
                    __builtin_prefetch((const char*)(weight + ahead) + at, 0, 2);
            sums[w][0] = fma(x0, load(weight), sums[w][0]);
            sums[w][1] = fma(x1, load(weight + LANES), sums[w][1]);
        }
    }
    for (; i < n; i += LANES)
        for (int w = 0; w < N; w++) sums[w][0] = fma(part_of(x, i, n), part_of(weights + w * stride, i, n), sums[w][0]);
    for (int w = 0; w < N; w++) to[w] = sum(sums[w][0] + sums[w][1]);
}

struct Choice {  // an expert of a row, and the factor of its output
    int32_t expert;
    float weight;
};

// Scores of experts: the softmax of logits; their sigmoids; the scores of Phi's router, which chooses two experts by their logits
// (arXiv:2409.12136); or the sigmoids of the logits by which experts were chosen (Llama 4).
enum Scores : int32_t { SOFTMAX, SIGMOID, SPARSE_MIXER, LATE_SIGMOID };

// Counts of a pass, summed over its mixtures, without shared experts: `distinct` experts; experts `taken` by rows after the first
// of their sequence; and those of them that the row before had also taken (`repeated`).
struct ExpertCounts {
    int64_t mixtures, distinct, taken, repeated;
};

// The number of experts that two rows share; choices are in ascending order.
static inline int64_t common(const Choice* a, const Choice* b, int n) {
    int64_t n_common = 0;
    for (int i = 0, j = 0; i < n && j < n;) {
        if (a[i].expert == b[j].expert) n_common++, i++, j++;
        else if (a[i].expert < b[j].expert) i++;
        else j++;
    }
    return n_common;
}

struct Routing {  // how experts are chosen by scores
    int32_t n_experts, n_chosen, n_groups, n_groups_chosen;
    int32_t scores, normalised;   // one of Scores; whether weights are divided by their sum
    int32_t n_best;               // a group's score is the sum of its best scores, one or two
    float min_sum, scale;         // lower bound of the sum that weights are divided by; factor of weights after that
    float jitter;                 // of SPARSE_MIXER: experts whose logit is relatively further from the best are left out
};

// Choose the two best experts of a row by their logits, in ascending order. A weight is the expert's share in the exponentials
// of experts whose logits are near its own; for the second one, the best is left out.
static inline void choose_sparse_mixer(const Routing& routing, const float* logits, Choice* choices) {
    int first = -1;
    for (int choice = 0; choice < 2; choice++) {
        int best = -1;
        for (int e = 0; e < routing.n_experts; e++)
            if (e != first && (best < 0 || logits[e] > logits[best])) best = e;
        float total = 0;
        for (int e = 0; e < routing.n_experts; e++) {
            const float gap = logits[best] - logits[e];
            const bool is_near = !(gap / std::max(std::fabs(logits[e]), logits[best]) > 2 * routing.jitter);
            if (e != first && is_near) total += std::exp(-gap);
        }
        choices[choice] = {best, 1.0f / total};
        first = best;
    }
    if (choices[0].expert > choices[1].expert) std::swap(choices[0], choices[1]);
}

// Choose the experts of a row, in ascending order. `scores`: logits, overwritten. `correction`: added to scores only to choose,
// null: nothing. `rank_scores` and `groups`: scratch for n_experts
// and n_groups values. Of equal scores, the first expert is chosen.
static inline void choose(
    const Routing& routing, float* scores, const float* correction, float* rank_scores, float* groups, Choice* choices) {
    const int n = routing.n_experts;
    if (routing.scores == SPARSE_MIXER) return choose_sparse_mixer(routing, scores, choices);
    const bool late = routing.scores == LATE_SIGMOID;
    if (late) std::copy(scores, scores + n, rank_scores);
    if (routing.scores == SIGMOID || late) {
        for (int e = 0; e < n; e++) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    } else {
        float largest = scores[0], total = 0;
        for (int e = 1; e < n; e++) largest = std::max(largest, scores[e]);
        for (int e = 0; e < n; e++) total += scores[e] = std::exp(scores[e] - largest);
        for (int e = 0; e < n; e++) scores[e] /= total;
    }
    for (int e = 0; e < n && !late; e++) rank_scores[e] = correction ? scores[e] + correction[e] : scores[e];
    if (routing.n_groups > 1 && routing.n_groups_chosen < routing.n_groups) {
        const int size = n / routing.n_groups;
        for (int g = 0; g < routing.n_groups; g++) {
            float best = -INFINITY, next = -INFINITY;
            for (int e = g * size; e < (g + 1) * size; e++) {
                if (rank_scores[e] > best) next = best, best = rank_scores[e];
                else next = std::max(next, rank_scores[e]);
            }
            groups[g] = size > 1 && routing.n_best > 1 ? best + next : best;
        }
        for (int left = routing.n_groups - routing.n_groups_chosen; left > 0; left--) {
            int worst = -1;  // of equal groups, the last one is left out
            for (int g = 0; g < routing.n_groups; g++)
                if (groups[g] < INFINITY && (worst < 0 || groups[g] <= groups[worst])) worst = g;
            if (worst < 0) break;
            groups[worst] = INFINITY;
            for (int e = worst * size; e < (worst + 1) * size; e++) rank_scores[e] = -INFINITY;
        }
    }
    bool in_use[MAX_EXPERTS] = {};
    for (int i = 0; i < routing.n_chosen; i++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!in_use[e] && (best < 0 || rank_scores[e] > rank_scores[best])) best = e;
        in_use[best] = true;
    }
    float total = 0;
    int n_listed = 0;
    for (int e = 0; e < n; e++)
        if (in_use[e]) choices[n_listed++] = {e, scores[e]}, total += scores[e];
    const float divisor = routing.normalised ? std::max(total, routing.min_sum) : 1.0f;
    for (int i = 0; i < routing.n_chosen; i++) choices[i].weight = choices[i].weight / divisor * routing.scale;
}
