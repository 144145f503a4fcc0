"""Options of transformers' `generate`, sorted by whether `custom_generate` supports or refuses them.

`generate` itself turns most fields of a `GenerationConfig` into logits processors and stopping criteria, which apply.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode

from ..core.errors import InvalidInput, SettingsError

WITHOUT = "or call generate without custom_generate"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# GenerationConfig fields that work as in plain decoding.
OBEYED = _names("""
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings eos_token_id do_sample temperature top_k
    top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty guidance_scale watermarking_config
    remove_invalid_values renormalize_logits token_healing bos_token_id pad_token_id decoder_start_token_id
    return_dict_in_generate output_scores output_logits
""")
# Fields that do not change greedy or sampled tokens: caches, compilation, and details of the modes below.
WITHOUT_EFFECT = _names("""
    use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config disable_compile
    continuous_batching_config early_stopping length_penalty diversity_penalty low_memory num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind
    assistant_ensemble_weight max_matching_ngram_size speculation_type transformers_version
""")
# Fields that select another mode than greedy decoding or sampling; `generate` calls with them are refused.
MODES = _names("""
    num_beams num_beam_groups constraints force_words_ids penalty_alpha dola_layers use_mtp prompt_lookup_num_tokens
    assistant_early_exit
""")
# Other refused fields, or field=value pairs, with the reason.
REFUSED = {
    "num_return_sequences": "one sequence is decoded at a time",
    "output_attentions": "attention weights are not kept",
    "output_hidden_states": "hidden states are not kept",
    "is_assistant": "custom_generate does not draft for another model",
    "cache_implementation=quantized": "keys and values are kept as they are computed",
}
# Arguments of the model's forward pass that `generate` adds itself or that have no effect.
USUAL_INPUTS = _names("attention_mask position_ids past_key_values cache_position use_cache logits_to_keep")

# Logits processors without state between calls; they read only scores and text.
STATELESS = frozenset(
    getattr(logits_process, name)
    for name in _names("""
        EncoderNoRepeatNGramLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor EpsilonLogitsWarper EtaLogitsWarper
        ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
        InfNanRemoveLogitsProcessor LogitNormalization MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor
        MinPLogitsWarper NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor
        SequenceBiasLogitsProcessor SuppressTokensAtBeginLogitsProcessor SuppressTokensLogitsProcessor
        TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
        WatermarkLogitsProcessor
    """)
)


def refuse_options(config: Any, assistant_model: Any, synced_gpus: bool) -> None:
    """Raises: SettingsError: `generate` was called with an unsupported option."""
    defaults = GenerationConfig._get_default_generation_params()
    set_options = {name: value for name, value in vars(config).items() if value is not None and value is not False}
    changed_options = {name: value for name, value in set_options.items() if value != defaults.get(name)}
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        mode_options = sorted(MODES & changed_options.keys()) + ["assistant_model"] * (assistant_model is not None)
        raise SettingsError(
            f"custom_generate decodes greedily or samples, and not by {str(mode.value).replace('_', ' ')}: leave"
            f" {' and '.join(mode_options)} out, {WITHOUT}"
        )
    for name, value in changed_options.items():
        reason = REFUSED.get(name) or REFUSED.get(f"{name}={value}")
        if reason is not None:
            raise SettingsError(
                f"custom_generate does not take {name} {value!r}, because {reason}: remove it, {WITHOUT}"
            )
    unknown_options = (
        vars(cast(Any, GenerationConfig)()).keys() & changed_options.keys() - OBEYED - WITHOUT_EFFECT - MODES
    )
    for name in sorted(name for name in unknown_options if not name.startswith("_")):
        raise SettingsError(
            f"custom_generate does not support {name}, an option of this transformers: remove it, {WITHOUT}"
        )
    if synced_gpus:
        raise SettingsError(
            f"custom_generate does not take synced_gpus, because it synchronises no other process: remove it, {WITHOUT}"
        )


def refuse_inputs(input_ids: Tensor, inputs: dict[str, Any]) -> None:
    """Raises: SettingsError, InvalidInput: the input is not exactly the token ids of one prompt."""
    given_inputs = {name: value for name, value in inputs.items() if value is not None}
    if "inputs_embeds" in given_inputs:
        raise InvalidInput(f"custom_generate reads token ids, not inputs_embeds: pass input_ids, {WITHOUT}")
    for name in sorted(given_inputs.keys() - set(USUAL_INPUTS)):
        raise SettingsError(f"custom_generate does not take {name}, an input of the model: remove it, {WITHOUT}")
    if input_ids.shape[0] != 1:
        raise SettingsError(
            f"custom_generate decodes one sequence, not a batch of {input_ids.shape[0]}: call generate once per prompt"
        )
    if input_ids.shape[1] == 0:
        raise InvalidInput("the prompt has no tokens: pass input_ids with at least one")
    mask, positions, cache = (given_inputs.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    if mask is not None and not bool(mask.all()):
        raise InvalidInput(
            "the prompt has padding (zeros in attention_mask, which generate sets for tokens equal to pad_token_id):"
            " pass it without padding, or attention_mask=torch.ones_like(input_ids)"
        )
    if getattr(cache, "_is_user_defined", False):
        raise SettingsError(f"custom_generate keeps its own keys and values: remove past_key_values, {WITHOUT}")
    if positions is not None and positions.flatten().tolist() != list(range(input_ids.shape[1])):
        raise SettingsError(f"custom_generate numbers positions from 0 on: remove position_ids, {WITHOUT}")


def refuse_dropout(model: Any) -> None:
    """Raises: SettingsError: the model is in training mode with active dropout."""
    for name, module in model.named_modules() if model.training else ():
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0.0 and module.training:
            raise SettingsError(
                f"{name} drops values at random, because the model is in training mode: call model.eval()"
            )
