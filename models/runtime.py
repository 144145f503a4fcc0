"""The one primitive on a model: a pass over rows. Prefill, plain step, draft step, tree and candidates are all it.

A row is a token with its position, the buffer slot its keys and values go to, the slots it may attend to, and the
sub-layers it leaves out. The layer set is an argument of the pass; nothing is ever installed on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..core.errors import ContextOverflow, InvalidInput, LayerSetError, SettingsError, UnsupportedModel
from ..core.types import LayerSet, ModelInfo
from .blocks import Block, submodule
from .buffer import KVBuffer
from .copies import QuantisedCopies
from .families import context_limit, family_of, windows_of
from .rotary import RotaryTables
from .rows import Pass, PassPlan, Rows

if TYPE_CHECKING:
    from .graphs import GraphPasses
    from .kernels.native import NativePasses

PREFILL_ROWS = 512  # rows per prefill pass, so that its mask stays small
PREFILL_ROWS_BESIDE = 128  # where other sequences wait for the pass to end


class Runtime:
    """A decoder-only model of transformers, run sub-layer by sub-layer.

    Raises: UnsupportedModel: its architecture has no row in the table of families, or some of its weights are
        not in memory.
    """

    def __init__(self, hf_model: nn.Module, tokenizer: Any, info: ModelInfo) -> None:
        config = cast(Any, hf_model.config)
        family = family_of(config)
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
        self.parallel = bool(getattr(config, family.parallel_flag, False)) if family.parallel_flag else False
        self.windows = windows_of(config, family, self.n_layers)
        self.blocks = [Block(layer, i, config, family, self.windows[i]) for i, layer in enumerate(layers)]
        self.max_positions = context_limit(config)
        self._embed = submodule(hf_model, family.embed)
        self._positions = submodule(hf_model, family.positions)
        self.final_norm = submodule(hf_model, family.norm)
        self._head = submodule(hf_model, family.head)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.copies = QuantisedCopies(self.blocks, self._head, info.fingerprint)
        self.device: torch.device = self._embed.weight.device
        self.dtype: torch.dtype = self._embed.weight.dtype
        ends = {self.device, self.final_norm.weight.device, self._head.weight.device}
        self.one_device = len({block.device for block in self.blocks} | ends) == 1
        self.rotation = RotaryTables(submodule(hf_model, family.rotary), self.dtype, self.max_positions).of
        self.load = 1  # sequences that its latest pass of the whole model served
        self.speed = "eager"
        self.graphs: GraphPasses | None = None  # what passes are replayed by, see models.loading.at_speed
        self.native: NativePasses | None = None  # what passes are computed by in place of torch, likewise

    @property
    def dtype_name(self) -> str:
        """The dtype as figures are stored under it, for example "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Whether a row's logits are the same bits whatever rows are beside it, so that drafting changes no bit."""
        return self.native is not None

    @property
    def vocab_size(self) -> int:
        """How many logits a row has."""
        return int(self._head.weight.shape[0])

    def new_buffer(self, capacity: int) -> KVBuffer:
        """An empty buffer of `capacity` slots."""
        if self.graphs is not None:
            return self.graphs.lend(capacity)
        first, devices = self.blocks[0], [block.device for block in self.blocks]
        return KVBuffer(devices, first.n_kv_heads, first.head_dim, capacity, self.dtype)

    def weights_moved(self) -> None:
        """Some weights lie elsewhere now, or are gone: passes that were captured read where they lay."""
        for passes in (self.graphs, self.native):
            if passes is not None:
                passes.forget()

    def drop_copies(self, name: str) -> None:
        """Give back the memory of all quantised copies in a format."""
        self.copies.drop(name)
        self.weights_moved()

    def check_context(self, n_prompt: int, max_new_tokens: int) -> None:
        """Raises: ContextOverflow: prompt and completion together need more positions than the model has."""
        if n_prompt + max_new_tokens > self.max_positions:
            raise ContextOverflow(
                f"a prompt of {n_prompt} tokens with {max_new_tokens} new ones does not fit the model's context of"
                f" {self.max_positions}: shorten the prompt or lower --max-new-tokens"
            )

    def check_layer_set(self, layer_set: LayerSet) -> None:
        """Raises: LayerSetError: the set was made for another depth."""
        if layer_set.n_layers != self.n_layers:
            raise LayerSetError(
                f"the layer set is for {layer_set.n_layers} layers, but this model has {self.n_layers}:"
                " use a set that was tuned on this model"
            )

    def check_depth(self, depth: int) -> None:
        """Raises: SettingsError: no draft can leave this model after `depth` layers. UnsupportedModel: it has one."""
        if self.n_layers == 1:
            raise UnsupportedModel(
                "this model has one layer, so that there is nothing to leave early: use another method"
            )
        if not 0 < depth < self.n_layers:
            raise SettingsError(
                f"a draft cannot leave the model after {depth} of its {self.n_layers} layers:"
                f" use 1 to {self.n_layers - 1}"
            )

    def check_same_tokenizer(self, target: Runtime) -> None:
        """Raises: InvalidInput: this model's token ids do not mean what the target's mean."""
        own: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        other: dict[str, int] = getattr(target.tokenizer, "get_vocab", dict)()
        if own != other:
            raise InvalidInput(
                f"the draft model's tokenizer has other tokens than the target's ({len(own)} and {len(other)} of them):"
                " draft with a smaller model of the same family"
            )

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: Sequence[int],
        buffer: KVBuffer,
        first_slot: int = 0,
        capture: Mapping[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """Run a whole text into slots `first_slot`, …; returns the logits (vocab,) after its last token.

        Args: capture: as in `forward`; a text of several passes appends to it several times.
        """
        for each in self.prefill_passes(token_ids, buffer, first_slot, capture):
            logits = self.forward_together([each])[0]
        return logits[0]

    def prefill_passes(
        self,
        token_ids: Sequence[int],
        buffer: KVBuffer,
        first_slot: int = 0,
        capture: Mapping[int, list[Tensor]] | None = None,
    ) -> Iterator[Pass]:
        """The passes that `prefill` makes; the last one gives the logits (1, vocab) after the text."""
        start = 0
        while start < len(token_ids):
            chunk = token_ids[start : start + (PREFILL_ROWS if self.load == 1 else PREFILL_ROWS_BESIDE)]
            wanted = (len(chunk) - 1,) if start + len(chunk) == len(token_ids) else ()
            yield Pass(self, Rows(chunk, first_slot + start), buffer, wanted, capture)
            start += len(chunk)

    @torch.inference_mode()
    def forward(
        self,
        rows: Rows,
        buffer: KVBuffer,
        n_logits: int | None = None,
        capture: Mapping[int, list[Tensor]] | None = None,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """One pass; returns the logits (n_logits, vocab) of its last rows, in the model's dtype (None: of all rows).

        Args: wanted: the rows that logits are wanted of, in place of `n_logits`.
              capture: depth -> list that the rows' states (rows, hidden_size) after that many layers are appended to.
        """
        if self.native is not None:
            n = len(rows.token_ids)
            last = None if n_logits is None else range(max(0, n - n_logits), n)
            one = Pass(self, rows, buffer, last if wanted is None else wanted, capture)
            return self._native_forward(self.native, [one])[0]
        # Made before the layers run: on a GPU, a transfer waits for what was asked of it before.
        index = None if wanted is None else torch.tensor(wanted, device=self.blocks[-1].device)
        graphs = self.graphs if capture is None and n_logits != 0 else None
        if graphs is not None and (logits := graphs.forward(rows, buffer)) is not None:
            return _chosen(logits, n_logits, index)
        plan = PassPlan(self, rows)
        hidden = self._through(self._embedded(rows.token_ids, plan), plan, buffer, self.blocks, capture)
        kept = _chosen(hidden, n_logits, index)
        if n_logits == 0:
            return kept
        names = {layer_set.format_of("head") for layer_set in rows.variants} or {None}
        if len(names) == 1:
            return self.head(self.normed(kept), names.pop())
        # Several drafts in one pass: logits are wanted of all their rows.
        shares = torch.split(self.normed(kept), plan.share)
        return torch.cat(
            [self.head(own, one.format_of("head")) for one, own in zip(rows.variants, shares, strict=True)]
        )

    @torch.inference_mode()
    def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
        """One pass over the rows of several sequences; the wanted logits (rows, vocab) of each.

        Our kernels read weights once for all rows, and attention goes over each sequence's own buffer: the bits are
        those of passes of their own. Torch's operations run one sequence after the other.
        """
        if self.native is not None:
            return self._native_forward(self.native, passes)
        n_logits = [0 if each.wanted is not None and not each.wanted else None for each in passes]
        return [
            self.forward(each.rows, each.buffer, n, each.capture, None if n == 0 else each.wanted)
            for each, n in zip(passes, n_logits, strict=True)
        ]

    def _native_forward(self, native: NativePasses, passes: Sequence[Pass]) -> list[Tensor]:
        embedded = [self._embedded(each.rows.token_ids, PassPlan(self, each.rows)) for each in passes]
        hidden = embedded[0] if len(embedded) == 1 else torch.cat(embedded)
        self._native_layers(native, hidden, passes, 0, self.n_layers)
        index: list[int] = []  # rows that logits are wanted of
        formats: list[str | None] = []  # of the head, for each of them
        counts: list[int] = []
        first = 0
        for each in passes:
            n, names = len(each.rows.token_ids), [one.format_of("head") for one in each.rows.variants] or [None]
            wanted = range(n) if each.wanted is None else each.wanted
            if len(wanted) > n or not all(0 <= row < n for row in wanted):
                raise ValueError(f"logits of rows {list(wanted)} were asked for in a pass over {n}")
            index += (first + row for row in wanted)
            formats += (names[row // (n // len(names))] for row in wanted)
            counts.append(len(wanted))
            first += n
        if not index:
            return [hidden[:0]] * len(passes)
        if len(set(formats)) == 1:
            of_all = index == list(range(first))
            logits = native.logits(hidden, formats[0], None if of_all else torch.tensor(index, dtype=torch.int32))
        else:
            logits = torch.empty((len(index), self.vocab_size), dtype=self.dtype)
            for name in dict.fromkeys(formats):
                at = [i for i, own in enumerate(formats) if own == name]
                logits[at] = native.logits(hidden, name, torch.tensor([index[i] for i in at], dtype=torch.int32))
        return list(torch.split(self._capped(logits), counts))

    def _native_layers(
        self,
        native: NativePasses,
        hidden: Tensor,
        passes: Sequence[Pass],
        first: int,
        last: int,
    ) -> None:
        """Change `hidden` to the states after those layers, noting them where passes want it."""
        stops = sorted({depth for each in passes for depth in each.capture or () if first < depth <= last})
        for stop in dict.fromkeys((*stops, last)):
            native.run_layers(hidden, passes, first, stop)
            if stop in stops:
                own = torch.split(hidden, [len(each.rows.token_ids) for each in passes])
                for each, states in zip(passes, own, strict=True):
                    if each.capture is not None and stop in each.capture:
                        each.capture[stop].append(states.clone())
            first = stop

    def states(self, token_ids: Tensor, plan: PassPlan, buffer: KVBuffer) -> Tensor:
        """The states (rows, hidden_size) after all layers, of a plan that need not be that of a list of rows."""
        return self._through(self._embedded(token_ids, plan), plan, buffer, self.blocks, None)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int], first_slot: int) -> Tensor:
        """The state (rows, hidden_size) of a chain of rows before the first layer; see `run_layers`."""
        return self._embedded(token_ids, PassPlan(self, Rows(token_ids, first_slot)))

    @torch.inference_mode()
    def run_layers(self, hidden: Tensor, first_slot: int, buffer: KVBuffer, first: int, last: int) -> Tensor:
        """Run a chain of rows at `first_slot` … through layers first … last - 1; `hidden` is (rows, hidden_size)."""
        rows = Rows([0] * hidden.shape[0], first_slot)
        if self.native is not None:
            hidden = hidden.clone()
            self._native_layers(self.native, hidden, [Pass(self, rows, buffer)], first, last)
            return hidden
        plan = PassPlan(self, rows)
        return self._through(hidden, plan, buffer, self.blocks[first:last], None)

    def _embedded(self, token_ids: Sequence[int] | Tensor, plan: PassPlan) -> Tensor:
        hidden = cast(Tensor, self._embed(torch.as_tensor(token_ids, device=self.device)))  # (rows, hidden_size)
        if self._positions is not None:
            hidden = hidden + self._positions(plan.positions(self.device))
        return hidden

    def _through(
        self,
        hidden: Tensor,
        plan: PassPlan,
        buffer: KVBuffer,
        blocks: Sequence[Block],
        capture: Mapping[int, list[Tensor]] | None,
    ) -> Tensor:
        for block in blocks:
            if not self.one_device:
                hidden = hidden.to(block.device)
            hidden = self._layer(block, hidden, plan, buffer)
            if capture is not None and block.index + 1 in capture:
                capture[block.index + 1].append(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: (rows, vocab) of states (rows, hidden_size), of whatever depth."""
        if self.native is not None:
            return self._capped(self.native.logits(hidden.contiguous()))
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm alone, on its device."""
        return cast(Tensor, self.final_norm(hidden if self.one_device else hidden.to(self.final_norm.weight.device)))

    def head(self, normed: Tensor, name: str | None = None) -> Tensor:
        """The head alone, or its copy in a format: logits (rows, vocab) of normed states (rows, hidden_size)."""
        head = self.head_module(name)
        if self.native is not None and normed.dtype == self.dtype and not normed.requires_grad:
            logits = self.native.logits(normed.contiguous(), name, normed=False)
        elif self.one_device:
            logits = cast(Tensor, head(normed))
        else:
            logits = head(normed.to(self._head.weight.device)).to(self.device)
        return self._capped(logits)

    def head_module(self, name: str | None) -> Any:
        """The head, or its copy in a format."""
        return self._head if name is None else self.copies.head(name)

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def _layer(self, block: Block, hidden: Tensor, plan: PassPlan, buffer: KVBuffer) -> Tensor:
        """One decoder layer, each sub-layer for the rows whose layer set keeps it, in the format it wants."""
        attn_groups, mlp_groups = plan.kept[block.index]
        source = hidden
        for name, variants in attn_groups:
            parts = None if name is None else self.copies.parts("attn", block.index, name)
            if variants == plan.every:
                hidden = hidden + block.attention(hidden, plan.group(block, plan.every), buffer, parts)
            else:
                index = plan.row_index(variants, block.device)
                delta = block.attention(source[index], plan.group(block, variants), buffer, parts)
                hidden = hidden.index_add(0, index, delta)
        if not self.parallel:
            source = hidden
        for name, variants in mlp_groups:
            parts = None if name is None else self.copies.parts("mlp", block.index, name)
            if variants == plan.every:
                hidden = hidden + block.mlp(source, parts)
            else:
                index = plan.row_index(variants, block.device)
                hidden = hidden.index_add(0, index, block.mlp(source[index], parts))
        return hidden


def _chosen(rows: Tensor, n_last: int | None, index: Tensor | None) -> Tensor:
    if index is not None:
        return rows[index]
    return rows if n_last is None else rows[rows.shape[0] - n_last :]
