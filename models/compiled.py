"""The pieces of sub-layers compiled by torch.compile: what surrounds attention over the buffer, which stays eager.

Each piece is compiled once per runtime and weight format for one row, and once for several: layers are alike, so that
one compilation serves all of them, and the number of rows is the only dimension that changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch

from ..core.errors import SettingsError
from .blocks import EAGER, Block, Pieces
from .runtime import Runtime

WARM_ROWS = (1, 2)  # the second width shows the compiler that their number changes


@torch.inference_mode()
def compile_pieces(runtime: Runtime) -> None:
    """Run the runtime's sub-layers compiled from now on; seconds to a minute at the first use on a machine.

    Raises: SettingsError: torch cannot compile here, where there is no C++ compiler for example; nothing has changed.
    """
    from torch._dynamo.exc import TorchDynamoException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler warns of torch's own code
            pieces = Pieces(*(_compiled(piece) for piece in (EAGER.enter, EAGER.leave, EAGER.mlp)))
            for n_rows in WARM_ROWS:
                for block in runtime.blocks:
                    _run_once(runtime, block, pieces, n_rows)
    except TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(
            f"torch.compile does not work on this machine ({reason}): install a C++ compiler, or use the eager runtime"
        ) from error
    for block in runtime.blocks:
        block.pieces = pieces


def _compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled copy of a function, with code of its own: what is compiled hangs on the code, and its number is
    limited."""
    own = cast(FunctionType, piece)
    copy = FunctionType(own.__code__.replace(), own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    return torch.compile(copy)


def _run_once(runtime: Runtime, block: Block, pieces: Pieces, n_rows: int) -> None:
    hidden = torch.zeros((n_rows, int(runtime.config.hidden_size)), dtype=runtime.dtype, device=block.device)
    table = runtime.rotation(block.layer_type, block.device, n_rows)
    cos, sin = (None, None) if table is None else (part[:n_rows, None] for part in table)
    query = pieces.enter(block.parts, block.heads, hidden, cos, sin)[0]
    pieces.leave(block.parts, query.reshape(n_rows, block.heads.n_heads * block.heads.width))
    pieces.mlp(block.parts, hidden)
