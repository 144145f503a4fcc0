"""OpenVINO GenAI on a GGUF file, which it makes its own graph of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: model, threads, precision ("bf16" or "f32"); draft (a GGUF file) or ngram (true) where it speculates."""
    import numpy as np
    import openvino
    import openvino_genai

    more: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": options["precision"],
    }
    if options.get("draft"):
        drafting = openvino_genai.draft_model(_ir_folder(options["draft"]), "CPU", **more)
        pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", draft_model=drafting, **more)
    elif options.get("ngram"):
        pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", prompt_lookup=True, **more)
    else:
        pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **more)
    config = openvino_genai.GenerationConfig()
    config.ignore_eos, config.do_sample = True, False
    if options.get("draft"):
        config.assistant_confidence_threshold = options["min_confidence"]
    elif options.get("ngram"):
        config.num_assistant_tokens, config.max_ngram_size = options["draft_tokens"], options["ngram_tokens"]

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        config.max_new_tokens = asked["max_new_tokens"]
        inputs = openvino.Tensor(np.array([asked["prompt_ids"]], dtype=np.int64))  # (batch 1, seq)
        done = pipeline.generate(inputs, config)
        return {"token_ids": list(done.tokens[0]), "prefill_s": done.perf_metrics.get_ttft().mean / 1000}

    return answer


def _ir_folder(gguf: str) -> str:
    """The file in OpenVINO's own format, beside it and written once: draft models are read from no other."""
    import openvino_genai

    folder = Path(f"{gguf.removesuffix('.gguf')}-openvino")
    if not folder.is_dir():
        unfinished = Path(f"{folder}.{os.getpid()}")
        unfinished.mkdir()
        try:
            link = unfinished / "model.gguf"  # it writes into the file's folder
            link.symlink_to(gguf)
            openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            link.unlink()
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)
