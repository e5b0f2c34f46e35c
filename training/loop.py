"""The training loop that every recipe shares.

It is deterministic (one thread; the data of a step depend on the seed and the step alone), writes
checkpoints atomically, and goes on after an interruption to the same weights bit for bit, because
weights and optimiser state are saved together. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from iclutils.errors import IclError
from iclutils.files import replacing, write_sums, write_text
from iclutils.progress import quiet

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """Everything that decides a model's weights.

    ``checkpoints`` are the steps whose weights are saved. Those in ``kept`` stay (all if it is
    empty); of every one ``curve(folder, steps)`` measures what ``curves.jsonl`` holds.
    """

    name: str
    seed: int
    steps: int
    checkpoints: tuple[int, ...]
    kept: tuple[int, ...] = ()
    curve: Callable[[Path, Sequence[int]], Rows] | None = None
    peak_rate: float = 1e-3
    warmup: int = 100
    cosine: Literal["from the start", "after warm-up"] = "from the start"
    floor: float = 0.05
    clip: float = 1.0
    log_every: int = 250
    save_every: int = 500
    device: str = "cpu"

    @abstractmethod
    def network(self) -> nn.Module:
        """Draw the network with its initial weights."""

    @abstractmethod
    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Return the loss on the data of that step."""

    @abstractmethod
    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Make optimisers of the weights; a group's ``scale``, if any, multiplies the rate."""

    @abstractmethod
    def held_out(self, network: nn.Module) -> dict[str, float]:
        """Return numbers for the log, on data that are never trained on."""

    @abstractmethod
    def save(self, network: nn.Module, folder: Path) -> None:
        """Write configuration and weights into an empty folder."""

    def clip_gradients(self, network: nn.Module) -> None:
        """Bring the norm of the gradient down to ``clip``, if it is larger."""
        torch.nn.utils.clip_grad_norm_(network.parameters(), self.clip)

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up and a cosine down to ``floor`` of the peak.

        The cosine begins with the warm-up, whose end is then below the peak, or after it.
        """
        start = self.warmup if self.cosine == "after warm-up" else 0
        warm = min(1.0, step / self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - start) / (self.steps - start)))
        return self.peak_rate * warm * (self.floor + (1 - self.floor) * cosine)


def sinusoids(length: int, width: int) -> Float[Tensor, "length width"]:
    """Return sine and cosine of each position, in turn, at wavelengths from 2 pi to 200 pi."""
    place = torch.arange(length)[:, None]
    angle = place * 100.0 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([torch.sin(angle), torch.cos(angle)], -1).flatten(1)


def train(recipe: Recipe, work: Path, progress: bool = True) -> Path:
    """Train, or go on training, one recipe in the folder ``work``; a finished one is left alone.

    The folder then holds what a zoo folder does but for the model card, which is written by hand.
    """
    if (work / "SHA256SUMS").is_file():
        return work
    work.mkdir(parents=True, exist_ok=True)
    with _one_thread():
        _run(recipe, work, progress)
        _measure(recipe, work)
    (work / "resume.safetensors").unlink(missing_ok=True)
    write_sums(work)
    return work


def take_step(network: nn.Module, optimizers: list[Optimizer], recipe: Recipe, step: int) -> float:
    """Take one training step and return its loss."""
    rate = recipe.rate(step)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate * group.get("scale", 1.0)
    torch.manual_seed(recipe.seed * 1_000_003 + step)  # dropout, if any, depends on the step alone
    loss = recipe.loss(network, step)
    if not torch.isfinite(loss):
        raise IclError(f"{recipe.name}: the loss is {loss.item()} at step {step}: lower the rate.")
    network.zero_grad()
    loss.backward()
    recipe.clip_gradients(network)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(recipe: Recipe, work: Path, progress: bool) -> None:
    network = recipe.network().to(recipe.device).train()
    optimizers = recipe.optimizers(network)
    log, resumed = work / "training.jsonl", work / "resume.safetensors"
    start = _resume(resumed, recipe, network, optimizers)
    rows = [row for row in _read_log(log) if row["step"] <= start]
    if start == 0:
        _checkpoint(recipe, network, work, 0)
    silent = not progress or quiet()
    shown = tqdm(total=recipe.steps, initial=start, desc=recipe.name, disable=silent)
    recent: list[float] = []
    for step in range(start + 1, recipe.steps + 1):
        recent.append(take_step(network, optimizers, recipe, step))
        if step % recipe.log_every == 0 or step == recipe.steps:
            row: dict[str, Any] = {"step": step, "loss": round(sum(recent) / len(recent), 5)}
            row |= {k: round(v, 5) for k, v in recipe.held_out(network.eval()).items()}
            rows.append(row)
            network.train()
            recent = []
            _write_log(log, rows)
            shown.set_postfix(rows[-1])
        _checkpoint(recipe, network, work, step)
        if step % recipe.save_every == 0:
            _save(resumed, recipe, network, optimizers, step)
        shown.update()
    shown.close()


def _checkpoint(recipe: Recipe, network: nn.Module, work: Path, step: int) -> None:
    """Save the weights as a folder, if this step is wanted."""
    if step not in recipe.checkpoints:
        return
    folder, fresh = work / f"step-{step:05d}", work / f".step-{step:05d}.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    recipe.save(network, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _measure(recipe: Recipe, work: Path) -> None:
    """Measure the saved checkpoints, then remove those that are not kept."""
    path = work / "curves.jsonl"
    if recipe.curve and not path.is_file():
        _write_log(path, recipe.curve(work, recipe.checkpoints))
    for step in set(recipe.checkpoints) - set(recipe.kept or recipe.checkpoints):
        shutil.rmtree(work / f"step-{step:05d}", ignore_errors=True)


def _save(
    path: Path, recipe: Recipe, network: nn.Module, optimizers: list[Optimizer], step: int
) -> None:
    """Write weights and optimiser state together."""
    state = {f"weight.{n}": p.detach() for n, p in network.named_parameters()}
    for (name, weight), optimizer in product(network.named_parameters(), optimizers):
        for key, value in optimizer.state.get(weight, {}).items():
            state[f"state.{key}.{name}"] = value
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={"recipe": recipe.name, "step": str(step)})


def _resume(path: Path, recipe: Recipe, network: nn.Module, optimizers: list[Optimizer]) -> int:
    """Restore weights and optimisers; return the step they belong to (0 if there is no file)."""
    if not path.is_file():
        return 0
    held = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    with safe_open(path, "pt") as stream:
        described = stream.metadata() or {}
        if described.get("recipe") != recipe.name:
            raise IclError(f"{path} belongs to another recipe. Delete it or choose another folder.")
        named = dict(network.named_parameters())
        for stored in stream.keys():  # noqa: SIM118
            kind, _, name = stored.partition(".")
            if kind == "weight":
                named[name].data.copy_(stream.get_tensor(stored))
            else:
                key, _, name = name.partition(".")
                value = stream.get_tensor(stored).to(named[name].device)
                held[named[name]].state[named[name]][key] = value
    return int(described["step"])


def _read_log(path: Path) -> Rows:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def _write_log(path: Path, rows: Rows) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
