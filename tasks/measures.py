"""Measures of a comparison besides time: energy, extra memory, and the output's perplexity and quality.

Energy is read from the machine's counters: NVML for an NVIDIA GPU, RAPL for the processor. Quality is the data set's
measure: code is run, and numbers, words and summaries are compared with a reference.
"""

from __future__ import annotations

import re
import secrets
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from math import comb
from os import killpg
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import SettingsError
from ..core.templates import Judge
from ..core.types import Prompt
from ..decoding.methods import Method
from ..models.rows import Rows
from ..models.runtime import Runtime

POWERCAP = Path("/sys/class/powercap")
ROWS = 64  # Tokens per forward pass of `nll`: bounds the memory of logits for large vocabularies.

MEASURES: Mapping[Judge, str] = {
    "code": "pass@1",
    "number": "exact match",
    "match": "exact match",
    "summary": "ROUGE-2",
}
PROGRAM_S = 10  # Time limit of a judged program, in seconds.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True, slots=True)
class Counter:
    """A rising counter of microjoules, which wraps to 0 after `span` if it has one."""

    source: str
    read: Callable[[], int]
    span: int | None = None

    def between(self, start: int, end: int) -> int:
        """Return the microjoules between two readings."""
        return end - start if end >= start or self.span is None else end + self.span - start


class EnergyMeter:
    """Measures the energy of whole devices, including that of other programs on them.

    `source` names the counters ("nvml", "rapl" or both); None if there are none.
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = tuple(counters)
        self.source = " + ".join(dict.fromkeys(counter.source for counter in counters)) or None

    @classmethod
    def of(cls, device: torch.device) -> EnergyMeter:
        """Return a meter of the processor and, for a model on a GPU, of that GPU."""
        return cls([*(nvml(device.index or 0) if device.type == "cuda" else ()), *rapl(POWERCAP)])

    def read(self) -> tuple[int, ...]:
        """Read every counter, for `joules_since`."""
        return tuple(counter.read() for counter in self._counters)

    def joules_since(self, start_counts: Sequence[int]) -> float | None:
        """Return the joules of all counters since a reading by `read`; None if there is no counter."""
        if not self._counters:
            return None
        microjoules = (
            counter.between(start, end)
            for counter, start, end in zip(self._counters, start_counts, self.read(), strict=True)
        )
        return sum(microjoules) / 1e6


def rapl(root: Path) -> list[Counter]:
    """Return a counter per processor package under `root`; [] if they cannot be read (they usually need root)."""
    domains = []
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            # Count only packages: they include their subzones, and "psys" includes them.
            if not (zone / "name").read_text().startswith("package"):
                continue
            int((zone / "energy_uj").read_text())
            max_range = int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        domains.append(Counter("rapl", lambda file=zone / "energy_uj": int(file.read_text()), max_range))  # type: ignore[misc]
    return domains


def nvml(index: int) -> list[Counter]:
    """Return the energy counter of the GPU with this torch index; [] if the GPU has none."""
    library: Any = import_module("pynvml")
    try:
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (library.NVMLError, AttributeError):
        return []
    return [Counter("nvml", lambda: 1000 * int(library.nvmlDeviceGetTotalEnergyConsumption(handle)))]


def extra_bytes(method: Method, runtime: Runtime, n_positions: int, n_new_tokens: int) -> int:
    """Return the bytes of memory that a method needs beyond plain decoding: its tensors and extra KV slots.

    Its tensors are those that it refers to and the target does not: heads, stacks, a draft model. Quantised copies are
    shared by all methods and count for each method that uses them.

    Args: n_positions: tokens of prompt and completion. n_new_tokens: tokens of the completion.
    """
    target_storages = {tensor.untyped_storage().data_ptr() for tensor in _module_tensors(runtime.hf_model)}
    bytes_by_storage: dict[int, int] = {}
    for tensor in _tensors(method, {id(runtime), id(runtime.hf_model)}):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in target_storages:
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
    copy_bytes = 0 if method.layer_set is None else runtime.copies.bytes_of(method.layer_set)
    n_rows = method.drafter.max_rows(n_new_tokens)
    coding = method.drafter.coding(runtime, n_positions + n_rows)
    draft_slot_bytes = method.drafter.slot_bytes + (0 if coding is None else coding.slot_bytes)
    slots_bytes = (n_rows - 1) * runtime.slot_bytes + (n_positions + n_rows) * draft_slot_bytes
    return sum(bytes_by_storage.values()) + copy_bytes + slots_bytes


def _module_tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _tensors(root: Any, seen_ids: set[int]) -> Iterator[Tensor]:
    """Yield every tensor under a value: in modules, containers, and attributes of this package's objects."""
    if id(root) in seen_ids:
        return
    seen_ids.add(id(root))
    children: Iterable[Any] = ()
    if isinstance(root, Tensor):
        yield root
    elif isinstance(root, nn.Module):
        yield from _module_tensors(root)
    elif isinstance(root, Mapping):
        children = root.values()
    elif isinstance(root, list | tuple | set | frozenset):
        children = root
    elif type(root).__module__.startswith(__package__.partition(".")[0]):
        slots = [name for kind in type(root).__mro__ for name in getattr(kind, "__slots__", ())]
        slot_values = [getattr(root, name) for name in slots if hasattr(root, name)]
        children = [*getattr(root, "__dict__", {}).values(), *slot_values]
    for child in children:
        yield from _tensors(child, seen_ids)


