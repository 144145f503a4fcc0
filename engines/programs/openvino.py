"""OpenVINO GenAI on a GGUF file, which it makes its own graph of, or on a folder in its own format (IR)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: those of all programs, and precision ("bf16" or "f32"); `settings` are those of its GenerationConfig.

    `draft` is a GGUF file or an IR folder.
    """
    import numpy as np
    import openvino
    import openvino_genai

    more: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": options["precision"],
        **options.get("properties", {}),
    }
    if options.get("draft"):
        draft = options["draft"]
        folder = _ir_folder(draft) if draft.endswith(".gguf") else draft
        more = {**more, "draft_model": openvino_genai.draft_model(folder, "CPU", **more)}
    elif options.get("ngram"):
        more = {**more, "prompt_lookup": True}
    pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **more)
    config = openvino_genai.GenerationConfig()
    config.update_generation_config(ignore_eos=True, do_sample=False, **_settings(options))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        config.max_new_tokens = asked["max_new_tokens"]
        inputs = openvino.Tensor(np.array([asked["prompt_ids"]], dtype=np.int64))  # (batch 1, seq)
        done = pipeline.generate(inputs, config)
        answered = {"token_ids": list(done.tokens[0]), "prefill_s": done.perf_metrics.get_ttft().mean / 1000}
        counts = done.extended_perf_metrics  # None of plain decoding and, alas, of prompt lookup
        if counts is None:
            return answered
        return {**answered, "drafted": counts.get_num_draft_tokens(), "accepted": counts.get_num_accepted_tokens()}

    return answer


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """What its configuration is told; a draft ends at a number of tokens, or at an unsure one, never at either."""
    if "settings" in options:
        return dict(options["settings"])
    if options.get("draft") and options["min_confidence"]:
        return {"assistant_confidence_threshold": options["min_confidence"]}
    if options.get("draft"):
        return {"num_assistant_tokens": options["draft_tokens"]}
    if options.get("ngram"):
        return {"num_assistant_tokens": options["draft_tokens"], "max_ngram_size": options["ngram_tokens"]}
    return {}


def _ir_folder(gguf: str) -> str:
    """The file in OpenVINO's own format, beside it and written once: draft models are read from no other."""
    import openvino_genai

    folder = Path(f"{gguf.removesuffix('.gguf')}-openvino")
    if not folder.is_dir():
        unfinished = Path(f"{folder}.{os.getpid()}")
        unfinished.mkdir()
        try:
            link = unfinished / "model.gguf"  # it writes into the file's folder
            link.symlink_to(Path(gguf).resolve())
            openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            link.unlink()
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)
