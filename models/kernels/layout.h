// Structures that describe a model's parts and a pass. Python fills them: `layout.py` has the same fields in the same order.
#pragma once
#include "mixture.h"

extern "C" {

struct Map {  // a linear map; `scales` null: `weight` is (n_out, n_in) of the model's type, else packed codes
    const void *weight, *bias, *scales;
    const int32_t* order;  // which of its inputs the codes are for, one after the other; null: they are in order
    int64_t stride;        // between the rows of `weight`
    int32_t n_in, n_out, bits, group, scale_type, table;
};

enum NormKind : int32_t { NO_NORM, RMS, RMS_PLUS_ONE, LAYER, RMS_WIDE };  // wide: rounded once, behind the weight
struct Norm {
    const void *weight, *bias;
    float eps;
    int32_t kind, step;  // `step`: between the weights of heads
};

// Before the rotation, head by head or all as one; or behind it; or of latents that heads are made of.
enum HeadNorm : int32_t { BY_HEAD, WHOLE, ROTATED, LATENT };
struct Attention {
    Norm before, after, query_norm, key_norm, value_norm, inner;  // inner: of what the heads read
    Map projections[3], out;
    // With LATENT: the map from the queries' latent (without inputs where they have none), and of each head those between what of
    // its query is not rotated, the latent of keys and values, and its output. `rotary` values are rotated. See `latents.h`.
    Map of_queries;
    const Map *of_keys, *of_values;
    int32_t n_projections, n_heads, n_kv_heads, width, rotary;
    // In the projections' outputs, or in what is made of latents, for each key head: its queries, which lie together, its key and
    // its value; without a step of values the key is the value, too.
    int32_t query_at, query_step, key_at, key_step, value_at, value_step;
    int32_t head_norm, gated;  // `gated`: behind each query lies a gate of its width
    int32_t reads_other;       // keys and values are another layer's, and none are written
    float scaling, softcap, clip;  // bounds of scores and of what the projections give, 0: none
    float added_scale;             // of what the residual stream gets
    const void* sinks;             // (n_heads,) scores that take a share of attention and read nothing; null: none

    // Values of a row that a head's map reads, with what tiles and groups read behind them.
    int64_t room() const { return (std::max(of_keys->n_in, of_values->n_in) + 127) / 128 * 128; }
};

struct Convolution {  // gated and short, in place of attention; `mixers.h`
    Norm before, after;
    Map into, out;            // to a gate, a second gate and values, one behind the other
    const float *taps, *bias;  // (n_taps, n_hidden), the newest token's last; bias null: none
    int32_t n_taps;
    float added_scale;
};

// How what heads read of a state is normed and gated: each head, or group of values, normed and then gated; or the other way
// round; or gated alone.
enum Gating : int32_t { GATED_BEHIND_NORM, GATED_BEFORE_NORM, GATED_ALONE };
struct Recurrence {  // a gated delta rule, or a state space, in place of attention or beside it; `mixers.h`
    Norm before, after;
    Map projections[4], out;
    // Where steps are those of values (Mamba-1): from convolved values to a step of low rank, a key and a query, the norms of
    // these, and the map from the first to a step for each value.
    Map low, steps;
    Norm low_norms[3];
    // The runs (place, length) of an update's inputs in the projections' outputs, one after the other; where each gate lies
    // there; and where each head's values lie in the inputs of `out`.
    const int32_t *runs, *gates, *places;
    const float *taps, *taps_bias;           // (n_taps, convolved), the newest token's last; (convolved,) or null: none
    const float *decay, *step_bias, *skip;   // (n_heads,) each; `skip` null: a delta rule, else a state space. Of a state space
                                             // with steps of values (n_heads, key_width, value_width), and by value
    const void* norm;                        // (value_width,) of a delta rule's heads, else of all values
    float norm_eps, least_step, largest_step, step_scale, gate_scale;
    float added_scale;  // of what the residual stream gets
    int32_t n_runs, n_projections, n_heads, n_key_heads, key_width, value_width, n_taps;
    int32_t n_numbers;  // of a head in a row's inputs, after queries, keys and values
    int32_t convolves_keys;  // 0: the convolution is of values alone, which come first; steps are those of values
    int32_t n_low;           // of the step of low rank that a row's inputs then end with
    int32_t gating, norm_width;

    int n_keys() const { return 2 * n_key_heads * key_width; }
    int n_convolved() const { return convolves_keys * n_keys() + n_heads * value_width; }
    int n_inputs() const { return n_keys() + n_heads * (value_width + n_numbers) + n_low; }
};

enum Activation : int32_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, XIELU, CLAMPED };
struct Mlp {
    Norm before, after, inner;
    Map in[2], out;  // gate and up, or one map (of gate and then up where `gated`)
    int32_t n_in_maps, gated, n_inner, activation;
    // Of XIELU: factors of the squares and of the exponentials, of x, and the largest exponent. Of CLAMPED: the bound of both
    // halves, and the factor in the sigmoid.
    float curve[4];
    float gate_scale, added_scale;  // of the gate, before the activation; of what the residual stream gets
};

