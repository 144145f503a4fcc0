"""vLLM's CPU build, its engine in this very process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

COUNTERS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: those of all programs, `model` and `draft` being folders; `settings` are a speculative_config.

    `proposer` names a class of swiftopt that drafts, which is then loaded from the folder `swiftopt`. With
    `trust_remote_code` Python files in these folders run: it is for drafts whose config is swiftopt's own.

    Threads and the memory of keys and values are set by environment variables, which its parent gives.
    """
    from vllm import LLM, SamplingParams

    speculative = _settings(options)
    if (speculative or {}).get("method") == "custom_class":
        _load_package("swiftopt", options["swiftopt"])
    engine = LLM(
        options["model"],
        dtype=options["dtype"],
        trust_remote_code=options["trust_remote_code"],
        max_model_len=options["n_ctx"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=speculative,
        disable_log_stats=False,
    )

    def counts() -> dict[str, int]:
        """Since the engine started."""
        if speculative is None:
            return {}
        told = {metric.name: metric.value for metric in engine.get_metrics() if metric.name in COUNTERS}
        return {word: int(told.get(name, 0)) for name, word in COUNTERS.items()}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        rule = SamplingParams(temperature=0, max_tokens=asked["max_new_tokens"], ignore_eos=True, detokenize=False)
        before = counts()
        (done,) = engine.generate({"prompt_token_ids": asked["prompt_ids"]}, rule, use_tqdm=False)
        return {
            "token_ids": list(done.outputs[0].token_ids),
            "prefill_s": getattr(done.metrics, "first_token_latency", None),
            **{word: number - before[word] for word, number in counts().items()},
        }

    return answer


def _settings(options: dict[str, Any]) -> dict[str, Any] | None:
    """A speculative_config, or None for plain decoding."""
    draft = {"model": options["draft"]} if options.get("draft") else {}
    if "settings" in options:
        return {**options["settings"], **draft}
    if draft:
        if options["min_confidence"]:
            raise ValueError("vLLM ends no draft at an unsure token: min_confidence must be 0")
        return {"method": "draft_model", **draft, "num_speculative_tokens": options["draft_tokens"]}
    if options.get("proposer"):
        return {
            "method": "custom_class",
            "model": options["proposer"],
            "num_speculative_tokens": options["draft_tokens"],
        }
    if options.get("ngram"):
        return {
            "method": "ngram",
            "num_speculative_tokens": options["draft_tokens"],
            "prompt_lookup_min": 1,
            "prompt_lookup_max": options["ngram_tokens"],
        }
    return None


def _load_package(name: str, folder: str) -> None:
    """Load the package from its folder, whatever is beside that, which may be a whole environment."""
    spec = spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
