"""`swiftopt probe`: a linear probe that predicts whether an early token is accepted."""

from __future__ import annotations

from typing import Any

import click

from ..training.settings import ProbeSettings
from .learned import run_training, stored_commands, training_options
from .options import PresetGroup, from_field, pick


@click.group(cls=PresetGroup, short_help="Train a probe that predicts acceptance.")
def probe() -> None:
    """A linear probe at an early exit, which `adaspeed-probe` decides with when to stop drafting.

    \b
    Example:
      swiftopt probe train --model smollm2-135m --stream prompts.jsonl --task code
      swiftopt probe list
    """


@probe.command(short_help="Train a probe on a model's own completions.")
@training_options(ProbeSettings)
@from_field(ProbeSettings, "layer", "Layers run before the exit.  [default: a quarter of the depth]", type=int)
@from_field(ProbeSettings, "sampling", "How the exit's token is chosen, and what counts as accepted.")
def train(**options: Any) -> None:
    """Train a probe that predicts from an early state whether the token read there will be accepted.

    A tenth of the prompts of the stream is held out for the figures. Cut at any time, the same command goes on where it
    was.

    \b
    Example:
      swiftopt probe train --model smollm2-135m --stream prompts.jsonl --task code --sampling top-p
    """
    run_training("probe", pick(ProbeSettings, options), options)


stored_commands(probe, "probe")
