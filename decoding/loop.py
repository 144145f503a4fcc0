"""The decode loop of every method: draft, let the target check, commit; round after round until the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ..core.types import Completion, FinishReason, Timings
from ..models.rows import Pass, Rows
from ..models.runtime import Runtime
from .context import Begun, Context, EndRule, Tally
from .draft import Draft, Drafting, Outcome, Verifier, Walk
from .engine import PassGenerator, alone
from .method import Method
from .rule import TokenRule
from .tree import ancestor_mask
from .verify import PassTarget


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification, as those who watch see it."""

    n_steps: int
    n_accepted: int
    n_emitted: int
    n_rows: int
    optimise_s: float
    draft_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Calls into the loop. `on_prompt` gets the mean state (hidden_size,) of the prompt's tokens behind the final norm,
    in float32. `before_round` may score candidates behind the committed slots and change the drafter; it gets
    `scratch_rows` slots of buffer for that, and its time counts as optimisation."""

    on_tokens: Callable[[Sequence[int]], None] | None = None
    before_round: Callable[[Context], None] | None = None
    after_round: Callable[[Context, Round], None] | None = None
    scratch_rows: int = 0
    on_prompt: Callable[[Tensor], None] | None = None


def decode(
    runtime: Runtime,
    prompt_ids: Sequence[int],
    method: Method,
    rule: TokenRule,
    ending: EndRule,
    watch: Watch | None = None,
    begun: Begun | None = None,
) -> Completion:
    """Decode one prompt by itself; see `decoding`."""
    return alone(decoding(runtime, prompt_ids, method, rule, ending, watch, begun))


def decoding(
    runtime: Runtime,
    prompt_ids: Sequence[int],
    method: Method,
    rule: TokenRule,
    ending: EndRule,
    watch: Watch | None = None,
    begun: Begun | None = None,
) -> PassGenerator[Completion]:
    """Decode one prompt, pass by pass; unless the method is lossy, the output is plain decoding's with the same rule.

    Args:   prompt_ids: at least one token. begun: where the same request was cut; its tokens are not told again. What
            was drawn is then drawn again for verifiers that draw once per token, `TargetWalk`, and for no others.
    Raises: ContextOverflow: prompt and completion do not fit the model's context.
            LayerSetError: the drafter's layer set was made for another depth.
    """
    watch = watch or Watch()
    tally = Tally() if begun is None else begun.tally.resumed()
    runtime.check_context(len(prompt_ids), ending.max_new_tokens)
    if method.layer_set is not None:
        runtime.check_layer_set(method.layer_set)
    behind = max(method.drafter.max_rows(ending.max_new_tokens), watch.scratch_rows)
    buffer = runtime.new_buffer(len(prompt_ids) + ending.max_new_tokens + behind)
    context = Context(runtime, buffer, rule, list(prompt_ids), len(prompt_ids), tally)
    if begun is None:
        yield from _begin(context, ending, watch)
    else:
        yield from _take_up(context, begun)
    if context.finish is None:
        drafting = method.drafter.begin(context)
        while context.finish is None:
            yield from _round(context, method.verifier, drafting, ending, watch)
    return _completion(context, method, ending, context.finish)


def _begin(context: Context, ending: EndRule, watch: Watch) -> PassGenerator[None]:
    """Prefill the prompt; the pass gives the first token."""
    runtime, states = context.runtime, list[Tensor]()
    capture = None if watch.on_prompt is None else {runtime.n_layers: states}
    for each in runtime.prefill_passes(context.token_ids, context.buffer, capture=capture):
        logits = yield each
    if watch.on_prompt is not None:
        watch.on_prompt(runtime.normed(torch.cat(states)).float().mean(dim=0))
    first = context.rule.choose(context.token_ids, logits[0])
    context.tally.prefill_s = context.tally.total_s
    _commit(context, (first,), ending, watch)


def _take_up(context: Context, begun: Begun) -> PassGenerator[None]:
    """Bring the buffer and the rule to where they were when the request was cut."""
    clock = perf_counter()
    context.token_ids += begun.token_ids
    context.searched, context.finish = begun.searched, begun.finish
    if begun.finish is None:
        yield from context.runtime.prefill_passes(context.token_ids[:-1], context.buffer)
        context.rule.skip(len(begun.token_ids))
        context.tally.prefill_s += perf_counter() - clock


def _completion(context: Context, method: Method, ending: EndRule, finish: FinishReason) -> Completion:
    tally, token_ids = context.tally, context.generated
    total = tally.total_s
    spent = tally.optimise_s + tally.draft_s + tally.verify_s
    return Completion(
        token_ids=tuple(token_ids),
        text=completion_text(context.runtime, token_ids, ending),
        finish_reason=finish,
        method=method.name,
        n_prompt_tokens=context.n_prompt,
        target_passes=tally.rounds,
        first_tokens=1,
        drafted=tally.drafted,
        accepted=tally.accepted,
        accepted_per_position=tuple(tally.per_position),
        refused=tally.refused,
        reckoned_cost=tally.reckoned,
        verified_widths=tally.widths,
        timings=Timings(tally.optimise_s, tally.draft_s, tally.verify_s, max(0.0, total - spent)),
        prefill_s=tally.prefill_s,
        layer_set=method.layer_set,
        lossy=method.lossy,
        exact=context.runtime.exact and not method.lossy,
    )


def completion_text(runtime: Runtime, token_ids: Sequence[int], ending: EndRule) -> str:
    """The completion as text, without special tokens and cut where a stop string begins; "" without a tokenizer."""
    if runtime.tokenizer is None:
        return ""
    text = str(runtime.tokenizer.decode(list(token_ids), skip_special_tokens=True))
    cut = ending.cut(text)
    return text if cut is None else text[:cut]


def _round(
    context: Context, verifier: Verifier, drafting: Drafting, ending: EndRule, watch: Watch
) -> PassGenerator[None]:
    clock = perf_counter()
    if watch.before_round is not None and not context.searched:
        context.searched = True  # who is told in there of what was scored may keep the request as it stands
        watch.before_round(context)
    optimised = perf_counter()
    # The last token of the completion needs no draft: it comes with the pass that verifies the one before it.
    draft = yield from drafting.draft(ending.max_new_tokens - len(context.generated) - 1)
    drafted = perf_counter()
    logits = yield from _check(context, draft)
    walked = verifier.verify(draft, PassTarget(context, draft, logits))
    before = len(context.token_ids)
    _keep(context, walked)
    drafting.observe(Outcome(draft, walked, logits))
    verified = perf_counter()
    _commit(context, walked.token_ids, ending, watch)
    context.searched = False
    n_emitted = len(context.token_ids) - before
    n_accepted = min(len(walked.path), n_emitted, draft.n_steps)
    tally = context.tally
    tally.add(draft.n_steps, draft.n_rows, n_accepted, draft.n_passes)
    if draft.reckoned is not None:
        tally.reckoned = (tally.reckoned or 0.0) + draft.reckoned
    tally.refused += len(walked.path) < draft.n_steps
    tally.optimise_s += optimised - clock
    tally.draft_s += drafted - optimised
    tally.verify_s += verified - drafted
    if watch.after_round is not None:
        seconds = optimised - clock, drafted - optimised, verified - drafted
        watch.after_round(context, Round(draft.n_steps, n_accepted, n_emitted, draft.n_rows, *seconds))


def _check(context: Context, draft: Draft) -> PassGenerator[Tensor | None]:
    """The target's logits for the tree's rows and, behind them, the riders'; one pass, or what is left of one."""
    if draft.n_checked == 0:
        return None
    if draft.staged is not None:
        return draft.staged.finish()
    tree, root = draft.tree, context.root_slot
    if tree.is_chain and draft.riders is None:
        return (yield Pass(context.runtime, Rows(tree.token_ids[: draft.n_checked], root), context.buffer))
    visible, token_ids, depths, wanted = ancestor_mask(tree.parents), tree.token_ids, tree.depths(), None
    if draft.riders is not None:
        n_rows = tree.n_nodes + len(draft.riders.token_ids)
        wanted = [*range(tree.n_nodes), *range(n_rows - draft.riders.n_read, n_rows)]
        riders = draft.riders
        beside = torch.zeros((tree.n_nodes, len(riders.token_ids)), dtype=torch.bool)
        visible = torch.cat((torch.cat((visible, beside), dim=1), riders.visible))
        token_ids, depths = (*token_ids, *riders.token_ids), [*depths, *riders.depths]
    committed = torch.ones((len(token_ids), root), dtype=torch.bool)
    positions = [root + depth for depth in depths]
    rows = Rows(token_ids, root, positions, torch.cat((committed, visible), dim=1))
    return (yield Pass(context.runtime, rows, context.buffer, wanted))


def _keep(context: Context, walked: Walk) -> None:
    """Bring the accepted nodes' keys and values to the slots of their positions."""
    for depth, node in enumerate(walked.path, 1):
        if node != depth:  # a node beside the first path; node i of that already lies at depth i
            context.buffer.move(context.root_slot + node, context.root_slot + depth)


def _commit(context: Context, block: Sequence[int], ending: EndRule, watch: Watch) -> None:
    kept, context.finish = ending.crop(context.generated, block)
    context.token_ids += kept
    if watch.on_tokens is not None:
        watch.on_tokens(kept)
