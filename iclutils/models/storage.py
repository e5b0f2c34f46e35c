"""How ensembles of networks that read pairs of numbers are stored and loaded again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import IclError
from ..files import read_json, write_json

Network = TypeVar("Network", bound=nn.Module)


def store(network: Any, folder: Path, kind: str, dtype: torch.dtype) -> None:
    """Write ``config.json`` and the weights; the network has a shape, seeds and tasks."""
    weights = {n: p.detach().to(dtype).contiguous() for n, p in network.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    known = {"model_type": kind, "shape": asdict(network.shape), "seeds": network.seeds}
    write_json(folder / "config.json", known | {"tasks": network.tasks})


def restore(
    folder: Path,
    build: Callable[[dict[str, Any], list[int]], Network],
    kind: str,
    otherwise: str,
    device: str | torch.device,
) -> Network:
    """The network of a folder, frozen; ``build`` makes it of its shape and seeds."""
    try:
        known = read_json(folder / "config.json")
        network = build(known["shape"], known["seeds"])
        network.tasks = [dict(task) for task in known["tasks"]]  # type: ignore[assignment]
        network.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().split("\n")[0]
        raise IclError(
            f"{folder} does not hold {kind} ({type(error).__name__}: {first}). {otherwise}"
        ) from error
    return network.to(device).eval().requires_grad_(False)
