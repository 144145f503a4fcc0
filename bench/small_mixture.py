"""Trains a small mixture of experts, for tests and measurements of realistic routing and acceptance.

python -m swiftopt.bench.small_mixture

The model is of type qwen3_moe with 20 million parameters: 6 layers of 32 experts, of which a token chooses 4. It learns
sources of Python's standard library and the prompts of `examples/` in some minutes on two cores, once; the cache keeps
it. It continues code and cannot chat. The last line of output is its folder, which every command accepts as a model.
`--stream` writes prompts from sources that it has not learnt.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ..core.streams import stream_lines
from ..core.types import Prompt
from ..models.cache import cache_root, made_once

# transformers does not type these.
AUTO_MODEL: Any = AutoModelForCausalLM
TOKENIZER: Any = PreTrainedTokenizerFast
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = ("json", "email", "http", "logging", "collections", "concurrent", "unittest", "xml", "urllib", "asyncio")
HELD_OUT = ("ctypes", "dbm", "importlib", "multiprocessing", "tomllib", "wsgiref", "zoneinfo")  # Packages for prompts.
PROMPTS = 16  # Number of prompts of each task in the stream.
LINES_BEFORE = 24  # Lines of a prompt before its last one.
# The last line of a prompt, by task: the head of a function, or the first line of a docstring.
LAST_LINES = {"functions": re.compile(r"\s*def \w+\(.*\):$"), "docstrings": re.compile(r'\s*"""\w[^"]*$')}
WARMUP = 0.05  # Share of the steps in which the learning rate rises to its full value.
CLIP = 1.0  # Largest norm of a step's gradient.


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of the model and its training; the folder's name has a digest of them.

    A step learns `batch` windows of `window` tokens. `balance`: weight of the loss that spreads tokens over experts.
    """

    vocab_size: int = 2048
    n_hidden: int = 256
    n_layers: int = 6
    n_experts: int = 32
    n_chosen: int = 4
    n_inner: int = 128
    window: int = 256
    batch: int = 8
    steps: int = 300
    rate: float = 4e-3
    balance: float = 0.01
    seed: int = 0

    @property
    def folder(self) -> Path:
        """The folder of the trained model, by Python's version, because its training text depends on this."""
        values = json.dumps([asdict(self), platform.python_version_tuple()[:2]])
        return cache_root() / "trained" / f"small-mixture-{hashlib.sha256(values.encode()).hexdigest()[:12]}"


def trained(training: Training | None = None, on_step: Callable[[int, float], None] = lambda step, loss: None) -> Path:
    """Return the folder of the trained model; train it first if it is not in the cache.

    Args:   on_step: called with each step's number and loss.
    Raises: OutputError: the cache cannot be written.
    """
    training = training or Training()
    folder = training.folder
    is_complete = (folder / "tokenizer.json").exists
    return made_once(folder, is_complete, partial(_write, training=training, on_step=on_step))


def texts() -> list[str]:
    """Return the texts that the model learns: sources of the standard library, and the prompts of `examples/`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [*library.glob("*.py"), *(path for name in PACKAGES for path in library.glob(f"{name}/**/*.py"))]
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)]
    lines = (EXAMPLES / "stream.jsonl").read_text(encoding="utf-8").splitlines()
    return sources + [_text_of(json.loads(line)) for line in lines]


def prompts() -> list[Prompt]:
    """Return prompts of two alternating tasks, spread over sources that the model has not learnt."""
    library, texts_by_task = Path(sysconfig.get_paths()["stdlib"]), {task: list[str]() for task in LAST_LINES}
    for path in sorted(path for name in HELD_OUT for path in library.glob(f"{name}/**/*.py")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for i, line in enumerate(lines):
            for task, pattern in LAST_LINES.items():
                if i >= LINES_BEFORE and pattern.match(line):
                    # The prompt ends before the line break, which is one token with the following blanks.
                    texts_by_task[task].append("\n".join(lines[i - LINES_BEFORE : i + 1]))
    spread = {task: texts[:: max(1, len(texts) // PROMPTS)][:PROMPTS] for task, texts in texts_by_task.items()}
    return [
        Prompt(f"{task}-{i}", task, text)
        for i, of_tasks in enumerate(zip(*spread.values(), strict=True), start=1)
        for task, text in zip(spread, of_tasks, strict=True)
    ]


def _text_of(prompt: dict[str, Any]) -> str:
    messages = prompt.get("messages", ())
    return str(prompt.get("prompt", "")) + "".join(f"{m['role']}: {m['content']}\n" for m in messages)


def _write(folder: Path, training: Training, on_step: Callable[[int, float], None]) -> None:
    training_texts = texts()
    tokenizer = _trained_tokenizer(training_texts, training.vocab_size)
    rng = random.Random(training.seed)
    rng.shuffle(training_texts)
    ids = [token_id for text in training_texts for token_id in (*tokenizer.encode(text).ids, 0)]
    model = _trained_model(torch.tensor(ids), training, on_step)
    model.to(torch.bfloat16).save_pretrained(folder)
    # The tokenizer is saved last, because its file marks a complete folder.
    wrapped: Any = TOKENIZER(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _trained_tokenizer(training_texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts, trainer)
    return tokenizer


def _config(training: Training) -> Any:
    return AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=training.vocab_size,
        hidden_size=training.n_hidden,
        num_hidden_layers=training.n_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=training.n_experts,
        num_experts_per_tok=training.n_chosen,
        moe_intermediate_size=training.n_inner,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        router_aux_loss_coef=training.balance,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        mlp_only_layers=[],
    )


def _trained_model(ids: Tensor, training: Training, on_step: Callable[[int, float], None]) -> Any:
    torch.manual_seed(training.seed)
    model = AUTO_MODEL.from_config(_config(training), dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=training.rate, betas=(0.9, 0.95), weight_decay=0.05)
    model.train()
    for step, windows in enumerate(_windows(ids, training)):
        for group in optimiser.param_groups:
            group["lr"] = training.rate * _rate_share((step + 1) / training.steps)
        loss = model(windows, labels=windows, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad()
        on_step(step + 1, loss.item())
    return model.eval()


def _windows(ids: Tensor, training: Training) -> Iterator[Tensor]:
    """Yield the windows (batch, window) of each step, from random positions of the text."""
    generator = torch.Generator().manual_seed(training.seed)
    offsets = torch.arange(training.window)
    for _ in range(training.steps):
        starts = torch.randint(len(ids) - training.window, (training.batch, 1), generator=generator)
        yield ids[starts + offsets]


def _rate_share(progress: float) -> float:
    """Return the share of the full learning rate, which rises to 1 and falls along a half cosine to 0.1."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


@click.command()
@click.option("--steps", default=Training().steps, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--stream", metavar="FILE", type=click.Path(path_type=Path), help="Write a stream of prompts for the model."
)
def main(steps: int, stream: Path | None) -> None:
    """Train the small mixture if it is not in the cache, and print its folder."""
    started = perf_counter()
    if stream is not None:
        stream.write_text(stream_lines(prompts()), encoding="utf-8")

    def report(step: int, loss: float) -> None:
        if step % 10 == 0 or step == steps:
            click.echo(f"step {step} of {steps}, loss {loss:.2f}, {perf_counter() - started:.0f} s", err=True)

    click.echo(trained(Training(steps=steps), report))


if __name__ == "__main__":
    main()
