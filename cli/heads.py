"""`swiftopt heads`: light heads at intermediate layers, for early predictions."""

from __future__ import annotations

from typing import Any

import click

from ..core.errors import SettingsError
from ..training.settings import HeadSettings
from .learned import run_training, stored_commands, training_options
from .options import PresetGroup, from_field, pick


@click.group(cls=PresetGroup, short_help="Train heads that predict tokens early.")
def heads() -> None:
    """Light heads at intermediate layers, which `adadecode` and `paradecode` predict tokens with.

    \b
    Example:
      swiftopt heads train --model smollm2-135m --stream prompts.jsonl --task code
      swiftopt heads list
    """


class Layers(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(word) for word in str(value).split(","))
        except ValueError as error:
            raise SettingsError(f"layers {value!r} are no numbers: give them like 8,15,22") from error


@heads.command(short_help="Train heads on a model's own completions.")
@training_options(HeadSettings)
@from_field(
    HeadSettings, "layers", "Layers run before each head.  [default: 0.6, 0.73 and 0.87 of the depth]", type=Layers()
)
@click.option("--full", is_flag=True, help="Train whole heads, not transforms before the model's own.")
def train(**options: Any) -> None:
    """Train heads that say after some layers what the last one will say, on the model's own greedy completions.

    The model stays as it is. A tenth of the prompts is held out for the figures. Several --stream give one set of heads
    for all, stored for the task `mixed`. Cut at any time, the same command goes on where it was. The paper trains for
    100 epochs; --epochs 100 does, where there is time.

    \b
    Example:
      swiftopt heads train --model smollm2-135m --stream prompts.jsonl --task code --minutes 10
    """
    run_training("heads", pick(HeadSettings, options), options)


stored_commands(heads, "heads")
