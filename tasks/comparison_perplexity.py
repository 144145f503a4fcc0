"""How likely the target finds a text that it, or something in its place, has written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..models.rows import Rows
from ..models.runtime import Runtime

ROWS = 64  # tokens per pass, so that the logits of a large vocabulary stay small


@torch.inference_mode()
def surprise(runtime: Runtime, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """-log probability of the tokens after the prompt, summed; by the model alone, with no temperature or processor."""
    if not token_ids:
        return 0.0
    text = [*prompt_ids, *token_ids[:-1]]
    buffer = runtime.new_buffer(len(text))
    first = len(prompt_ids) - 1
    if first:
        runtime.prefill(text[:first], buffer)
    total = 0.0
    for start in range(0, len(token_ids), ROWS):
        rows = text[first + start : first + start + ROWS]
        logits = runtime.forward(Rows(rows, first + start), buffer).float()
        said = torch.tensor(token_ids[start : start + ROWS], device=logits.device)
        total -= float(torch.log_softmax(logits, dim=-1).gather(1, said[:, None]).double().sum())
    return total
