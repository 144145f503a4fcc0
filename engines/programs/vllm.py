"""vLLM's CPU build, its engine in this very process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: model (a folder), dtype, n_ctx; ngram (true) where it speculates.

    Threads and the memory of keys and values are set by environment variables, which its parent gives.
    """
    from vllm import LLM, SamplingParams

    speculative = None
    if options.get("ngram"):
        speculative = {
            "method": "ngram",
            "num_speculative_tokens": options["draft_tokens"],
            "prompt_lookup_min": 1,
            "prompt_lookup_max": options["ngram_tokens"],
        }
    engine = LLM(
        options["model"],
        dtype=options["dtype"],
        max_model_len=options["n_ctx"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=speculative,
        disable_log_stats=False,
    )

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        rule = SamplingParams(temperature=0, max_tokens=asked["max_new_tokens"], ignore_eos=True, detokenize=False)
        (done,) = engine.generate({"prompt_token_ids": asked["prompt_ids"]}, rule, use_tqdm=False)
        return {
            "token_ids": list(done.outputs[0].token_ids),
            "prefill_s": getattr(done.metrics, "first_token_latency", None),
        }

    return answer
