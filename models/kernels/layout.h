// Structures that describe a model's parts and a pass. Python fills them; `layout.py` has the same fields in the same order.
#pragma once
#include "mixture.h"

extern "C" {

struct Map {  // a linear map; without `scales`, `weight` is (n_out, n_in) in the model's type, else it has packed codes
    const void *weight, *bias, *scales;
    const int32_t* order;  // the input of each column of codes; null: they are in order
    int64_t stride;        // values between the rows of `weight`
    int32_t n_in, n_out, bits, group, scale_type, table;
};

enum NormKind : int32_t { NO_NORM, RMS, RMS_PLUS_ONE, LAYER, RMS_WIDE };  // RMS_WIDE rounds only after the weight
struct Norm {
    const void *weight, *bias;
    float eps;
    int32_t kind, step;  // `step`: values between the weights of heads
};

// What the norms of queries and keys apply to: each head before the rotation, all heads as one before it, each head after it, or
// latents.
enum HeadNorm : int32_t { BY_HEAD, WHOLE, ROTATED, LATENT };
struct Attention {
    Norm before, after, query_norm, key_norm, value_norm, inner;  // `inner`: of the heads' outputs
    Map projections[3], out;
    // With LATENT (see `latents.h`): the map from the queries' latent (n_in 0: queries have no latent), and for each head a map
    // from the unrotated part of its query to the latent of keys and values, and one from that latent to its output. The first
    // `rotary` values of queries and keys are rotated.
    Map query_map;
    const Map *key_maps, *value_maps;
    int32_t n_projections, n_heads, n_kv_heads, width, rotary;
    // Offset and step by key head, in the projections' outputs or in the heads made of latents: of its queries, which are
    // adjacent, its key and its value. With a `value_step` of 0 the key is also the value.
    int32_t query_at, query_step, key_at, key_step, value_at, value_step;
    int32_t head_norm, gated;  // `gated`: each query is followed by a gate of its width
    int32_t reads_shared_kv;   // the layer reads another layer's keys and values, and writes none
    float scaling, softcap, clip;  // factor and bound of scores, bound of the projections' outputs; bound 0: none
    float added_scale;             // factor of what is added to the residual stream
    const void* sinks;             // (n_heads,) scores without a value, which only enlarge the softmax's sum; null: none

    // Values in a row of a head's map, with the padding that tiles and groups read.
    int64_t padded_width() const { return (std::max(key_maps->n_in, value_maps->n_in) + 127) / 128 * 128; }
};

struct Convolution {  // a gated short convolution in place of attention; `mixers.h`
    Norm before, after;
    Map into, out;            // `into`: to an input gate, an output gate and values
    const float *taps, *bias;  // (n_taps, n_hidden), the newest token's last; bias null: none
    int32_t n_taps;
    float added_scale;
};

// How the output of a state is normed and gated, by head or by group of values: the gate after the norm, before it, or
// without a norm.
enum Gating : int32_t { GATED_AFTER_NORM, GATED_BEFORE_NORM, GATED_ALONE };
struct Recurrence {  // a gated delta rule or a state space, in place of attention or in parallel to it; `mixers.h`
    Norm before, after;
    Map projections[4], out;
    // Of Mamba-1, which has a step for each value: the map from convolved values to a step of low rank, a key and a query, the
    // norms of all three, and the map from the step of low rank to the steps of values.
    Map low, steps;
    Norm low_norms[3];
    // In the projections' outputs: the runs (offset, length) of an update's inputs, in order, and the offset of each gate.
    // `places`: the offset of each head's values in the inputs of `out`.
    const int32_t *runs, *gates, *places;
    const float *taps, *taps_bias;           // (n_taps, convolved), the newest token's last; (convolved,) or null: none
    const float *decay, *step_bias, *skip;   // (n_heads,) each; `skip` null: a delta rule, else a state space. Of Mamba-1,
                                             // `decay` is (n_heads, key_width, value_width), and the others are by value
    const void* norm;                        // weight: (value_width,) for each head of a delta rule, else of all values
    float norm_eps, min_step, max_step, step_scale, gate_scale;
    float added_scale;  // factor of what is added to the residual stream
    int32_t n_runs, n_projections, n_heads, n_key_heads, key_width, value_width, n_taps;
    int32_t n_numbers;  // numbers of each head in a row's inputs, after queries, keys and values
    int32_t convolves_keys;  // 0 (Mamba-1): only values are convolved, they come first, and each value has a step
    int32_t n_low;           // width of the step of low rank, which is then the end of a row's inputs
    int32_t gating, norm_width;

    int n_keys() const { return 2 * n_key_heads * key_width; }
    int n_convolved() const { return convolves_keys * n_keys() + n_heads * value_width; }
    int n_inputs() const { return n_keys() + n_heads * (value_width + n_numbers) + n_low; }
    // Whether a row's values are stored as codes in passes in bfloat16; and the elements that are stored of a row's inputs.
    bool codes_values(int32_t is_bf16) const { return is_bf16 && n_low && n_convolved() % 16 == 0; }
    int kept_width(int32_t is_bf16) const {
        return codes_values(is_bf16) ? n_inputs() - n_convolved() + 1 + n_convolved() * 13 / 16 : n_inputs();
    }
};

enum Activation : int32_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, XIELU, CLAMPED };
struct Mlp {
    Norm before, after, inner;
    Map in[2], out;  // `in`: gate and up, or one map (with `gated`, to the gate and then to up)
    int32_t n_in_maps, gated, n_inner, activation;
    // Of XIELU: factors of squares, of exponentials and of x, and the largest exponent. Of CLAMPED: the bound of gate and up,
    // and the factor in the sigmoid.
    float curve[4];
    float gate_scale, added_scale;  // factors of the gate, before the activation, and of what is added to the residual stream
};

