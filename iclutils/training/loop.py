"""One small training loop, shared by every recipe.

It is deterministic (one thread, explicit generators: the data of step *s* depend on the seed and
on *s* alone), writes checkpoints atomically, and resumes after an interruption with the same
result bit for bit, because weights and optimiser state are saved together and nothing else is
carried from step to step. Nothing is pickled: the resume file is safetensors.

Example:
    >>> import tempfile
    >>> import torch
    >>> from pathlib import Path
    >>> from iclutils.models.regressors import Shape
    >>> from iclutils.tasks.regression import Task
    >>> from iclutils.training import loop, regression
    >>> small = Shape(dim=1, pairs=3, format="one", layers=1, width=4, heads=1)
    >>> made = regression.group("small", "cpu", small, [(0, Task(1))], steps=3)
"""

from __future__ import annotations

import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from ..errors import IclError
from ..files import replacing, write_sums, write_text

SAVE_EVERY = 500


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """Everything that decides a model's weights.

    ``held_out(network)`` gives numbers for the log; ``card`` is the model card's text.
    """

    name: str
    seed: int
    steps: int
    checkpoints: tuple[int, ...]
    held_out: Callable[[Any], dict[str, float]]
    card: str
    peak_rate: float = 1e-3
    warmup: int = 100
    floor: float = 0.05
    clip: float = 1.0
    log_every: int = 250
    device: str = "cpu"

    @abstractmethod
    def network(self) -> nn.Module:
        """The network with its initial weights."""

    @abstractmethod
    def loss(self, network: nn.Module, step: int) -> Tensor:
        """The loss on the data of that step."""

    @abstractmethod
    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """What moves the weights. A group's ``scale`` multiplies the rate, where it has one."""

    @abstractmethod
    def save(self, network: nn.Module, folder: Path) -> None:
        """Write configuration and weights, in half precision, into an empty folder."""

    def operations(self) -> float:
        """Floating-point operations of a step, for the log; 0 where nobody counted them."""
        return 0.0

    def clip_gradients(self, network: nn.Module) -> None:
        """Bring the norm of the gradient down to ``clip``, if it is larger."""
        torch.nn.utils.clip_grad_norm_(network.parameters(), self.clip)

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then cosine down to ``floor`` of the peak."""
        warm = min(1.0, step / self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_rate * warm * (self.floor + (1 - self.floor) * cosine)


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

    Example:
        >>> folder = loop.train(made, Path(tempfile.mkdtemp()), progress=False)
        >>> sorted(path.name for path in folder.iterdir())[:2]
        ['README.md', 'SHA256SUMS']
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
    network = recipe.network().to(recipe.device).train()
    optimizers = recipe.optimizers(network)
    log = work / "training.jsonl"
    start = _resume(work / "resume.safetensors", recipe, network, optimizers)
    rows = [r for r in _read_log(log) if r["step"] <= start]
    if start == 0:
        _checkpoint(recipe, network, work, 0)
    began, seconds = time.process_time(), rows[-1]["cpu_seconds"] if rows else 0.0
    since, behind = time.perf_counter(), start
    bar = tqdm(total=recipe.steps, initial=start, desc=recipe.name, disable=not progress)
    recent: list[float] = []
    for step in range(start + 1, recipe.steps + 1):
        recent.append(take_step(network, optimizers, recipe, step))
        if step % recipe.log_every == 0 or step == recipe.steps:
            spent = seconds + time.process_time() - began
            row: dict[str, Any] = {"step": step, "loss": round(sum(recent) / len(recent), 5)}
            row |= {k: round(v, 5) for k, v in recipe.held_out(network.eval()).items()}
            pace = (step - behind) / (time.perf_counter() - since)
            row |= {"cpu_seconds": round(spent, 1), "steps_per_second": round(pace, 2)}
            if recipe.operations():
                row["teraflops"] = round(pace * recipe.operations() / 1e12, 4)
            rows.append(row)
            since, behind = time.perf_counter(), step
            network.train()
            recent = []
            write_text(log, "".join(json.dumps(r) + "\n" for r in rows))
            bar.set_postfix(row)
        _checkpoint(recipe, network, work, step)
        if step % SAVE_EVERY == 0:
            _save(work / "resume.safetensors", recipe, network, optimizers, step)
        bar.update()
    bar.close()


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


def _checkpoint(recipe: Recipe, network: nn.Module, work: Path, step: int) -> None:
    """Save the weights as a folder, if this step is wanted."""
    if step not in recipe.checkpoints:
        return
    folder = work / f"step-{step:05d}"
    fresh = work / f".step-{step:05d}.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    recipe.save(network, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _save(
    path: Path, recipe: Recipe, network: nn.Module, optimizers: list[Optimizer], step: int
) -> None:
    state = {f"weight.{n}": p.detach() for n, p in network.named_parameters()}
    for name, parameter in network.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
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


def _read_log(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
