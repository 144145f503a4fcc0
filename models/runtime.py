"""The one primitive on a model: a pass over rows. Prefill, plain step, draft step, tree and candidates are all it.

A row is a token with its position, the buffer slot its keys and values go to, the slots it may attend to, and the
sub-layers it leaves out. The layer set is an argument of the pass; nothing is ever installed on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.errors import ContextOverflow, LayerSetError, UnsupportedModel
from ..core.types import LayerSet, ModelInfo
from .blocks import Block, RowGroup, submodule
from .buffer import KVBuffer
from .families import context_limit, family_of, windows_of

PREFILL_ROWS = 512  # rows per prefill pass, so that its mask stays small


@dataclass(frozen=True, slots=True)
class Rows:
    """What one pass runs over.

    `token_ids` go to slots `first_slot`, `first_slot` + 1, …. Without `visible` the rows are a chain: row i stands at
    position `first_slot` + i and sees every slot up to its own. With it, `positions` are given and `visible` is bool,
    (n, first_slot + n). `variants` splits the rows into equal consecutive shares, each leaving out its own layer set;
    empty means the full model.
    """

    token_ids: Sequence[int]
    first_slot: int
    positions: Sequence[int] | None = None
    visible: Tensor | None = None
    variants: tuple[LayerSet, ...] = ()


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
        self._norm = submodule(hf_model, family.norm)
        self._head = submodule(hf_model, family.head)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._rotary = submodule(hf_model, family.rotary)
        self._rotary_tables: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}
        self.device: torch.device = self._embed.weight.device
        self.dtype: torch.dtype = self._embed.weight.dtype
        ends = {self.device, self._norm.weight.device, self._head.weight.device}
        self.one_device = len({block.device for block in self.blocks} | ends) == 1

    @property
    def dtype_name(self) -> str:
        """The dtype as figures are stored under it, for example "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def new_buffer(self, capacity: int) -> KVBuffer:
        """An empty buffer of `capacity` slots."""
        first = self.blocks[0]
        devices = [block.device for block in self.blocks]
        return KVBuffer(devices, first.n_kv_heads, first.head_dim, capacity, self.dtype)

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

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], buffer: KVBuffer) -> Tensor:
        """Run a whole prompt into slots 0, 1, …; returns the logits (vocab,) after its last token."""
        for start in range(0, len(token_ids), PREFILL_ROWS):
            chunk = token_ids[start : start + PREFILL_ROWS]
            is_last = start + PREFILL_ROWS >= len(token_ids)
            logits = self.forward(Rows(chunk, start), buffer, n_logits=1 if is_last else 0)
        return logits[0]

    @torch.inference_mode()
    def forward(self, rows: Rows, buffer: KVBuffer, n_logits: int | None = None) -> Tensor:
        """One pass; returns the logits (n_logits, vocab) of its last rows, in the model's dtype (None: of all rows)."""
        plan = _PassPlan(self, rows)
        token_ids = torch.tensor(rows.token_ids, device=self.device)
        hidden = cast(Tensor, self._embed(token_ids))  # (rows, hidden_size)
        if self._positions is not None:
            hidden = hidden + self._positions(plan.positions(self.device))
        for block in self.blocks:
            if not self.one_device:
                hidden = hidden.to(block.device)
            hidden = self._layer(block, hidden, plan, buffer)
        kept = hidden if n_logits is None else hidden[hidden.shape[0] - n_logits :]
        if n_logits == 0:
            return kept
        return self._logits(kept)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.one_device:
            logits = cast(Tensor, self._head(self._norm(hidden)))
        else:
            normed = self._norm(hidden.to(self._norm.weight.device))
            logits = self._head(normed.to(self._head.weight.device)).to(self.device)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _layer(self, block: Block, hidden: Tensor, plan: _PassPlan, buffer: KVBuffer) -> Tensor:
        """One decoder layer, each sub-layer for the rows whose layer set keeps it."""
        attn_rows, mlp_rows = plan.kept[block.index]
        source = hidden
        if attn_rows == plan.every:
            hidden = hidden + block.attention(hidden, plan.group(block, plan.every), buffer)
        elif attn_rows:
            index = plan.row_index(attn_rows, block.device)
            delta = block.attention(hidden[index], plan.group(block, attn_rows), buffer)
            hidden = hidden.index_add(0, index, delta)
        if not self.parallel:
            source = hidden
        if mlp_rows == plan.every:
            hidden = hidden + block.mlp(source)
        elif mlp_rows:
            index = plan.row_index(mlp_rows, block.device)
            hidden = hidden.index_add(0, index, block.mlp(source[index]))
        return hidden

    def rotation(self, layer_type: str, device: torch.device, n_positions: int) -> tuple[Tensor, Tensor] | None:
        """Cosine and sign-folded sine (positions, rotary_dim) for at least `n_positions`; None without rotary."""
        if self._rotary is None:
            return None
        table = self._rotary_tables.get((layer_type, device))
        if table is None or table[0].shape[0] < n_positions:
            size = min(self.max_positions, max(n_positions, 1024, 2 * (0 if table is None else table[0].shape[0])))
            probe = torch.empty(0, dtype=self.dtype, device=device)
            positions = torch.arange(max(size, n_positions), device=device)[None]
            cos, sin = self._rotary(probe, positions, layer_type) if layer_type else self._rotary(probe, positions)
            half = sin.shape[-1] // 2
            folded = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            # Dispatched over devices, the rotary module answers on its own, whatever device it was asked for.
            table = (cos[0].to(device), folded.to(device))
            self._rotary_tables[(layer_type, device)] = table
        return table