struct Mixture {  // a mixture of experts in place of an MLP
    Norm before, after;
    const void* router;         // (n_experts, n_hidden), floats if `wide_router`, else in the model's type
    const float *correction, *router_bias;  // (n_experts,): added to scores when experts are chosen, and to logits; null: none
    Map widest;                 // sizes of buffers: the most inputs of its maps; has codes or an order if one of them has
    const Map *in, *out;        // of each expert, then of the shared one; `in`: `n_in_maps` each (gate and up, or both as one)
    const void* shared_gate;    // (n_hidden,): the sigmoid of its product with a row multiplies the shared output; null: 1
    Routing routing;
    int32_t has_shared, wide_router, rounded_logits;
    int32_t weighs_inputs;      // weights multiply the experts' inputs, not their outputs
    int32_t n_in_maps, n_inner, n_shared_inner;
    Mlp mlp;  // the activation of all experts; its other fields are not used
    float shared_scale, added_scale;  // factors of the shared output, and of what is added to the residual stream
    // Gemma 4: experts, shared expert and router each have a norm before them, and both outputs have a norm after them.
    // `before` is that of the experts. Logits are multiplied by `logit_scale`.
    Norm router_before, shared_before, experts_after, shared_after;
    const float* expert_scale;  // (n_experts,), factors of the weights of chosen experts; null: 1
    float logit_scale;

    // Whether router, experts and shared expert have separate norms.
    bool separate_norms() const { return router_before.kind != NO_NORM; }
};

struct LayerEnd {  // the end of a layer: a term from the row's per-layer input, and a scale; `ends.h`
    Norm after;
    Map gate, out;  // n_out of `gate`: width of a per-layer input; 0: there is no such term
    Mlp mlp;        // the activation; its other fields are not used
    float scale;    // factor of the residual stream
};

struct LayerInputs {  // computes per-layer inputs: adds the norm of `map` of a row to the embeddings in the output; `ends.h`
    Norm norm;
    Map map;  // to `width` values for each layer
    float map_scale, sum_scale;
    int32_t width;
};

enum StepKind : int32_t { ATTENTION, MLP, SAVE, LOGITS, MIXTURE, CONVOLUTION, RECURRENCE, LAYER_END, LAYER_INPUTS };
struct Step {
    const void* part;                   // the structure for the kind; for LOGITS a Map
    // `window`: number of positions that a row sees, up to its own; negative: the size of chunks, when a row sees only its chunk;
    // 0: a row sees all. `rows`: index of a list of rows.
    int32_t kind, layer, window, rows;
    int32_t rotation;                   // index of a rotation, -1: none
    int32_t from_saved;                 // an MLP, a mixture or a recurrence reads the states that SAVE stored
};

struct Rotation {
    const void *cos, *sin;    // (positions, width), the sine of each pair's first value negated
    const void* query_scale;  // (positions,) in the tables' type, null: 1
    int32_t width, pairs;     // `pairs`: a pair's values are neighbours; else they are half of `width` apart
    int32_t wide;             // the tables are floats, and products are not rounded
};

struct RowList {
    const int32_t* rows;  // null: all
    int64_t n;
};

struct Sequence {  // consecutive rows of a pass that share a KV buffer
    const uint8_t* visible;             // (n_rows, first_slot + n_rows), which slots a row sees; null: the rows are a chain
    void *const *keys, *const *values;    // by layer (kv_heads, capacity, width), or inputs of a convolution
    void *const *inputs, *const *states;  // by recurrent layer
    void *const *coded;  // by layer units (kv_heads, coded_units) of copies in 4 bits, see `coded_slots.h`
    int32_t* roots;  // (layers, 2), the slots of recurrent states; null: there are none
    int64_t capacity;                   // slots of its buffer
    int64_t n_coded, coded_units;       // number of first slots that are read from copies; capacity of these in units
    int32_t n_rows, first_slot;
    int32_t committed, n_kept, lag, is_text;  // see `RecurrentStates`
};

struct Pass {
    void* hidden;               // (n_rows, n_hidden), changed in place
    const int32_t* positions;   // (n_rows,)
    const Sequence* sequences;  // in the order of their rows
    const RowList* lists;       // each with its rows in ascending order
    const Rotation* rotations;
    void* logits;  // (rows of the LOGITS step, n_out)
    void* inputs;  // (n_rows, n_inputs), per-layer inputs of all layers; null: there are none
    const Norm* norm;  // before LOGITS, null: none
    double* seconds;  // by kind of work, the time is added here; null: it is not measured
    ExpertCounts* experts;  // the counts of each mixture are added here; null: they are not counted
    int32_t n_rows, n_hidden, n_inputs, n_sequences, n_lists, n_threads, is_bf16;
};
enum Work : int32_t { MAPS, SLOTS, REST };  // linear maps; attention over slots; norms, rotations and rounding
}  // extern "C"
