"""Trains a small model with a multi-token-prediction layer, on whose drafts acceptance can be measured.

python -m swiftopt.bench.train_mtp --out small-mtp --minutes 6
swiftopt compare --model small-mtp --stream small-mtp/held-out.jsonl --methods plain,mtp,adaptive \
    --set mtp.stop_threshold=0.1 --set adaptive.lookup=false --max-new-tokens 128

The low threshold is needed because a briefly trained model has little confidence: drafts would end after one token.

The model learns the prompts of `examples/` and sources of the standard library; other sources are held out as prompts.
The folder is a checkpoint of the type exaone_moe with dense layers. Layers with zero output may follow the trained
ones: they change no token, and a pass costs as much as that of a deeper model.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import click
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

from ..core.settings import n_threads
from ..models.quantised import cpu_multiplies_bf16
from ..models.saved import quiet

EXAMPLES = Path(__file__).parent.parent / "examples"
MODEL_TYPE = "exaone_moe"
END = "<end>"
MAX_BYTES = 60_000  # Longer source files are left out, because they are tables.
HELD_OUT_EVERY = 25  # One source file of this many is held out.
N_PROMPTS, PROMPT_LINES = 16, 24
BATCH, LENGTH, CONTEXT = 8, 160, 4096
RATE, WARM_UP_STEPS, CLIP = 1.5e-3, 40, 1.0
MTP_WEIGHTS = (0.5, 0.3)  # Weights of the losses of the layer's first and second token; the model's loss has 1.


def read_texts() -> tuple[list[str], list[str]]:
    """Return the texts for training, and the held-out ones."""
    lines = [json.loads(line) for path in EXAMPLES.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
    texts = [str(line["prompt"]) for line in lines if "prompt" in line]
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        path
        for folder in ("asyncio", "email", "http", "json", "logging", "unittest", "xml", "importlib", "concurrent")
        for path in Path(sysconfig.get_path("stdlib"), folder).rglob("*.py")
    )
    sources = [path.read_text("utf-8", errors="replace") for path in paths if path.stat().st_size < MAX_BYTES]
    sources = [source for source in sources if len(source) > 1000]
    held_out = sources[::HELD_OUT_EVERY]
    return texts + [source for i, source in enumerate(sources) if i % HELD_OUT_EVERY], held_out


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return cast(Any, PreTrainedTokenizerFast)(tokenizer_object=backend, eos_token=END, pad_token=END)


def make_model(vocab_size: int, hidden_size: int, n_layers: int) -> Any:
    config = AutoConfig.for_model(
        MODEL_TYPE,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        moe_intermediate_size=hidden_size,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=n_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        # The family rotates queries and keys only in layers with a window, so all layers have one of the whole context.
        sliding_window=CONTEXT,
        layer_types=["sliding_attention"] * n_layers,
        mlp_layer_types=["dense"] * n_layers,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["sliding_attention"], ["dense"]
    return cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)


def losses(model: Any, mtp: Any, ids: Tensor) -> list[Tensor]:
    """Return the losses of the model's next token, and of the layer's first and second token."""
    out = model(ids, output_hidden_states=True)
    parts = [F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())]
    states, positions = out.hidden_states[-1], torch.arange(ids.shape[1])[None]
    for step in range(1, 1 + len(MTP_WEIGHTS)):
        # Row i reads the state of position i and the token at i + step, and predicts the token at i + step + 1.
        states = mtp.forward_layer(0, states[:, :-1], positions[:, : -step or None], None, input_ids=ids[:, step:])
        logits = mtp._project_to_logits(states[:, :-1])
        parts.append(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, step + 1 :].flatten()))
    return parts


def train(model: Any, mtp: Any, tokens: Tensor, minutes: float, seed: int) -> tuple[int, list[float]]:
    """Train the model and the layer for some minutes; return the number of steps and the last losses."""
    generator, started_s = torch.Generator().manual_seed(seed), perf_counter()
    parameters = [*model.parameters(), *mtp.layers.parameters()]
    adam = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    latest: list[float] = []
    step = 0
    while (progress := (perf_counter() - started_s) / (60 * minutes)) < 1.0:
        for group in adam.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP_STEPS, 1.0 - 0.95 * progress)
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([tokens[start : start + LENGTH] for start in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=cpu_multiplies_bf16()):
            parts = losses(model, mtp, ids)
        loss: Any = parts[0] + sum(weight * part for weight, part in zip(MTP_WEIGHTS, parts[1:], strict=True))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        adam.step()
        latest, step = [part.item() for part in parts], step + 1
        if step % 20 == 0:
            click.echo(f"step {step}, {100 * progress:.0f} %, losses {[round(part, 2) for part in latest]}", err=True)
    return step, latest


def deepened(model: Any, n_more: int) -> Any:
    """Return the model with `n_more` layers after the trained ones, whose sub-layers have zero output."""
    if n_more == 0:
        return model
    n_layers = model.config.num_hidden_layers
    deeper = make_model(model.config.vocab_size, model.config.hidden_size, n_layers + n_more)
    deeper.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deeper.model.layers[n_layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deeper


def save(model: Any, mtp: Any, tokenizer: Any, folder: Path) -> None:
    """Write a checkpoint in which the layer's tensors are named as in K-EXAONE's."""
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    layer = mtp.layers[0]
    parts = {
        "pre_fc_norm_embedding": layer.enorm,
        "pre_fc_norm_hidden": layer.hnorm,
        "fc": layer.eh_proj,
        "norm": layer.post_norm,
        "layers.0": layer.mtp_block,
    }
    mtp_tensors = {
        f"mtp.{prefix}.{name}": tensor.to(torch.bfloat16).contiguous()
        for prefix, part in parts.items()
        for name, tensor in part.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(load_file(path) | mtp_tensors, path, {"format": "pt"})


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write, which must not exist.")
@click.option("--minutes", type=float, default=6.0, show_default=True, help="Minutes of training.")
@click.option("--hidden-size", type=int, default=512, show_default=True)
@click.option("--layers", "n_layers", type=int, default=8, show_default=True, help="Number of trained layers.")
@click.option(
    "--more-layers", "n_more", type=int, default=0, show_default=True, help="Number of layers with zero output."
)
@click.option("--vocab-size", type=int, default=4096, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(out: Path, minutes: float, hidden_size: int, n_layers: int, n_more: int, vocab_size: int, seed: int) -> None:
    """Train a small model with a multi-token-prediction layer; write its folder, with prompts."""
    torch.set_num_threads(n_threads())
    torch.manual_seed(seed)
    texts, held_out = read_texts()
    tokenizer = train_tokenizer(texts, vocab_size)
    ids = [token_id for text in texts for token_id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    click.echo(f"{len(texts)} texts of {len(ids):,} tokens, {len(held_out)} held out", err=True)
    model = make_model(len(tokenizer), hidden_size, n_layers)
    mtp = MtpModel(model, 1)
    step, latest = train(model.train(), mtp.train(), torch.tensor(ids), minutes, seed)
    with tempfile.TemporaryDirectory(dir=out.parent) as unfinished:
        folder = Path(unfinished) / "model"
        save(deepened(model, n_more), mtp, tokenizer, folder)
        prompts = ["\n".join(text.splitlines()[:PROMPT_LINES]) + "\n" for text in held_out[:N_PROMPTS]]
        lines = [json.dumps({"prompt": prompt, "task": "code"}) + "\n" for prompt in prompts]
        (folder / "held-out.jsonl").write_text("".join(lines), encoding="utf-8")
        shutil.move(folder, out)
    names = ("loss", "mtp_loss", "mtp_second_loss")
    result = {"schema": "swiftopt.train-mtp/1", "folder": str(out), "steps": step, "layers": n_layers + n_more}
    click.echo(json.dumps(result | dict(zip(names, latest, strict=True))))


if __name__ == "__main__":
    main()
