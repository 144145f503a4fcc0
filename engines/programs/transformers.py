"""transformers' own greedy generate: plain, compiled, with prompt lookup, or with an assistant."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: model (a folder), dtype, threads, n_ctx; compiled or ngram (true), or assistant (a folder)."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache

    kinds: tuple[Any, ...] = (AutoModelForCausalLM, GenerationConfig, StaticCache)
    auto, settings, static_cache = kinds  # without types of their own
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
        more = {"prompt_lookup_num_tokens": options["draft_tokens"], "max_matching_ngram_size": options["ngram_tokens"]}
    elif options.get("assistant"):
        assistant = auto.from_pretrained(options["assistant"], dtype=dtype, local_files_only=True).eval()
        more = {"assistant_model": assistant}
    config = settings(do_sample=False, eos_token_id=None, pad_token_id=0)
    passes: list[float] = []  # when each pass of the model ended
    model.register_forward_hook(lambda *pass_: passes.append(perf_counter()))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        passes.clear()
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
        return {"token_ids": out[0, inputs.shape[1] :].tolist(), "prefill_s": passes[0] - begun}

    return answer
