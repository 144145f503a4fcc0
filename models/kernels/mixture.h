// The choice of experts for a row, and which rows each expert computes.
#pragma once
#include "vec.h"

constexpr int MOST_EXPERTS = 1024;  // of a layer

// Sums over a row of what it has times a weight, in one order whatever rows are beside it. `ahead`: values from a weight to one
// that is asked for, 0: none is.
template <class T, class W> static inline float dot(const T* x, const W* weight, int n, int ahead = 0) {
    vf sums[2] = {};
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        if (ahead)
            for (size_t at = 0; at < 2 * LANES * sizeof(W); at += 64) __builtin_prefetch((const char*)(weight + i + ahead) + at, 0, 2);
        sums[0] = fma(load(x + i), load(weight + i), sums[0]);
        sums[1] = fma(load(x + i + LANES), load(weight + i + LANES), sums[1]);
    }
    for (; i < n; i += LANES) sums[0] = fma(part_of(x, i, n), part_of(weight, i, n), sums[0]);
    return sum(sums[0] + sums[1]);
}

struct Choice {  // of an expert by a row, and what its output is multiplied by
    int32_t expert;
    float weight;
};

// Scores of experts: the softmax of logits, or their sigmoids; or logits by which Phi's router chooses two (arXiv:2409.12136);
// or sigmoids of those that are chosen by logits.
enum Scores : int32_t { SOFTMAX, SIGMOID, SPARSE_MIXER, LATE_SIGMOID };

// What rows took in a pass, over its mixtures: for each the number of distinct experts, shared ones not counted. Of rows
// behind another row of their sequence: how many experts they took, and how many of these the row before took, too.
struct ExpertCounts {
    int64_t mixtures, distinct, taken, repeated;
};

// How many experts two rows have in common; their choices are in ascending order.
static inline int64_t common(const Choice* a, const Choice* b, int n) {
    int64_t found = 0;
    for (int i = 0, j = 0; i < n && j < n;) {
        if (a[i].expert == b[j].expert) found++, i++, j++;
        else if (a[i].expert < b[j].expert) i++;
        else j++;
    }
    return found;
}

struct Choosing {  // how experts are chosen by scores
    int32_t n_experts, n_chosen, n_groups, n_groups_chosen;
    int32_t scores, normalised;   // what scores are; weights are divided by their sum
    int32_t n_best;               // a group's score: the sum of its best, one or two
    float least, scale;           // the least sum that they are divided by; what they are then multiplied by
    float jitter;                 // of SPARSE_MIXER: half the largest share by which an expert counts beside the best
};

// The two best experts of one row by their logits, in ascending order. The weight of each is its share of the exponentials of
// those that are nearly as good, the best not among them for the second.
static inline void mix_sparsely(const Choosing& how, const float* logits, Choice* choices) {
    int first = -1;
    for (int turn = 0; turn < 2; turn++) {
        int best = -1;
        for (int e = 0; e < how.n_experts; e++)
            if (e != first && (best < 0 || logits[e] > logits[best])) best = e;
        float total = 0;
        for (int e = 0; e < how.n_experts; e++) {
            const float behind = logits[best] - logits[e];
            const bool is_near = !(behind / std::max(std::fabs(logits[e]), logits[best]) > 2 * how.jitter);
            if (e != first && is_near) total += std::exp(-behind);
        }
        choices[turn] = {best, 1.0f / total};
        first = best;
    }
    if (choices[0].expert > choices[1].expert) std::swap(choices[0], choices[1]);
}

// The experts of one row, in ascending order. `scores`: logits, overwritten. `correction`: added where experts are chosen,
// null: nothing. `taken` and `groups`: room for n_experts and n_groups values. Of equal scores the first expert's counts.
static inline void choose(
    const Choosing& how, float* scores, const float* correction, float* taken, float* groups, Choice* choices) {
    const int n = how.n_experts;
    if (how.scores == SPARSE_MIXER) return mix_sparsely(how, scores, choices);
    const bool late = how.scores == LATE_SIGMOID;
    if (late) std::copy(scores, scores + n, taken);
    if (how.scores == SIGMOID || late) {
        for (int e = 0; e < n; e++) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    } else {
        float largest = scores[0], total = 0;
        for (int e = 1; e < n; e++) largest = std::max(largest, scores[e]);
        for (int e = 0; e < n; e++) total += scores[e] = std::exp(scores[e] - largest);
        for (int e = 0; e < n; e++) scores[e] /= total;
    }
    for (int e = 0; e < n && !late; e++) taken[e] = correction ? scores[e] + correction[e] : scores[e];
    if (how.n_groups > 1 && how.n_groups_chosen < how.n_groups) {
        const int size = n / how.n_groups;
        for (int g = 0; g < how.n_groups; g++) {
            float best = -INFINITY, next = -INFINITY;
            for (int e = g * size; e < (g + 1) * size; e++) {
                if (taken[e] > best) next = best, best = taken[e];
                else next = std::max(next, taken[e]);
            }
            groups[g] = size > 1 && how.n_best > 1 ? best + next : best;
        }
        for (int left = how.n_groups - how.n_groups_chosen; left > 0; left--) {
            int worst = -1;  // of equal groups the last one goes
            for (int g = 0; g < how.n_groups; g++)
                if (groups[g] < INFINITY && (worst < 0 || groups[g] <= groups[worst])) worst = g;
            if (worst < 0) break;
            groups[worst] = INFINITY;
            for (int e = worst * size; e < (worst + 1) * size; e++) taken[e] = -INFINITY;
        }
    }
    bool in_use[MOST_EXPERTS] = {};
    for (int i = 0; i < how.n_chosen; i++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!in_use[e] && (best < 0 || taken[e] > taken[best])) best = e;
        in_use[best] = true;
    }
    float total = 0;
    int found = 0;
    for (int e = 0; e < n; e++)
        if (in_use[e]) choices[found++] = {e, scores[e]}, total += scores[e];
    const float by = how.normalised ? std::max(total, how.least) : 1.0f;
    for (int i = 0; i < how.n_chosen; i++) choices[i].weight = choices[i].weight / by * how.scale;
}
