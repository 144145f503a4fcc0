"""The rank of a model's head, by its singular values (AdaDecode, Table 4).

python -m swiftopt.bench.head_rank --model MODEL [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import SwiftoptError
from ..models.loading import load

SCHEMA = "swiftopt.head-rank/1"


def head_rank(weight: torch.Tensor) -> tuple[int, float]:
    """Return how many singular values of a matrix (rows, columns) are above 0, and the smallest of all.

    They are the roots of the eigenvalues of its columns' products, in float64: below 1e-7 of the largest is 0.
    """
    wide = weight.double()
    values = torch.linalg.eigvalsh(wide.T @ wide).clamp_min(0).sqrt()
    return int((values > 1e-7 * values.max()).sum()), float(values.min())


def main(args: Sequence[str] | None = None) -> int:
    """Parse, load, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(args)
    model: Any = load(options.model, "auto", "cpu").hf_model
    head = model.get_output_embeddings().weight.detach()
    rank, smallest = head_rank(head)
    vocab, width = head.shape
    report = {"model": options.model, "vocab": vocab, "width": width, "rank": rank, "smallest": smallest}
    if options.json:
        print(json.dumps({"schema": SCHEMA, **report}))
    else:
        print(f"{vocab} x {width}: {rank} singular values above 0, the smallest {smallest:.5f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SwiftoptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