@lru_cache(maxsize=64)
def keepers(n_layers: int, variants: tuple[LayerSet, ...]) -> tuple[tuple[frozenset[int], frozenset[int]], ...]:
    """Per layer the variants that run its attention and those that run its MLP; no variants is one that runs all."""
    sets = variants or (LayerSet(n_layers),)
    return tuple(
        (
            frozenset(v for v, layer_set in enumerate(sets) if not layer_set.skips("attn", layer)),
            frozenset(v for v, layer_set in enumerate(sets) if not layer_set.skips("mlp", layer)),
        )
        for layer in range(n_layers)
    )


class _PassPlan:
    """What the layers of one pass share: row subsets, rotations and masks, each made once."""

    def __init__(self, runtime: Runtime, rows: Rows) -> None:
        self.runtime = runtime
        self.rows = rows
        self.n = len(rows.token_ids)
        self.end = rows.first_slot + self.n
        self.every = frozenset(range(max(1, len(rows.variants))))
        self.share = self.n // len(self.every)
        self.kept = keepers(runtime.n_layers, rows.variants)
        self._groups: dict[tuple[int | None, str, torch.device, frozenset[int]], RowGroup] = {}
        self._indices: dict[tuple[frozenset[int], torch.device], Tensor] = {}

    def row_index(self, variants: frozenset[int], device: torch.device) -> Tensor:
        """int64, the rows of those variants in order."""
        key = (variants, device)
        if key not in self._indices:
            shares = [torch.arange(v * self.share, (v + 1) * self.share) for v in sorted(variants)]
            self._indices[key] = torch.cat(shares).to(device)
        return self._indices[key]

    def positions(self, device: torch.device) -> Tensor:
        """int64, (rows,)."""
        if self.rows.positions is None:
            return torch.arange(self.rows.first_slot, self.end, device=device)
        return torch.tensor(self.rows.positions, device=device)

    def group(self, block: Block, variants: frozenset[int]) -> RowGroup:
        """The rows of `variants` as `block` sees them."""
        key = (block.window, block.layer_type, block.device, variants)
        if key not in self._groups:
            self._groups[key] = self._make_group(block, variants)
        return self._groups[key]

    def _make_group(self, block: Block, variants: frozenset[int]) -> RowGroup:
        first = self.rows.first_slot
        n_positions = self.end if self.rows.positions is None else max(self.rows.positions) + 1
        table = self.runtime.rotation(block.layer_type, block.device, n_positions)
        cos = sin = None
        if table is not None:
            at = slice(first, self.end) if self.rows.positions is None else self.positions(block.device)
            cos, sin = table[0][at][:, None], table[1][at][:, None]
        spans: tuple[tuple[int, int, int], ...] = ((0, first, self.n),)
        start, mask = self._mask(block)
        if variants != self.every:
            index = self.row_index(variants, block.device)
            cos = None if cos is None else cos[index]
            sin = None if sin is None else sin[index]
            mask = None if mask is None else mask[index]
            spans = tuple((i * self.share, first + v * self.share, self.share) for i, v in enumerate(sorted(variants)))
        return RowGroup(cos, sin, spans, start, self.end, mask)

    def _mask(self, block: Block) -> tuple[int, Tensor | None]:
        """First slot to read and the additive mask over the slots from there, for all rows."""
        window = block.window
        if self.rows.visible is None and self.n == 1:
            return (0 if window is None else max(0, self.end - window)), None
        visible = self._visible()
        if window is not None:
            visible = visible & self._within(window)
        mask = torch.zeros(visible.shape, dtype=self.runtime.dtype)
        mask.masked_fill_(~visible, torch.finfo(self.runtime.dtype).min)
        return 0, mask.to(block.device)

    def _visible(self) -> Tensor:
        """bool, (rows, end): by tree or chain alone, before any window."""
        if self.rows.visible is not None:
            return self.rows.visible
        return torch.arange(self.end)[None] <= torch.arange(self.rows.first_slot, self.end)[:, None]

    def _within(self, window: int) -> Tensor:
        """bool, (rows, end): slots whose *position* is less than `window` behind the row's."""
        own = self.positions(torch.device("cpu"))
        slots = torch.cat((torch.arange(self.rows.first_slot), own))
        return slots[None] > own[:, None] - window
