"""Log probabilities of tokens by the model's own logits, read from the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.types import TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor


def token_logprobs(rows: Sequence[Tensor] | Tensor, token_ids: Sequence[int], n_top: int) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of tokens, and of the `n_top` likeliest ones, by the model's own logits (vocab,).

    All are read in one transfer. Rows and tokens are paired up to the shorter of the two.
    """
    from ..models.rows import read_together
    from ..models.transfers import uploaded

    token_ids = token_ids[: len(rows)]
    if not token_ids:
        return ()
    token_tensors = uploaded(token_ids, rows[0].device)[:, None].unbind()
    numbers_of_rows = [logprobs_of(logits, token, n_top) for logits, token in zip(rows, token_tensors, strict=False)]
    token_numbers = zip(token_ids, read_together(*numbers_of_rows), strict=False)
    return tuple(as_logprob(token_id, numbers, n_top) for token_id, numbers in token_numbers)


def logprobs_of(logits: Tensor, token_ids: Tensor, n_top: int) -> Tensor:
    """Return the `n_top` likeliest tokens and `token_ids` (n,), and the log probabilities of all by logits (vocab,).

    Computed from a single row, so that no bits depend on other rows: float64 (2, n_top + n), on the device.
    """
    import torch

    logprobs = logits.float().log_softmax(dim=-1)
    top_ids = logprobs.topk(min(n_top, logprobs.shape[-1])).indices
    all_ids = torch.cat((top_ids, token_ids))
    return torch.stack((all_ids.double(), logprobs.gather(-1, all_ids).double()))


def as_logprob(token_id: int, numbers: Sequence[float], n_top: int) -> TokenLogprob:
    """Return a token's log probabilities from the transferred numbers of `logprobs_of`."""
    n_tokens = len(numbers) // 2
    token_logprob_pairs = [
        (int(token), logprob) for token, logprob in zip(numbers[:n_tokens], numbers[n_tokens:], strict=True)
    ]
    # With fewer than n_top tokens in the vocabulary, the chosen one appears twice; the dict removes the duplicate.
    top_logprobs = dict(token_logprob_pairs[:n_top])
    return TokenLogprob(token_id, dict(token_logprob_pairs)[token_id], tuple(top_logprobs.items()))
