"""transformers' own greedy generate: plain, compiled, with prompt lookup, an assistant, or swiftopt inside it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: those of all programs, `model` and `draft` being folders; compiled (true); layer_set, a file's path.

    `settings` are those of the assistant's generation, or of generate's prompt lookup.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache

    kinds: tuple[Any, ...] = (AutoModelForCausalLM, GenerationConfig, StaticCache)
    auto, configuration, static_cache = kinds  # without types of their own
    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options["dtype"])
    model = auto.from_pretrained(options["model"], dtype=dtype, local_files_only=True).eval()
    more: dict[str, Any] = {}
    cache = None
    if options.get("compiled"):
        cache = static_cache(
            config=model.config, max_cache_len=options["n_ctx"]
        )  # of one size, or each prompt compiles
        eager, compiled = model.forward, torch.compile(model.forward)

        def forward(input_ids: Any = None, **inputs: Any) -> Any:
            """Passes over one token are compiled, as generate does on GPUs; a prompt's length would compile anew."""
            return (compiled if input_ids.shape[1] == 1 else eager)(input_ids=input_ids, **inputs)

        model.forward = forward
        more = {"past_key_values": cache}
    elif options.get("ngram"):
        more = _settings(options)
    elif options.get("draft"):
        assistant = auto.from_pretrained(options["draft"], dtype=dtype, local_files_only=True).eval()
        for name, value in _settings(options).items():
            setattr(assistant.generation_config, name, value)
        more = {"assistant_model": assistant}
    model.generation_config.eos_token_id = None  # what is not set below comes from there
    config = configuration(do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    passes: list[float] = []  # when each pass of the model ended
    if options.get("layer_set"):
        from swiftopt import custom_generate

        more = {"custom_generate": custom_generate, "layer_set": options["layer_set"]}
        more["on_tokens"] = lambda token_ids: passes.append(perf_counter())
    model.register_forward_hook(lambda *pass_: passes.append(perf_counter()))
    counts = _counted(model) if options.get("ngram") or options.get("draft") else {}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        passes.clear()
        counts.update(dict.fromkeys(counts, 0))
        begun = perf_counter()
        inputs = torch.tensor([asked["prompt_ids"]])  # (batch 1, seq)
        with torch.inference_mode():
            if cache is not None:
                cache.reset()
            out = model.generate(
                inputs,
                generation_config=config,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=asked["max_new_tokens"],
                **more,
            )
        if options.get("layer_set"):
            counts.update(drafted=out.drafted, accepted=out.accepted)
        return {"token_ids": out.sequences[0, inputs.shape[1] :].tolist(), "prefill_s": passes[0] - begun, **counts}

    return answer


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    if "settings" in options:
        return dict(options["settings"])
    if options.get("ngram"):
        return {
            "prompt_lookup_num_tokens": options["draft_tokens"],
            "max_matching_ngram_size": options["ngram_tokens"],
        }
    return {
        "num_assistant_tokens": options["draft_tokens"],
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": options["min_confidence"],
    }


def _counted(model: Any) -> dict[str, int]:
    """Counts that every round adds its candidates to: transformers tells nobody but whoever makes them."""
    counts = {"drafted": 0, "accepted": 0}
    made = model._get_candidate_generator

    def making(*args: Any, **kwargs: Any) -> Any:
        generator = made(*args, **kwargs)
        told = generator.update_candidate_strategy

        def tell(input_ids: Any, scores: Any, num_matches: Any) -> None:
            """`scores` has a row for each candidate and one for the token behind them."""
            counts["drafted"] += scores.shape[1] - 1
            counts["accepted"] += int(num_matches)
            told(input_ids, scores, num_matches)

        generator.update_candidate_strategy = tell
        return generator

    model._get_candidate_generator = making
    return counts
