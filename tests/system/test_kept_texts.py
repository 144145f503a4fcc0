"""What `serve` keeps of texts for a key: found again after a restart, by nobody else, and gone with the key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api import Served, serving
from tiny_files import edit_config, save

from swiftopt.server.settings import new_key

KEYS = {name: new_key(name) for name in ("ci", "laptop")}
PROMPT = " ".join(f"w{2 + i * i % 60}" for i in range(280))


@contextmanager
def server(where: Path) -> Iterator[Served]:
    options = ["--model", f"tiny={where / 'tiny'}", "--dtype", "float32", "--rate", "0", "--threads", "1"]
    options += ["--keep-prefixes", str(where / "prefixes"), "--keep-corpus", str(where / "corpus")]
    with serving(str(where / "a.db"), where / "log", *options, SWIFTOPT_API_KEYS_FILE=str(where / "keys")) as served:
        yield served


def ask(served: Served, key: str, **fields: Any) -> tuple[str, int]:
    """The answer, and the tokens of the prompt that were not read for it."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 1.5, "seed": 1}
    headers = {"Authorization": f"Bearer {KEYS[key][0]}"}
    answer = served.client.post("/v1/completions", json={**body, **fields}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return answer.json()["choices"][0]["text"], details["cached_tokens"]


def gauge(served: Served, name: str) -> float:
    line = next(line for line in served.client.get("/metrics").text.splitlines() if line.startswith(f"swiftopt_{name}"))
    return float(line.split()[-1])


@pytest.mark.slow
def test_kept_texts_belong_to_a_key_and_outlive_the_server(tmp_path: Path) -> None:
    edit_config(save(tmp_path / "tiny"), max_position_embeddings=512)
    (tmp_path / "keys").write_text("\n".join(entry for _, entry in KEYS.values()))
    with server(tmp_path) as served:
        first, n_cached = ask(served, "ci")
        assert n_cached == 0
        assert ask(served, "ci") == (first, 279)
        assert ask(served, "ci", cache_salt="other") == ask(served, "laptop") == (first, 0)
        assert gauge(served, "prefix_cache_tokens") > 800 and gauge(served, "corpus_tokens") > 180
    with server(tmp_path) as served:
        assert ask(served, "ci") == (first, 256), "whole blocks"
        assert gauge(served, "prefix_cache_disk_tokens_total") == 256
        (tmp_path / "keys").write_text(KEYS["laptop"][1])
        until = time.monotonic() + 20
        while {path.name for path in tmp_path.glob("*/*/key-*")} != {"key-laptop"}:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert ask(served, "laptop") == (first, 256)
    assert {path.name for path in tmp_path.glob("*/*/key-*")} == {"key-laptop"}
