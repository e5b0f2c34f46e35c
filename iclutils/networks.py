"""Networks that read pairs of numbers: how ``learners`` and ``solvers`` are stored and restored.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> from iclutils import learners, networks
    >>> net = learners.load("regression-d2")
    >>> folder = Path(tempfile.mkdtemp())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from .errors import IclError
from .files import read_json, write_json

Network = TypeVar("Network", bound=nn.Module)


def store(network: Any, folder: Path, kind: str, dtype: torch.dtype) -> None:
    """Write ``config.json`` and the weights; the network has a shape, seeds and tasks.

    Example:
        >>> networks.store(net, folder, "learners", torch.float32)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
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
    """The network of a folder, frozen; ``build`` makes it of its shape and seeds.

    Raises:
        IclError: if the folder holds something else; ``otherwise`` says where that is read.

    Example:
        >>> net.save(folder)
        >>> build = lambda shape, seeds: learners.Learners(learners.Shape(**shape), seeds)
        >>> same = networks.restore(folder, build, "learners", "Train them.", "cpu")
        >>> same.shape == net.shape
        True
    """
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