@torch.inference_mode()
def nll(runtime: Runtime, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the negative log-likelihood in nats of the tokens after the prompt, under the model's own distribution."""
    if not token_ids:
        return 0.0
    text = [*prompt_ids, *token_ids[:-1]]
    buffer = runtime.new_buffer(len(text))
    n_prefilled = len(prompt_ids) - 1
    if n_prefilled:
        runtime.prefill(text[:n_prefilled], buffer)
    total = 0.0
    for start in range(0, len(token_ids), ROWS):
        rows = text[n_prefilled + start : n_prefilled + start + ROWS]
        logits = runtime.forward(Rows(rows, n_prefilled + start), buffer).float()
        targets = torch.tensor(token_ids[start : start + ROWS], device=logits.device)
        total -= float(torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).double().sum())
    return total


def measure_of(prompts: Sequence[Prompt]) -> str | None:
    """Return the name of the prompts' quality measure; None unless all prompts have the same one."""
    judges = {prompt.reference.get("judge") for prompt in prompts}
    return MEASURES[judges.pop()] if len(judges) == 1 and None not in judges else None  # type: ignore[index]


def check_judges(prompts: Sequence[Prompt]) -> None:
    """Check that the libraries that judge the prompts' answers are installed.

    Raises: SettingsError: one is missing.
    """
    if any(prompt.reference.get("judge") == "summary" for prompt in prompts):
        _rouge()


def quality(prompt: Prompt, text: str) -> float:
    """Return the quality of an answer to the prompt, from 0 to 1.

    Code: 1 if the data set's tests pass within `PROGRAM_S` (HumanEval, arXiv:2107.03374). Numbers: 1 if the answer's
    last number, or the one after "####", is the reference's (GSM8K, arXiv:2110.14168). Words: 1 if they equal the
    reference except for case, articles and punctuation. Summaries: the F-measure of ROUGE-2 on stems.

    Raises: KeyError: the prompt has no reference.
    """
    reference = prompt.reference
    judge = reference["judge"]
    if judge == "code":
        return float(program_passes(reference["before"] + text + "\n" + reference["after"]))
    if judge == "number":
        return float(_last_number(text) is not None and _last_number(text) == _last_number(reference["answer"]))
    if judge == "match":
        return float(_plain_words(text) == _plain_words(reference["answer"]))
    return float(_rouge().score(reference["text"], text)["rouge2"].fmeasure)


def pass_at(k: int, n: int, n_passed: int) -> float:
    """Estimate pass@k from `n` samples of which `n_passed` passed (arXiv:2107.03374, Eq. 1)."""
    return 1.0 - comb(n - n_passed, k) / comb(n, k)


def program_passes(program: str, seconds: int = PROGRAM_S) -> bool:
    """Run a Python program in a separate, confined process; return whether it ends without an error."""
    success_mark = secrets.token_hex(8)
    command = [sys.executable, "-I", str(Path(__file__).with_name("judged_program.py")), success_mark, str(seconds)]
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=devnull, cwd=folder, env={}, start_new_session=True
        ) as child,
    ):
        try:
            output, _ = child.communicate(program.encode(errors="replace"), timeout=2 * seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                killpg(child.pid, signal.SIGKILL)  # Kill the program and every process that it started.
    return child.returncode == 0 and output.decode(errors="replace").endswith(f"{success_mark}\n")


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text.split("####")[-1])
    return float(numbers[-1].replace(",", "")) if numbers else None


def _plain_words(text: str) -> list[str]:
    unpunctuated = text.lower().translate(str.maketrans("", "", string.punctuation))
    return _ARTICLES.sub(" ", unpunctuated).split()


def _rouge() -> Any:
    try:
        scorer = import_module("rouge_score.rouge_scorer")
    except ImportError as error:
        raise SettingsError("summaries are judged with rouge-score: pip install 'swiftopt[quality]'") from error
    return scorer.RougeScorer(["rouge2"], use_stemmer=True)
