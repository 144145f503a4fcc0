"""Beam sampling as a drafter: over a draft model for MTAD, over the target itself for MTJD."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count, share
from ...decoding.draft import Draft, Drafter, DraftModel, draw_distinct
from ...decoding.methods import Resources, method
from ...decoding.verify import Verifier
from ..verifiers import JointRatio, KeepAll, truncate

if TYPE_CHECKING:
    from torch import Tensor

    from ...decoding.work import PassGenerator


@dataclass(frozen=True, slots=True)
class BeamSettings(Settings):
    """MTJD (MTAD 3.1): beams over the target itself; every token of a block is accepted."""

    beam_width: int = count(4, most=256)  # The MTAD paper tries 4 and 8.
    draft_length: int = count(4, most=32)  # Tokens per beam; the MTAD paper tries 3 and 4.
    top_k: int = count(10)  # Value of MTAD's appendix F.
    top_p: float = share(0.9)


@dataclass(frozen=True, slots=True)
class MtadSettings(BeamSettings):
    """MTAD 3.2: beams over the draft model; the longest prefix whose joint ratio exceeds τ is accepted."""

    acceptance_threshold: float = share(0.5)  # τ; the MTAD paper tries 0.1 to 0.9.


@method("mtad", "MTAD", "MTAD 3.2", MtadSettings, drafts_with_model=True, lossy=True)
def _mtad(resources: Resources, settings: MtadSettings) -> tuple[Drafter, Verifier]:
    verifier = JointRatio(settings.acceptance_threshold, settings.top_k, settings.top_p)
    return BeamDrafter(resources.draft_model(), settings), verifier


@method("mtjd", "MTJD", "MTAD 3.1", BeamSettings, lossy=True)
def _mtjd(resources: Resources, settings: BeamSettings) -> tuple[Drafter, Verifier]:
    from ...decoding.draft_models import SkippedTarget

    return BeamDrafter(SkippedTarget(None), settings, runs_target=True), KeepAll()


class BeamDrafter(Drafter):
    """Drafts the best of `beam_width` beams of `draft_length` tokens, as a chain with a log probability per token.

    Probabilities are the model's after the drafter's top-k and top-p, without temperature and penalties: MTAD's ratio
    compares them with the target's, which are warped alike. If the request samples, a level's beams are drawn from
    their joint probabilities without replacement (beam sampling, MTAD 2.1); otherwise the most probable ones are taken.
    Beams continue after a stop token; the decoding loop cuts the text there.

    DEVIATION: MTAD 2.1 warps the joint distribution of beams and next tokens. Here each beam's next-token distribution
    is warped, because the ratio compares target and draft token by token.

    With `runs_target` the `model` is the whole target (MTJD): the best beam's keys and values are moved to their slots,
    and the draft needs no further pass. It then has 1 to `room` + 1 tokens.
    """

    model: DraftModel

    def __init__(self, model: DraftModel, settings: BeamSettings, runs_target: bool = False) -> None:
        self.model, self.settings, self.runs_target = model, settings, runs_target

    def max_rows(self, room: int) -> int:
        length = self._length(room)
        return 1 + max((length - 1) * self.settings.beam_width, 0 if self.runs_target else length)

    def _length(self, room: int) -> int:
        return min(room + 1 if self.runs_target else room, self.settings.draft_length)

    def draft(self, room: int) -> PassGenerator[Draft]:
        """Return the best beam. One pass runs all beams of a level; the beams of the last level are not run.

        Node i of a level is always the child of node i of the level before; keys and values are moved accordingly. With
        this fixed layout, no token ids are read from the device between passes.
        """
        import torch

        from ...models.transfers import uploaded

        model, width = self.model, self.settings.beam_width
        length = min(self._length(room), model.room)
        # (root and drafted tokens, beams), like `logprobs`
        token_ids = uploaded([self.context.token_ids[-1:]], self.context.runtime.device)
        logprobs = torch.zeros(token_ids.shape, dtype=torch.float64, device=token_ids.device)
        joint_logprobs, source_beams, parents = logprobs[0], token_ids[0], [-1]
        model.restart()
        for level in range(length):
            if level > 1:
                self._move_beams(source_beams, level - 1)
            logits = yield from model.extend(token_ids[-1], parents)
            parents = [1 + (level - 1) * width + beam if level else 0 for beam in range(width)]
            top_probs, tokens = truncate(logits.double().softmax(dim=-1), self.settings.top_k, self.settings.top_p)
            picked, joint_logprobs = self._pick_candidates((joint_logprobs[:, None] + top_probs.log()).flatten())
            source_beams = picked // top_probs.shape[1]
            token_ids = torch.cat((token_ids[:, source_beams], tokens.flatten()[picked][None]))
            logprobs = torch.cat((logprobs[:, source_beams], top_probs.log().flatten()[picked][None]))
        best_beam = joint_logprobs.argmax(dim=0, keepdim=True)
        unread = torch.stack((token_ids[:, best_beam].double(), logprobs[:, best_beam]))[..., 0]
        draft = Draft.of_unread(unread, [])
        if self.runs_target:
            self._move_beams(source_beams[best_beam], length - 1)
            draft = replace(draft, n_checked=0, n_passes=length)
        elif model.reads_late:
            return draft
        return draft.read(unread.flatten().tolist())

    def _move_beams(self, source: Tensor, n_levels: int) -> None:
        """Move keys and values of the beams with indices `source` to indices 0, 1, … on each level below the root."""
        import torch

        first_nodes = 1 + torch.arange(n_levels, device=source.device) * self.settings.beam_width
        self.model.move((first_nodes[:, None] + source).flatten(), 1)

    def _pick_candidates(self, joint_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the beams of the next level among candidates with these joint log probabilities (candidates,).

        Returns: the chosen candidates' indices, int64 (beam_width,), and their joint log probabilities, which are -inf
                 where there are too few candidates.
        """
        import torch

        n_candidates, width = len(joint_logprobs), self.settings.beam_width
        if n_candidates < width:
            joint_logprobs = torch.nn.functional.pad(joint_logprobs, (0, width - n_candidates), value=-math.inf)
        if self.context.rule.greedy:
            picked_logprobs, picked = joint_logprobs.topk(width)
        else:
            drawn, draw_logprobs = draw_distinct(self.context.rule, joint_logprobs.softmax(dim=-1), width)
            picked = drawn.long()
            picked_logprobs = joint_logprobs[picked].where(draw_logprobs > -math.inf, -math.inf)
        return picked.clamp(max=n_candidates - 1), picked_logprobs
