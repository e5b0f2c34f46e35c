"""One small training loop, shared by every recipe.

It is deterministic (one thread, explicit generators: the data of step *s* depend on the seed and
on *s* alone), writes checkpoints atomically, and resumes after an interruption with the same
result bit for bit, because weights and optimiser state are saved together and nothing else is
carried from step to step. Nothing is pickled: the resume file is safetensors.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from ..errors import IclError
from ..files import replacing, write_sums, write_text

SAVE_EVERY = 500


class Batch(NamedTuple):
    """Token ids, the position each input token is embedded at, and what each prediction counts.

    ``weights[:, i]`` belongs to the prediction of token ``i + 1``; without them all count alike.
    """

    tokens: Int[Tensor, "batch pos"]
    positions: Int[Tensor, "batch next"]
    weights: Float[Tensor, "batch next"] | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a model's weights.

    ``batch(step)`` gives the data of that step; ``held_out(network)`` gives numbers for the log;
    ``card`` is the model card's text; ``prepare(network)`` may change the initial weights.
    """

    name: str
    seed: int
    config: GPT2Config
    batch: Callable[[int], Batch]
    steps: int
    checkpoints: tuple[int, ...]
    held_out: Callable[[GPT2LMHeadModel], dict[str, float]]
    card: str
    prepare: Callable[[GPT2LMHeadModel], None] = lambda network: None
    peak_rate: float = 1e-3
    warmup: int = 100
    floor: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    log_every: int = 250

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then cosine down to ``floor`` of the peak."""
        warm = min(1.0, step / self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_rate * warm * (self.floor + (1 - self.floor) * cosine)


def sinusoidal_positions(network: GPT2LMHeadModel) -> None:
    """Start the position embeddings as sinusoids of wavelengths 2 pi .. 200 pi, amplitude .05."""
    weight = network.transformer.wpe.weight
    place = torch.arange(weight.shape[0])[:, None]
    angle = place * 100.0 ** (-torch.arange(0, weight.shape[1], 2) / weight.shape[1])
    with torch.no_grad():
        weight[:, 0::2] = 0.05 * torch.sin(angle)
        weight[:, 1::2] = 0.05 * torch.cos(angle)


def train(recipe: Recipe, work: Path, progress: bool = True) -> Path:
    """Train, or go on training, one recipe in the folder ``work``.

    Args:
        recipe: what to train.
        work: folder for checkpoints, log and resume file; an interrupted run found there is
            continued, a finished one is left as it is.
        progress: show a progress bar.

    Returns:
        ``work``, which now holds ``step-*/``, ``training.jsonl``, ``README.md`` and
        ``SHA256SUMS``, as a zoo folder does.

    Raises:
        IclError: if the loss stops being a number, or the resume file belongs to another recipe.
    """
    if (work / "SHA256SUMS").is_file():
        return work
    work.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run(recipe, work, progress)
    finally:
        torch.set_num_threads(threads)
    write_text(work / "README.md", recipe.card)
    (work / "resume.safetensors").unlink(missing_ok=True)
    write_sums(work)
    return work


def _run(recipe: Recipe, work: Path, progress: bool) -> None:
    torch.manual_seed(recipe.seed)
    network = GPT2LMHeadModel(recipe.config).train()
    recipe.prepare(network)
    optimizer = _optimizer(network, recipe)
    log = work / "training.jsonl"
    start = _resume(work / "resume.safetensors", recipe, network, optimizer)
    rows = [r for r in _read_log(log) if r["step"] <= start]
    if start == 0:
        _checkpoint(network, work, 0, recipe.checkpoints)
    began, seconds = time.process_time(), rows[-1]["cpu_seconds"] if rows else 0.0
    bar = tqdm(total=recipe.steps, initial=start, desc=recipe.name, disable=not progress)
    recent: list[float] = []
    for step in range(start + 1, recipe.steps + 1):
        loss = _step(network, optimizer, recipe, step)
        recent.append(loss)
        if step % recipe.log_every == 0 or step == recipe.steps:
            spent = seconds + time.process_time() - began
            row: dict[str, Any] = {"step": step, "loss": round(sum(recent) / len(recent), 5)}
            row |= {k: round(v, 5) for k, v in recipe.held_out(network.eval()).items()}
            rows.append(row | {"cpu_seconds": round(spent, 1)})
            network.train()
            recent = []
            write_text(log, "".join(json.dumps(r) + "\n" for r in rows))
            bar.set_postfix(row)
        _checkpoint(network, work, step, recipe.checkpoints)
        if step % SAVE_EVERY == 0:
            _save(work / "resume.safetensors", recipe, network, optimizer, step)
        bar.update()
    bar.close()


def _step(
    network: GPT2LMHeadModel, optimizer: torch.optim.AdamW, recipe: Recipe, step: int
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    torch.manual_seed(recipe.seed * 1_000_003 + step)  # dropout, if any, depends on the step alone
    batch = recipe.batch(step)
    scores = network(batch.tokens[:, :-1], position_ids=batch.positions, use_cache=False).logits
    loss = _loss(scores, batch)
    if not torch.isfinite(loss):
        raise IclError(f"{recipe.name}: the loss is {loss.item()} at step {step}: lower the rate.")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
    optimizer.step()
    return loss.item()


def _loss(scores: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the next token, in nats, over the predictions that count."""
    truth = batch.tokens[:, 1:].flatten()
    if batch.weights is None:
        return functional.cross_entropy(scores.flatten(0, 1), truth)
    each = functional.cross_entropy(scores.flatten(0, 1), truth, reduction="none")
    return (each * batch.weights.flatten()).sum() / batch.weights.sum()


def _optimizer(network: GPT2LMHeadModel, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), fused=True)


def _checkpoint(network: GPT2LMHeadModel, work: Path, step: int, wanted: tuple[int, ...]) -> None:
    """Save the weights in half precision as a Hugging Face folder, if this step is wanted."""
    if step not in wanted:
        return
    folder = work / f"step-{step:05d}"
    fresh = work / f".step-{step:05d}.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    half = {
        n: t.half().contiguous() for n, t in network.state_dict().items() if n != "lm_head.weight"
    }
    save_file(half, fresh / "model.safetensors", metadata={"format": "pt"})
    network.config.to_json_file(fresh / "config.json")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _save(
    path: Path,
    recipe: Recipe,
    network: GPT2LMHeadModel,
    optimizer: torch.optim.AdamW,
    step: int,
) -> None:
    state = {f"weight.{n}": p.detach() for n, p in network.named_parameters()}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{key}.{name}"] = value
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={"recipe": recipe.name, "step": str(step)})


def _resume(
    path: Path, recipe: Recipe, network: GPT2LMHeadModel, optimizer: torch.optim.AdamW
) -> int:
    """Restore weights and optimiser; return the step they belong to (0 if there is no file)."""
    if not path.is_file():
        return 0
    with safe_open(path, "pt") as stream:
        described = stream.metadata() or {}
        if described.get("recipe") != recipe.name:
            raise IclError(f"{path} belongs to another recipe. Delete it or choose another folder.")
        for name, parameter in network.named_parameters():
            parameter.data.copy_(stream.get_tensor(f"weight.{name}"))
            optimizer.state[parameter] = {
                key: stream.get_tensor(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")
            }
    return int(described["step"])


def _read_log(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