struct Mixture {  // experts, of which each row takes some, in place of an MLP
    Norm before, after;
    const void* router;         // (n_experts, n_hidden), of floats where `wide_router`, else of the model's type
    const float *correction, *router_bias;  // (n_experts,) of scores where experts are chosen, of logits; null: none
    Map widest;                 // the most inputs of its maps; with codes or an order where one of them has
    const Map *in, *out;        // of each expert, then of the shared ones: `n_in_maps` each (gate and up, or both as one)
    const void* shared_gate;    // (n_hidden,): the shared output is multiplied by the sigmoid of this product; null: 1
    Choosing choosing;
    int32_t has_shared, wide_router, rounded_logits;
    int32_t weighs_inputs;      // weights of experts multiply what they read, and not what they give
    int32_t n_in_maps, n_inner, n_shared_inner;
    Mlp mlp;  // the activation of all of them; nothing else of it is used
    float shared_scale, added_scale;  // of the shared output, and of what the residual stream gets
    // Where experts, shared ones and the router each read the rows through a norm of their own, and their outputs have norms,
    // too: `before` is that of the experts. The router's has no weight but `weight`; its logits are times `logit_scale`.
    Norm router_before, shared_before, experts_after, shared_after;
    const float* expert_scale;  // (n_experts,), of the weights of chosen experts; null: 1
    float logit_scale;

    // Whether the router, experts and shared ones each have norms of their own.
    bool own_norms() const { return router_before.kind != NO_NORM; }
};

struct LayerEnd {  // after a layer's sub-layers: a term by the row's vector of this layer, and a scale; `ends.h`
    Norm after;
    Map gate, out;  // n_out of gate: values of a layer's vector, 0: there is no such term
    Mlp mlp;        // the activation; nothing else of it is used
    float scale;    // of the residual stream
};

struct LayerInputs {  // of vectors: a norm of what `map` makes of a row, plus what stands in the output already; `ends.h`
    Norm norm;
    Map map;  // to `width` values for each layer
    float map_scale, sum_scale;
    int32_t width;
};

enum StepKind : int32_t { ATTENTION, MLP, KEEP, LOGITS, MIXTURE, CONVOLUTION, RECURRENCE, LAYER_END, LAYER_INPUTS };
struct Step {
    const void* part;                   // a structure of the kind; of LOGITS a Map
    // `window`: of so many positions, the row's own the last, or where it is negative the row's chunk of as many; 0: none.
    // `rows`: which of the pass's lists of rows.
    int32_t kind, layer, window, rows;
    int32_t rotation;                   // which of the pass's tables, -1: none
    int32_t from_kept;                  // a part that reads what KEEP kept; of an MLP, a mixture or a recurrence
};

struct Rotation {
    const void *cos, *sin;    // (positions, width), the sine of the first of each pair negated
    const void* query_scale;  // (positions,) of the tables' type, null: 1
    int32_t width, pairs;     // `pairs`: neighbours; else values half of `width` apart
    int32_t wide;             // the tables are float, and products are not rounded
};

struct RowList {
    const int32_t* rows;  // null: all
    int64_t n;
};

struct Sequence {  // consecutive rows of a pass that have keys and values of their own
    const uint8_t* visible;             // (n_rows, first_slot + n_rows) or null
    void *const *keys, *const *values;    // per layer (kv_heads, capacity, width), or inputs of a convolution
    void *const *inputs, *const *states;  // per recurrent layer
    void *const *coded;  // per layer units (kv_heads, coded_units) of copies in 4 bits, see `coded_slots.h`
    int32_t* roots;  // of states, (layers, 2); null: there are none
    int64_t capacity;                   // slots of its buffer
    int64_t n_coded, coded_units;       // slots from 0 on that are read from copies; units that these have room for
    int32_t n_rows, first_slot;
    int32_t committed, n_kept, lag, is_text;  // see `RecurrentStates`
};

struct Pass {
    void* hidden;               // (n_rows, n_hidden), changed in place
    const int32_t* positions;   // (n_rows,)
    const Sequence* sequences;  // their rows in this order
    const RowList* lists;       // the rows of each in ascending order
    const Rotation* rotations;
    void* logits;  // (rows of the LOGITS step, n_out)
    void* inputs;  // (n_rows, n_inputs), vectors of all layers; null: there are none
    const Norm* norm;  // before LOGITS, null: none
    double* seconds;  // null, or where the seconds of each kind of work are added
    ExpertCounts* experts;  // null, or where the counts of each mixture are added
    int32_t n_rows, n_hidden, n_inputs, n_sequences, n_lists, n_threads, is_bf16;
};
enum Work : int32_t { MAPS, SLOTS, REST };  // linear maps; attention over the slots; norms, rotations, rounding
}  // extern "C"
