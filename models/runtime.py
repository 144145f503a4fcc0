"""Runs passes over rows. Prefill, plain steps, draft steps, tree verification and the scoring of candidates are passes.

A row is a token with its position, the buffer slot of its key and value, the slots that it may attend to, and the
sub-layers that it skips. The layer set is an argument of the pass; the model itself is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.costs import ExpertCounts
from ..core.errors import UnsupportedModel
from ..core.records import ModelInfo
from .blocks import Block, submodule, whole_set
from .buffer import KVBuffer
from .coded import weight_form
from .config_layout import (
    context_limit,
    is_parallel,
    mixes_in_turns,
    query_scale,
    rotation_types,
    rows_as_costly,
    slot_shapes,
    windows_of,
)
from .copies import QuantisedCopies
from .expert_choice import mixtures_of
from .expert_counts import ExpertCounter
from .families import family_of
from .layer_inputs import PerLayerInputs
from .parts import refuse_unnamed
from .passes import CapturedPasses, KernelPasses
from .recurrent import RecurrentStates, state_bytes
from .residual import Residual
from .rotation import TablesByType, rotation_tables
from .row_tables import SharedRows, TablePlan
from .rows import (
    BufferPlan,
    HeadRows,
    Pass,
    PassPlan,
    Rows,
    best_of,
    by_form,
    plans_of,
    read_together,
    rows_of,
    token_ids_of,
)
from .runtime_checks import RuntimeChecks
from .state_rules import StateForm
from .transfers import uploaded

PREFILL_ROWS = 512  # Rows per prefill pass, limited to keep the attention mask small.
# Recurrent states are copied every SNAPSHOT_EVERY tokens, and SNAPSHOT_BEFORE tokens before a prompt's end: the next
# turn of a chat repeats the prompt, but not the tokens with which its template opens the answer.
SNAPSHOT_EVERY = 2048
SNAPSHOT_BEFORE = 16
PREFILL_ROWS_BESIDE = 128  # Rows per prefill pass while other sequences are waiting for it to finish.


class Runtime(RuntimeChecks):
    """A decoder-only model of transformers, run sub-layer by sub-layer.

    Raises: UnsupportedModel: no row of `FAMILIES` describes its architecture, some of its weights are not in memory, or
        it has a module, parameter, buffer or hook that its row does not name.
    """

    def __init__(self, hf_model: nn.Module, tokenizer: Any, info: ModelInfo) -> None:
        config = cast(Any, hf_model.config)
        self.family = family = family_of(config)
        if any(parameter.is_meta for parameter in hf_model.parameters()):
            raise UnsupportedModel(
                "some of the model's weights are offloaded (on the meta device), and a pass would read nothing there:"
                " load it on devices that hold all of it, or on cpu"
            )
        layers = cast(nn.ModuleList, hf_model.get_submodule(family.layers))
        self.hf_model = hf_model
        self.config = config
        self.tokenizer = tokenizer
        self.info = info
        self.n_layers = len(layers)
        self.parallel, self.mixes_in_turns = is_parallel(config), mixes_in_turns(config)
        self.windows = windows_of(config, family, self.n_layers)
        types = rotation_types(config, family, self.windows)
        self.blocks = [Block(layer, i, config, family, self.windows[i], types[i]) for i, layer in enumerate(layers)]
        self._slots = slot_shapes(config)
        self.whole = whole_set(self.blocks)
        self.givers = frozenset(block.source for block in self.blocks if block.source != block.index)
        self.layer_inputs = PerLayerInputs.of(hf_model, family, config)
        self.mixtures = mixtures_of(self.blocks)
        self.max_positions = context_limit(config)
        self._embed = submodule(hf_model, family.embed)
        self._embed_scale = getattr(config, family.embed_scale or "", None)
        self._positions = submodule(hf_model, family.positions)
        self._first_position = int(getattr(self._positions, "offset", 0))  # OPT's table begins with two unused rows.
        self.final_norm = submodule(hf_model, family.norm)
        self._head, self._softcap = submodule(hf_model, family.head), getattr(config, "final_logit_softcapping", None)
        self.suppressed: Tensor | None = None  # Tokens that are never generated, int64 (n,).
        self._logit_scale = getattr(config, family.logit_scale or "", None)
        self._logit_divisor = getattr(config, family.logit_divisor or "", None)
        rotary = submodule(hf_model, family.rotary)
        outside = (self._embed, self._positions, self.final_norm, self._head, rotary)
        holders: list[Any] = [self.layer_inputs, *(part for block in self.blocks for part in (block.parts, block.end))]
        called = (part for holder in holders if holder is not None for part in holder.modules())
        tensors = (tensor for block in self.blocks for tensor in (block.sinks, block.end and block.end.scale))
        refuse_unnamed(hf_model, (*outside, *called), tensors)
        self.copies = QuantisedCopies(self.blocks, self._head, info.fingerprint)
        self.device, self.dtype, _ = weight_form(self._embed)
        self._head_device, _, head_shape = weight_form(self._head)
        self.vocab_size = head_shape[0]  # Number of logits per row.
        places = {self.device, self.norm_device, self._head_device, *(block.device for block in self.blocks)}
        self.one_device = len(places) == 1
        self.counter = ExpertCounter(self.blocks, self.device)
        self.reads_late = self.device.type == "cuda"  # CUDA runs asynchronously: reading a result waits for it.
        self.rotation: TablesByType = rotation_tables(
            rotary, self.dtype, self.max_positions, family, query_scale(config, family)
        )
        self.mtp: Runtime | None = None  # The multi-token-prediction layer; `models.loading.mtp_of` reads it.
        self.mtp_folder: Path | None = None  # The checkpoint's folder, if the checkpoint has such a layer.
        self.speed = "eager"
        self.graphs: CapturedPasses | None = None  # Captured CUDA graphs, if used; set by models.loading.at_speed.
        self.native: KernelPasses | None = None  # The C++ kernels for CPUs, if used; set by at_speed.
        self.row_invariant = False  # Whether each row is summed in the same order in any batch; set by at_speed.
        self.by_table = False  # Whether one kernel call computes attention over several KV buffers; set by at_speed.

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in stored results, for example "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Whether a row's logits have the same bits in any batch, so that drafting changes no bit."""
        return self.native is not None or self.row_invariant

    @property
    def norm_device(self) -> torch.device:
        """Device of the final norm; a norm without weights runs on the last layer's device."""
        norm = submodule(self.hf_model, self.family.norm)
        return next((weight.device for weight in norm.parameters()), self.blocks[-1].device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one KV buffer slot: keys and values of all attention layers, and inputs of short convolutions.

        At least 1, because memory is divided into slots, also for a model that only has recurrent states.
        """
        return max(1, sum(shape.n_values for shape in self._slots if shape) * self.dtype.itemsize)

    def new_buffer(self, capacity: int, n_rows: int | None = None, lag: int = 0) -> KVBuffer:
        """Return a buffer for a sequence.

        Args: n_rows: the most rows of a pass after the committed text (None: `capacity`). lag: how many of the last
              committed slots the rows of a search may leave unread. Both take memory if layers are recurrent.
        """
        devices, states = [block.device for block in self.blocks], None
        if self.recurrent:
            form, places = self.recurrent[0], {block.index: block.device for block in self.blocks if block.rule}
            states = RecurrentStates(places, self.n_layers, form, self.dtype, n_rows or capacity, lag)
        sources = [block.source for block in self.blocks] if self.givers else ()
        return KVBuffer(devices, self._slots, capacity, self.dtype, states, sources)

    @cached_property
    def recurrent(self) -> list[StateForm]:
        """The sizes of each recurrent layer's state; all layers of a model have the same."""
        return [block.rule.form for block in self.blocks if block.rule is not None]

    def state_bytes(self, n_rows: int, lag: int = 0) -> int:
        """Bytes of one sequence's recurrent states; the arguments are those of `new_buffer`."""
        return state_bytes(self.recurrent, self.dtype, n_rows, lag)

    def weights_moved(self) -> None:
        """Drop the captured passes: they hold addresses of weights that have moved or been freed."""
        for passes in (self.graphs, self.native):
            if passes is not None:
                passes.forget()

    def drop_copies(self, name: str) -> None:
        self.copies.drop(name)
        self.weights_moved()

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], buffer: KVBuffer, first_slot: int = 0) -> Tensor:
        """Run a text into the slots from `first_slot` on; return the logits (vocab,) after its last token."""
        for pass_ in self.prefill_passes(token_ids, buffer, first_slot):
            logits = self.forward_together([pass_])[0]
        return logits[0]

    def _rows_beside(self, first_slot: int) -> int:
        """Return the rows of a prefill pass while others wait; on a CPU, so many that it takes as long at any depth."""
        if self.device.type != "cpu":
            return PREFILL_ROWS_BESIDE
        attentions = ((block.heads, block.window) for block in self.blocks if block.has_attention)
        return rows_as_costly(attentions, self.info.n_parameters, PREFILL_ROWS_BESIDE, first_slot)

    def prefill_passes(
        self, token_ids: Sequence[int], buffer: KVBuffer, first_slot: int = 0,
        capture: Mapping[int, list[Tensor]] | None = None, is_shared: Callable[[], bool] = lambda: False,
        every_row: bool = False,
    ) -> Iterator[Pass]:  # fmt: skip
        """The passes that `prefill` makes; the last one gives the logits (1, vocab) after the text.

        Args: capture: as in `forward`; each pass appends to it.
              is_shared: tells whether other sequences wait for the next pass, which is then shorter.
              every_row: each pass gives the logits of all its rows.
        """
        start, snapshot_at = 0, len(token_ids) - SNAPSHOT_BEFORE
        while start < len(token_ids):
            n_rows = self._rows_beside(first_slot + start) if is_shared() else PREFILL_ROWS
            if self.recurrent and start < snapshot_at:
                n_rows = min(n_rows, snapshot_at - start)
            chunk = token_ids[start : start + n_rows]
            last_row = (len(chunk) - 1,) if start + len(chunk) == len(token_ids) else ()
            rows = Rows(chunk, first_slot + start, is_text=True)
            buffer.commit(first_slot + start)
            yield Pass(self, rows, buffer, None if every_row else last_row, capture, kind="beside")
            start += len(chunk)
            buffer.commit(first_slot + start, start == snapshot_at or (first_slot + start) % SNAPSHOT_EVERY == 0)

    def forward(
        self,
        rows: Rows,
        buffer: KVBuffer,
        wanted: Sequence[int] | None = None,
        capture: Mapping[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """Run one pass; return the logits (wanted, vocab) in the model's dtype.

        Args: wanted: the rows whose logits are returned (None: all).
              capture: depth -> list to which the states (rows, hidden_size) after that many layers are appended.
        """
        return self.forward_together([Pass(self, rows, buffer, wanted, capture)])[0]

    @torch.inference_mode()
    def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Run passes of several sequences as one; return the wanted logits (rows, vocab) of each.

        All passes have the same `layers`. Weights are read once for all rows, and attention reads each sequence's own
        buffer. Our kernels give the same bits as if each pass ran alone.
        """
        replayed = None if self.graphs is None else self.graphs.forward(passes)
        return self._computed(passes) if replayed is None else replayed

    @torch.inference_mode()
    def read_best(self, logits: Sequence[Tensor], unread: Sequence[Tensor | None]) -> list[list[float]]:
        """Return the most probable token of each row (of equal ones the first), in one transfer from the device.

        Args: logits: (rows, vocab) of each sequence. unread: a sequence's other numbers on the device; they follow its
              tokens in the result.
        """
        if self.device.type == "cpu":
            best = [best_of(rows) if self.native is None else self.native.best(rows) for rows in logits]
            read = [[] if part is None else part.flatten().tolist() for part in (*best, *unread)]
        else:  # Concatenate first, to launch as few kernels as possible.
            best = list(torch.split(best_of(torch.cat(list(logits))), [len(rows) for rows in logits]))
            read = read_together(*best, *unread)
        return [tokens + numbers for tokens, numbers in zip(read[: len(best)], read[len(best) :], strict=True)]

    def _computed(self, passes: Sequence[Pass]) -> list[Tensor]:
        # Upload the row indices before the layers are launched: on a GPU, a transfer waits for all earlier work.
        rows_and_heads = [self._wanted(pass_) for pass_ in passes]
        plans = plans_of(self, passes)
        formats = [name for _, names in rows_and_heads for name in names]
        rows = [
            plan.first + row for plan, (pass_rows, _) in zip(plans, rows_and_heads, strict=True) for row in pass_rows
        ]
        reads_all = rows == list(range(plans[-1].first + plans[-1].n))
        at_format = {name: [i for i, other in enumerate(formats) if other == name] for name in dict.fromkeys(formats)}
        indices = {name: self._index([rows[i] for i in pass_rows]) for name, pass_rows in at_format.items()}
        hidden, inputs = self._begun(passes, plans), self.inputs_of(plans)
        first, last = passes[0].layers or (0, self.n_layers)
        read: HeadRows | None = None
        if len(at_format) == 1:
            ((name, index),) = indices.items()
            read = name, None if reads_all else index
        kinds = self.counter.begin(passes, plans)
        hidden, computed = self._between(hidden, passes, plans, first, last, inputs, read)
        self.counter.end(kinds)
        if not rows:
            return [hidden[:0]] * len(passes)
        if computed is not None:
            logits = self._capped(computed)
        elif read is not None:
            logits = self.logits(hidden, *read)
        else:
            logits = torch.empty((len(rows), self.vocab_size), dtype=self.dtype, device=self.device)
            for name, index in indices.items():
                logits.index_copy_(0, uploaded(at_format[name], self.device), self.logits(hidden, name, index))
        sizes = [len(pass_rows) for pass_rows, _ in rows_and_heads]
        return [logits] if len(sizes) == 1 else list(torch.split(logits, sizes))

    def _begun(self, passes: Sequence[Pass], plans: Sequence[PassPlan]) -> Tensor:
        """Return the states (rows, hidden_size) that passes begin with; our kernels overwrite them."""
        if all(pass_.hidden is None for pass_ in passes):
            return self._embedded(plans)
        states = [
            self._embedded([plan]) if pass_.hidden is None else pass_.hidden
            for pass_, plan in zip(passes, plans, strict=True)
        ]
        if len(states) > 1:
            return torch.cat(states)
        return states[0] if self.native is None else states[0].clone()

    def _wanted(self, pass_: Pass) -> tuple[Sequence[int], list[str | None]]:
        """Return the rows of a pass whose logits are wanted, and the LM head's format for each."""
        n, names = len(pass_.rows.token_ids), [variant.format_of("head") for variant in pass_.rows.variants] or [None]
        rows_read = range(n) if pass_.wanted is None else pass_.wanted
        if len(rows_read) > n or not all(0 <= row < n for row in rows_read):
            raise ValueError(f"logits of rows {list(rows_read)} were asked for in a pass over {n}")
        return rows_read, [names[row // (n // len(names))] for row in rows_read]

    def _index(self, rows: Sequence[int]) -> Tensor:
        if self.native is not None:
            return torch.tensor(rows, dtype=torch.int32)
        return uploaded(rows, self.blocks[-1].device)

    def _between(
        self,
        hidden: Tensor,
        passes: Sequence[Pass],
        plans: Sequence[PassPlan],
        first: int,
        last: int,
        inputs: Tensor | None,
        read: HeadRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the states after layers first … last - 1; record the intermediate states that passes capture.

        Our kernels also return the logits of the rows to `read`: in one run with the last layers, threads wake once.
        """
        stops = sorted({depth for pass_ in passes for depth in pass_.capture or () if first < depth <= last})
        by_table = self.row_invariant or (self.by_table and len(plans) > 1)
        shared: SharedRows = TablePlan(self) if by_table else BufferPlan()
        logits: Tensor | None = None
        for stop in dict.fromkeys((*stops, last)):
            if self.native is None:
                hidden = self.through(hidden, plans, shared, first, stop, inputs)
            else:  # The kernels update `hidden` in place.
                logits = self.native.run_layers(hidden, passes, first, stop, read if stop == last else None, inputs)
            first = stop
            if stop not in stops:
                continue
            for pass_, states in zip(passes, torch.split(hidden, [plan.n for plan in plans]), strict=True):
                if pass_.capture is not None and stop in pass_.capture:
                    pass_.capture[stop].append(states if self.native is None else states.clone())
        return hidden, logits

    def taken_experts(self) -> ExpertCounts | None:
        """Return which experts rows took since the last call; None: none, or the numbers are still on a GPU."""
        return self.counter.taken() if self.native is None else self.native.taken_experts()

    @property
    def n_first(self) -> int:
        return 0 if self.graphs is None else self.graphs.n_first

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int] | Tensor, first_slot: int) -> Tensor:
        """Return the states (rows, hidden_size) of a chain of rows before the first layer; see `run_layers`."""
        return self._embedded([PassPlan(self, Rows(token_ids, first_slot))])

    @torch.inference_mode()
    def run_layers(
        self,
        hidden: Tensor,
        first_slot: int,
        buffer: KVBuffer,
        first: int,
        last: int,
        token_ids: Sequence[int] | None = None,
    ) -> Tensor:
        """Run a chain of rows, from `first_slot` on, through layers first … last - 1; return their states.

        Args: hidden: (rows, hidden_size). token_ids: the rows' tokens; only models with per-layer inputs need them.
        """
        states: list[Tensor] = []
        rows = Rows(token_ids or [0] * hidden.shape[0], first_slot)
        self._computed([Pass(self, rows, buffer, (), {last: states}, hidden=hidden, layers=(first, last))])
        return states[0]

    def _embedded(self, plans: Sequence[PassPlan]) -> Tensor:
        """Return the states (rows, hidden_size) of all plans' tokens before the first layer."""
        token_ids = token_ids_of(plans, self.device)
        if self._positions is None:
            return self.entered(token_ids)
        return self.entered(token_ids, torch.cat([plan.positions(self.device) for plan in plans]))

    def entered(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the states (rows, hidden_size) of tokens before the first layer; positions: of learned embeddings."""
        hidden = cast(Tensor, self._embed(token_ids))
        if self._embed_scale is not None:
            hidden = hidden * self._embed_scale
        if self.family.embed_norm is not None:
            hidden = self.final_norm(hidden)
        if self._positions is None:
            return hidden
        assert positions is not None
        return hidden + nn.Embedding.forward(self._positions, positions + self._first_position)

    def inputs_of(self, plans: Sequence[PassPlan]) -> Tensor | None:
        """Return the per-layer inputs (rows, layers * width) of all plans' tokens; None: the model has none."""
        given = self.layer_inputs
        if given is None:
            return None
        token_ids = token_ids_of(plans, self.device)
        embedded, of_tokens = self.entered(token_ids), given.of_tokens(token_ids)
        return given.joined(embedded, of_tokens) if self.native is None else self.native.join(embedded, of_tokens)

    def through(
        self,
        hidden: Tensor,
        plans: Sequence[PassPlan],
        shared: SharedRows,
        first: int,
        last: int,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the states (rows, hidden_size) of all plans' rows after layers first … last - 1.

        Args: inputs: per-layer inputs (rows, layers * width), see `PerLayerInputs`.
        """
        states = Residual(hidden)
        for block in self.blocks[first:last]:
            if not self.one_device:
                states = Residual(states.whole().to(block.device))
            states = self._layer(block, states, plans, shared)
            if block.end is not None:
                states = Residual(block.end.ended(states.whole(), inputs))
        return states.whole()

    def logits(self, hidden: Tensor, name: str | None = None, index: Tensor | None = None) -> Tensor:
        """Apply final norm and LM head to states (rows, hidden_size) of any depth; return logits (rows, vocab).

        Args: name: format of a copy of the head (None: the head itself). index: the rows that are wanted (None: all),
              int32 for our kernels, else int64.
        """
        if self.native is not None:
            return self._capped(self.native.logits(hidden.contiguous(), name, index))
        return self.head(self.normed(hidden if index is None else hidden[index]), name)

    def normed(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.final_norm(hidden if self.one_device else hidden.to(self.norm_device)))

    def take_head(self, head: nn.Module) -> None:
        self._head = self.copies.head_map = head

    def head(self, normed: Tensor, name: str | None = None) -> Tensor:
        """Apply the LM head, or its copy in a format, to normed states (rows, hidden_size); return (rows, vocab)."""
        head = self.head_module(name)
        if self.native is not None and normed.dtype == self.dtype and not normed.requires_grad:
            logits = self.native.logits(normed.contiguous(), name, normed=False)
        elif self.one_device:
            logits = cast(Tensor, head(normed))
        else:
            logits = head(normed.to(self._head_device)).to(self.device)
        return self._capped(logits)

    def head_module(self, name: str | None) -> Any:
        return self._head if name is None else self.copies.head(name)

    def _capped(self, logits: Tensor) -> Tensor:
        if self._logit_scale is not None:
            logits = logits * self._logit_scale
        if self._logit_divisor is not None:
            logits = logits / self._logit_divisor
        capped = logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap
        return capped if self.suppressed is None else capped.index_fill(-1, self.suppressed, -torch.inf)

    def _layer(self, block: Block, hidden: Residual, plans: Sequence[PassPlan], shared: SharedRows) -> Residual:
        """Run one decoder layer: each sub-layer only on rows whose layer set keeps it, in that layer set's form."""
        source = hidden
        for kind in block.kinds:
            if kind == "mlp" and not self.parallel:
                source = hidden
            for form, members in by_form(plans, block.index, kind).items():
                parts = block.parts if form is None else self.copies.parts(kind, block.index, form)
                index = rows_of(members, plans, block.device)
                normed = source.normed(parts.attn_norm if kind == "attn" else parts.mlp_norm, index)
                if kind == "attn":
                    added = block.attention(normed, shared.rows(block, members), parts)
                else:
                    added = block.mlp(normed, parts)
                hidden = hidden.plus(added, index)
        return hidden
