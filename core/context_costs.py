"""What a longer context adds to the time of passes: attention of each row over the slots that were added.

The first row's share is what a plain pass takes longer. Further rows read the same keys and values, so that each adds
less or as much; how much is a property of kernels and machine, and is learned from passes over several rows. A draft
that reads copies of the slots in fewer bits adds the share of that which it reads of their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .costs import CostProfile, FormatCosts
from .settings import FORMATS

PRIOR_SHARE = 1.0  # A further row is taken to cost as much as the first until passes say otherwise.
PRIOR_WEIGHT = 1.0
MAX_WEIGHT = 64.0  # Weight of older passes above which they fade.
MAX_SHARE = 8.0  # Bound on the share that one pass may show: it may have been interrupted.
MIN_ADDED = 0.05  # Least addition to a plain pass, as a share of it, from which something can be learned.


@dataclass(slots=True)
class RowShare:
    """What a further row of a pass adds for a longer context / what the first row does."""

    value: float = PRIOR_SHARE
    _weight: float = PRIOR_WEIGHT

    def learn(self, n_rows: int, cost: float, cost_before: float, added: float) -> None:
        """Learn from a pass over several rows.

        Args: cost: in plain passes of its context. cost_before: the same in the context that was measured. added: what
              the longer context adds to a plain pass, in plain passes of the context that was measured.
        """
        if added < MIN_ADDED:
            return
        share = ((cost * (1 + added) - cost_before) / added - 1) / (n_rows - 1)
        # The share's error is that of the cost times 1 / this.
        precision = added * (n_rows - 1) / (1 + added)
        self._weight = min(MAX_WEIGHT, self._weight + precision**2)
        step = max(0.0, min(MAX_SHARE, share)) - self.value
        self.value += min(1.0, precision**2 / self._weight) * step


@dataclass(frozen=True, slots=True)
class SlotCopies:
    """Copies of slots, which drafts made of the target read in contexts of more than `least` tokens.

    `share`: bytes that a draft reads of the copies / bytes of the keys and values that the target reads.
    """

    least: int
    share: float

    def read(self, n_slots: int) -> float:
        """Return how many slots of keys and values have the bytes that a draft reads of `n_slots` slots."""
        return n_slots * (self.share if n_slots > self.least else 1.0)


def deepened(
    profile: CostProfile, context_bucket: int, added_s: float, row_share: float, copies: SlotCopies | None = None
) -> CostProfile:
    """Return a profile for a longer context, in which a plain pass takes `added_s` seconds more.

    A draft's attention reads as many keys and values as the target's, whatever its weights' format, or `copies` of
    them. Costs of a name that is no format are those of a single layer, which has slots of its own.
    """

    n_attn, n_added = max(1, profile.n_parts("attn")), context_bucket - profile.context_bucket
    drafts_share = 1.0
    if copies is not None and n_added > 0:
        # Copies of the long context may have fewer bytes than the whole slots of the shorter one.
        drafts_share = max(0.0, (copies.read(context_bucket) - copies.read(profile.context_bucket)) / n_added)

    def added(n_rows: int) -> float:
        return added_s * (1 + row_share * (n_rows - 1))

    def deeper(name: str, costs: FormatCosts) -> FormatCosts:
        is_whole = name in FORMATS
        n_own_attn, n_own_mlp = (n_attn, profile.n_parts("mlp")) if is_whole else (1, 1)
        of_slots = drafts_share if is_whole else 1.0
        share = of_slots * n_own_attn / n_attn
        pass_s = costs.fixed_s + costs.head_s + n_own_attn * costs.attn_s + n_own_mlp * costs.mlp_s
        wider = {
            n: (pass_s * times + share * added(n)) / (pass_s + share * added_s) for n, times in costs.wider.items()
        }
        return replace(costs, attn_s=costs.attn_s + of_slots * added_s / n_attn, wider=wider)

    return replace(
        profile,
        context_bucket=context_bucket,
        attn_s=profile.attn_s + drafts_share * added_s / n_attn,
        pass_s={n: seconds + added(n) for n, seconds in profile.pass_s.items()},
        formats={name: deeper(name, costs) for name, costs in profile.formats.items()},
    )
