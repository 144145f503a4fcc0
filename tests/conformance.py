"""Clients that no one here wrote, against a real server: `make conformance`.

    python conformance.py [--model smollm2-135m] [--only llm-comply]

Each is installed from wheels into an environment of its own under the user's cache. llm-comply holds answers to the
schemas of OpenAI's document, for chats and for Responses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
from api import Served, serving

# Of llm-comply; images, phases and reasoning are none of ours.
CASES = ("basic-response", "system-prompt", "multi-turn", "tool-calling", "streaming-response", "streaming-usage")
MODELS_OWN = "got 'incomplete'"  # a small model may go on to the end of its context
FORMS = {"openai-chat": "chat-", "open-responses": ""}  # with what their cases begin


def environment(requirement: str) -> Path:
    """The folder of the programs of an environment that has the package."""
    folder = Path(platformdirs.user_cache_dir("swiftopt")) / "conformance" / requirement.replace("==", "-")
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", requirement], check=True)
        (folder / "done").touch()
    return folder / "bin"


def llm_comply(served: Served, model: str) -> list[str]:
    """What llm-comply finds wrong."""
    program, wrong = environment("llm-comply==0.5.0") / "llm-comply", []
    for form, begin in FORMS.items():
        names = [begin + case for case in (*CASES, "error-handling")]
        common = ["--base-url", f"{served.url}/v1", "--api-key", "none", "--model", model, "--format", form]
        done = subprocess.run(
            [program, *common, "--filter", ",".join(names), "--json", "--timeout", "300", "--ignore", MODELS_OWN],
            capture_output=True,
            text=True,
            check=False,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        for case in report["results"]:
            print(f"llm-comply {form} {case['id']}: {case['status']}")
            wrong += [f"{form} {case['id']}: {error}" for error in case.get("errors", ())]
    return wrong


CLIENTS: dict[str, Callable[[Served, str], list[str]]] = {"llm-comply": llm_comply}


def main() -> None:
    """Run the clients; exits with 1 where one finds something wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", choices=sorted(CLIENTS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        with serving(str(where / "a.db"), where / "log", "--model", f"model={args.model}", "--rate", "0") as served:
            while served.client.get("/health").status_code != 200:
                assert served.process.poll() is None, served.log.read_text()
            wrong = [line for own in CLIENTS if args.only in (None, own) for line in CLIENTS[own](served, "model")]
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
