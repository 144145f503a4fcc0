"""A server that runs already, over the completions of OpenAI's API; its answers must tell their token ids.

vLLM does so when asked with `return_token_ids`, llama.cpp's server with `verbose` and `return_tokens`.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

KEY = "SWIFTOPT_ENGINE_API_KEY"  # environment: the server's key, if it wants one


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: url, of the server or of its /v1; timeout_s."""
    url = options["url"].rstrip("/").removesuffix("/v1")
    timeout_s = float(options.get("timeout_s", 600.0))

    def ask(path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=timeout_s) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            words = error.read(300).decode(errors="replace")
            raise RuntimeError(f"{url}{path} answered {error.code}: {words}") from error
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{url}{path} does not answer ({error}): is the server running?") from error
        if not isinstance(found, dict):
            raise RuntimeError(f"{url}{path} answered no JSON object")
        return found

    try:
        model = ask("/v1/models")["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise RuntimeError(f"{url}/v1/models lists no model: it is no server with OpenAI's API") from error

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        body = {
            **{"model": model, "prompt": asked["prompt_ids"], "max_tokens": asked["max_new_tokens"]},
            **{"temperature": 0, "ignore_eos": True, "cache_prompt": False},
            **{"return_token_ids": True, "return_tokens": True, "verbose": True},
        }
        done = ask("/v1/completions", body)
        choice = (done.get("choices") or [{}])[0]
        token_ids = choice.get("token_ids") or (done.get("__verbose") or {}).get("tokens")
        if not token_ids:
            raise RuntimeError(f"{url} tells no token ids: use vLLM's or llama.cpp's own server")
        timings = done.get("timings") or {}
        found = {"token_ids": token_ids, "prefill_s": timings["prompt_ms"] / 1000 if "prompt_ms" in timings else None}
        if "draft_n" in timings:
            found |= {"drafted": timings["draft_n"], "accepted": timings["draft_n_accepted"]}
        return found

    return answer
