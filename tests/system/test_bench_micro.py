"""`python -m swiftopt.bench.micro attention` from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from native import library


@pytest.mark.slow
def test_attention_is_compared_with_the_rates_of_the_maps() -> None:
    library()
    sizes = ["--contexts", "64,256", "--rows", "1,8", "--threads", "1", "--layers", "1", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "swiftopt.bench.micro", "attention", *sizes], capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [(row["context"], row["rows"]) for row in results] == [(64, 1), (64, 8), (256, 1), (256, 8)]
    assert all(min(row["ratio"], row["gb_s"], row["maps_gb_s"], row["maps_gflop_s"]) > 0 for row in results)
