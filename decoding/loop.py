"""The decode loop of every method: draft, verify, commit; round after round until the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from torch import Tensor

from ..core.errors import SettingsError
from ..core.types import Completion, FinishReason, Timings, TokenLogprob, TokenSource, TracedToken
from ..models.runtime import Runtime
from .context import Context, Ending, ResumePoint, Tally, TokenRule
from .draft import Draft, Drafter, Outcome, Walk
from .draft_tree import DraftTree
from .engine import alone
from .events import Prefilled, Round
from .logprobs import token_logprobs
from .methods import PLAIN, Method
from .verify import Target, TargetWalk, Verifier
from .work import Free, Slots, Work

MAX_FORCED_TOKENS = 15  # Maximum tokens that a grammar drafts per round: 16 rows with the root.
MIN_FORCED_TOKENS = 2  # Minimum tokens forced by the grammar; with fewer, the method drafts instead.
MOST_LAG = 64  # Maximum tokens of a window that a search scores exactly if layers are recurrent.
FIRST_NEW_SLOTS = 256  # Initial slots for new tokens if memory is bounded; the buffer grows by doubling.


def decode(runtime: Runtime, prompt_ids: Sequence[int], method: Method, rule: TokenRule, ending: Ending) -> Completion:
    """Decode one prompt by itself; see `decoding`."""
    return alone(decoding(runtime, prompt_ids, method, rule, ending))


def decoding(
    runtime: Runtime,
    prompt_ids: Sequence[int],
    method: Method,
    rule: TokenRule,
    ending: Ending,
    resume_from: ResumePoint | None = None,
    scratch_rows: int = 0,
    with_state: bool = False,
    salt: str = "",
    logprobs: int | None = None,
    prompt_logprobs: bool = False,
    prediction: Sequence[int] = (),
) -> Work[Completion]:
    """Decode one prompt, pass by pass; unless the method is lossy, the output is plain decoding's with the same rule.

    Yields `Prefilled` once and `Round` after each round. A subscriber of these events may demand extra passes before
    the generator continues. They use the slots after the last committed one, `scratch_rows` or fewer if memory is
    short, and the subscriber adds their seconds to the tally.

    Args:   prompt_ids: at least one token. resume_from: state of the interrupted request; its tokens are not yielded
            again. with_state: include the prompt's state in `Prefilled`. salt: see `Slots`. logprobs: include in events
            the log probabilities of their tokens and of this number of alternatives. prompt_logprobs: include in
            `Prefilled` those of the prompt, which is then read completely. prediction: expected tokens after the
            prompt; methods that draft from earlier text also draft from them.
    Raises: ContextOverflow: prompt and completion do not fit the model's context.
            LayerSetError: the drafter's layer set was made for another depth.
            SettingsError: log probabilities are requested from a method that cannot provide them.
    """
    runtime.check_context(len(prompt_ids), ending.max_new_tokens)
    if method.layer_set is not None:
        runtime.check_layer_set(method.layer_set)
    if logprobs is not None and method.drafter.runs_target:
        raise SettingsError(
            f"method {method.name} searches with the model itself, and has no log probabilities of its tokens:"
            " remove logprobs, or use another method"
        )
    method.drafter.attach(runtime)
    draft_rows = method.drafter.max_rows(ending.max_new_tokens)
    if rule.grammar is not None:
        draft_rows = max(draft_rows, 1 + MAX_FORCED_TOKENS)
    capacity = len(prompt_ids) + ending.max_new_tokens + draft_rows
    token_ids = [*prompt_ids, *(() if resume_from is None else resume_from.token_ids[:-1])]
    # Slots shared with another request come without logits, so a request for prompt_logprobs reads its whole prompt
    # itself.
    shareable_ids = () if prompt_logprobs else token_ids
    first_capacity = min(capacity, len(token_ids) + FIRST_NEW_SLOTS + draft_rows)
    spare_slots = max(0, scratch_rows - draft_rows)
    slots = Slots(runtime, capacity, first_capacity, shareable_ids, salt, method.drafter.slot_bytes, spare_slots)
    slots.rows, slots.lag = draft_rows, min(scratch_rows, MOST_LAG)
    slots.coding = method.drafter.coding(runtime, capacity)
    buffer, n_read, state, load = yield from slots.acquire()
    tally = Tally() if resume_from is None else resume_from.tally.copied(resume_from.tally.elapsed_s)
    prompt_list = list(prompt_ids)
    slots.state = state if with_state else None
    context = Context(runtime, buffer, rule, prompt_list, len(prompt_list), tally, load, logprobs, tuple(prediction))
    context.states = [] if method.drafter.reads_states else None
    if resume_from is None:
        tally.n_cached = n_read
        yield from _prefill(context, slots, n_read, ending, with_state, prompt_logprobs)
    else:
        yield from _resume(context, n_read, resume_from)
    if context.finish is None:
        request_drafter, plain_drafter = method.drafter.begin(context), PLAIN.drafter.begin(context)
        # Only this verifier gives the same tokens whatever was drafted, so only with it may drafting stop by measured
        # time.
        may_stop_drafting = isinstance(method.verifier, TargetWalk) and not method.lossy
        while context.finish is None:
            if context.root_slot + draft_rows > context.buffer.capacity:
                slots = yield from _grow(context, slots, draft_rows)
            may_draft = load.drafts or not may_stop_drafting
            tally.crowded += not may_draft
            yield from _round(context, method.verifier, request_drafter if may_draft else plain_drafter, ending)
    completion = _build_completion(context, method, ending, context.finish)
    has_all_slots = resume_from is None or resume_from.finish is None
    yield Free(slots, context.token_ids[:-1] if has_all_slots else ())
    return completion


def _prefill(
    context: Context, slots: Slots, n_read: int, ending: Ending, with_state: bool, prompt_logprobs: bool
) -> Work[None]:
    """Prefill the part of the prompt not yet in the buffer; the last pass gives the first token."""
    runtime, prompt_ids, states = context.runtime, context.token_ids[n_read:], list[Tensor]()
    captured_states = {runtime.n_layers: states} if with_state or context.states is not None else None
    prompt_token_logprobs: list[TokenLogprob] = []
    n_averaged = 0 if slots.state is None else n_read
    state_sum = 0.0 if slots.state is None else n_read * slots.state.double()
    is_shared = context.load.is_shared
    passes = runtime.prefill_passes(prompt_ids, context.buffer, n_read, captured_states, is_shared, prompt_logprobs)
    for pass_ in passes:
        logits = yield from pass_.run()
        if prompt_logprobs:
            next_ids = prompt_ids[len(prompt_token_logprobs) + 1 :]
            prompt_token_logprobs += token_logprobs(logits, next_ids, context.logprobs or 0)
        if context.states is not None:
            context.states += states
        if with_state:
            new_states = runtime.normed(states[0]).double()
            n_averaged, state_sum = n_averaged + len(new_states), state_sum + new_states.sum(dim=0)
            slots.state = (state_sum / n_averaged).float()
        states.clear()
    first_token = context.choose((), logits[-1])
    context.tally.prefill_s = context.tally.total_s
    logprobs = () if context.logprobs is None else token_logprobs(logits[-1:], [first_token], context.logprobs)
    yield Prefilled(
        context, _commit(context, (first_token,), ending), slots.state, logprobs, tuple(prompt_token_logprobs)
    )


def _resume(context: Context, n_read: int, resume_point: ResumePoint) -> Work[None]:
    """Restore the buffer and the sampling rule of an interrupted request."""
    started = perf_counter()
    context.token_ids += resume_point.token_ids
    context.searched, context.finish, context.n_learnt = (
        resume_point.searched,
        resume_point.finish,
        resume_point.n_learnt,
    )
    context.rule.skip(resume_point.n_drawn)
    if resume_point.finish is None:
        unread_ids = context.token_ids[n_read:-1]
        yield from context.runtime.prefill_passes(
            unread_ids, context.buffer, n_read, context.capture, context.load.is_shared
        )
        context.tally.prefill_s += perf_counter() - started
        yield Prefilled(context, ())


def _grow(context: Context, slots: Slots, draft_rows: int) -> Work[Slots]:
    """Get a buffer with twice as many slots for new tokens, queuing with other requests that wait for memory.

    The old buffer is kept in the meantime; if it is evicted, its text is read again.
    """
    token_ids = list(context.token_ids)
    yield Free(slots, token_ids[:-1])
    first_capacity = len(token_ids) + max(FIRST_NEW_SLOTS, len(context.generated)) + draft_rows
    slots = replace(slots, first=min(slots.capacity, first_capacity), token_ids=token_ids)
    context.buffer, n_read, *_ = yield from slots.acquire()
    unread_ids = token_ids[n_read:-1]
    yield from context.runtime.prefill_passes(unread_ids, context.buffer, n_read, is_shared=context.load.is_shared)
    return slots


def _build_completion(context: Context, method: Method, ending: Ending, finish: FinishReason) -> Completion:
    tally, token_ids = context.tally, context.generated
    total_s = tally.total_s
    round_s = tally.optimise_s + tally.draft_s + tally.verify_s
    # Verifiers that draw random numbers to accept a draft give other tokens for the same seed than plain decoding does.
    keeps_tokens = not method.lossy and (context.rule.greedy or isinstance(method.verifier, TargetWalk))
    return Completion(
        token_ids=tuple(token_ids),
        text=ending.text(token_ids),
        finish_reason=finish,
        method=method.name,
        n_prompt_tokens=context.n_prompt,
        target_passes=tally.rounds,
        first_tokens=1,
        drafted=tally.drafted,
        accepted=tally.accepted,
        accepted_per_position=tuple(tally.per_position),
        by_draft_length={draft_length: tuple(rounds) for draft_length, rounds in sorted(tally.by_draft_length.items())},
        refused=tally.refused,
        estimated_cost=tally.estimated,
        accepted_prediction=tally.accepted_prediction,
        rejected_prediction=tally.rejected_prediction,
        n_cached=tally.n_cached,
        crowded_rounds=tally.crowded,
        verified_widths=tally.widths,
        timings=Timings(tally.optimise_s, tally.draft_s, tally.verify_s, max(0.0, total_s - round_s)),
        prefill_s=tally.prefill_s,
        layer_set=method.layer_set,
        lossy=method.lossy,
        exact=context.runtime.exact and keeps_tokens,
    )


def _round(context: Context, verifier: Verifier, drafter: Drafter, ending: Ending) -> Work[None]:
    started_at = perf_counter()
    # The last token of the completion needs no draft: the pass that verifies the token before it yields it.
    room = ending.max_new_tokens - len(context.generated) - 1
    grammar_draft = _draft_by_grammar(context, room, drafter)
    draft = (yield from drafter.draft(room)) if grammar_draft is None else grammar_draft
    drafted_at = perf_counter()
    target = Target(context, draft, verifier)
    draft = yield from target.check()
    walk = verifier.verify(draft, target)
    for depth, node in enumerate(walk.path, 1):
        if node != depth:  # Move the accepted node's keys and values to the slot of its position.
            context.buffer.move(context.root_slot + node, context.root_slot + depth)
    if grammar_draft is None:
        drafter.observe(Outcome(draft, walk, target.argmaxes))
    verified_at = perf_counter()
    token_ids = _commit(context, walk.token_ids, ending)
    context.keep_states(target.states, (0, *walk.path)[: len(token_ids)])
    context.buffer.commit(context.root_slot)
    context.load.n_tokens += len(token_ids)
    context.searched = False
    n_accepted = min(len(walk.path), len(token_ids), draft.n_steps)
    traced_tokens = _trace_sources(draft, walk, token_ids)
    _update_tally(context.tally, draft, walk, n_accepted, traced_tokens)
    context.tally.draft_s += drafted_at - started_at
    context.tally.verify_s += verified_at - drafted_at
    logprobs = target.logprobs(walk.path, token_ids)
    draft_and_verify_s = (drafted_at - started_at, verified_at - drafted_at)
    drafter_name: TokenSource = draft.sources.get(1, "draft") if draft.n_steps else "target"
    yield Round(
        context,
        token_ids,
        draft.n_steps,
        n_accepted,
        draft.n_rows,
        *draft_and_verify_s,
        logprobs,
        traced_tokens,
        drafter_name,
    )


def _update_tally(
    tally: Tally, draft: Draft, walk: Walk, n_accepted: int, traced_tokens: Sequence[TracedToken]
) -> None:
    n_steps, n_rows = draft.n_steps, draft.n_rows
    tally.rounds += draft.n_passes
    tally.drafted += n_steps
    tally.accepted += n_accepted
    tally.refused += len(walk.path) < n_steps
    if n_rows:  # Zero rows: the drafter ran the target itself, in passes of several widths.
        tally.widths[n_rows] = tally.widths.get(n_rows, 0) + 1
    tally.per_position += [0] * (n_steps - len(tally.per_position))
    for position in range(n_accepted):
        tally.per_position[position] += 1
    if n_steps:
        tally.by_draft_length.setdefault(n_steps, [0] * (n_steps + 1))[n_accepted] += 1
    if draft.estimated is not None:
        tally.estimated = (tally.estimated or 0.0) + draft.estimated
    n_predicted = sum(token.source == "prediction" for token in traced_tokens)
    tally.accepted_prediction += n_predicted
    tally.rejected_prediction += sum(source == "prediction" for source in draft.sources.values()) - n_predicted


def _trace_sources(draft: Draft, walk: Walk, token_ids: Sequence[int]) -> tuple[TracedToken, ...]:
    """Return the source of each committed token, and the draft tokens rejected at its position."""
    tree, parent, traced_tokens = draft.tree, 0, list[TracedToken]()
    for token_id, node in zip(token_ids, (*walk.path, None), strict=False):
        if node is None:
            traced_tokens.append(
                TracedToken(token_id, "target", tuple(tree.token_ids[child] for child in tree.below(parent)))
            )
            break
        first_children = () if tree.is_chain else tree.below(parent)
        rejected = (
            tuple(tree.token_ids[child] for child in first_children) if first_children[:1] not in ((), (node,)) else ()
        )
        traced_tokens.append(TracedToken(token_id, draft.sources.get(node, "draft"), rejected))
        parent = node
    return tuple(traced_tokens)


def _draft_by_grammar(context: Context, room: int, drafter: Drafter) -> Draft | None:
    """Return a draft of the tokens that the request's grammar forces; None if fewer than `MIN_FORCED_TOKENS`.

    A continuation from earlier text follows them, such as the arguments of an earlier call.
    """
    grammar = context.rule.grammar
    token_ids = [] if grammar is None else grammar.forced(context.token_ids)[: min(room, MAX_FORCED_TOKENS)]
    if len(token_ids) < MIN_FORCED_TOKENS:
        return None
    guesses = drafter.guesses_behind(token_ids, min(room, MAX_FORCED_TOKENS) - len(token_ids))
    sources: dict[int, TokenSource] = dict.fromkeys(range(1, len(token_ids) + 1), "grammar")
    sources |= {depth: source for depth, (_, source) in enumerate(guesses, len(token_ids) + 1)}
    guessed_ids = (token_id for token_id, _ in guesses)
    return Draft(DraftTree.chain([context.token_ids[-1], *token_ids, *guessed_ids]), sources=sources)


def _commit(context: Context, new_ids: Sequence[int], ending: Ending) -> Sequence[int]:
    committed, context.finish = ending.crop(context.generated, new_ids)
    context.token_ids += committed
    context.rule.forget_before(len(context.token_ids) - context.looks_back)
    return committed
