"""What ensembles of networks that read pairs of numbers share: draws, contexts and files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .. import zoo
from ..errors import IclError
from ..files import read_json, write_json

Networks = TypeVar("Networks", bound="Ensemble")


class Ensemble(nn.Module):
    """Networks of one shape as one batched program: the first axis of every weight counts them."""

    shape_type: ClassVar[type]
    kind: ClassVar[str]  # what files of such networks are called
    precision: ClassVar[torch.dtype] = torch.float32  # of weights in files
    tasks: list[dict[str, Any]]  # what each network was trained on, if it was

    def __init__(self, shape: Any, seeds: Sequence[int]) -> None:
        super().__init__()
        self.shape, self.seeds, self.tasks = shape, tuple(seeds), []

    @classmethod
    def from_weights(cls: type[Networks], shape: Any, weights: Mapping[str, Tensor]) -> Networks:
        """Make networks of these weights, frozen, named as in ``state_dict()``, in their precision.

        Every weight has the ensemble axis first: ``weight[None]`` for a single network.
        """
        networks = cls(shape, range(min(map(len, weights.values()))))
        networks.load_state_dict({n: w.detach() for n, w in weights.items()}, assign=True)
        return networks.eval().requires_grad_(False)

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and the weights, in ``precision``."""
        named = self.named_parameters()
        weights = {n: p.detach().to(self.precision).contiguous() for n, p in named}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = {"shape": asdict(self.shape), "seeds": self.seeds, "tasks": self.tasks}
        write_json(folder / "config.json", {"model_type": self.kind} | config)

    @classmethod
    def load(
        cls: type[Networks],
        name_or_path: str | Path,
        *,
        step: int | None = None,
        device: str | torch.device = "cpu",
    ) -> Networks:
        """Load networks, frozen: shipped, trained here, or in a folder that ``save`` wrote.

        Of a name, ``step`` is one of its training checkpoints; the final one if omitted.

        Example:
            >>> import torch
            >>> from iclutils.models import lsa, regressors
            >>> nets = regressors.load("regression-d8")
            >>> nets(torch.randn(3, 5, 8), torch.randn(3, 5)).shape[1:]
            torch.Size([3, 5])
            >>> lsa.load("lsa-1")(torch.randn(4, 11, 10), torch.randn(4, 11)).shape
            torch.Size([5, 4])
        """
        folder = zoo.find(name_or_path, step)
        try:
            config = read_json(folder / "config.json")
            if (kind := config.get("model_type")) != cls.kind:
                raise TypeError(f"its config.json says {kind!r}")
            sizes = [(k, v) for k, v in config["shape"].items() if k != "block"]  # of old files
            shape = cls.shape_type(**{k: tuple(v) if isinstance(v, list) else v for k, v in sizes})
            network = cls(shape, config["seeds"])
            network.tasks = [dict(task) for task in config["tasks"]]
            network.load_state_dict(load_file(folder / "model.safetensors"))
        except (OSError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            first = str(error).strip().split("\n")[0]
            raise IclError(
                f"{folder} does not hold {cls.kind}: {first}. Language models are loaded with "
                "iclutils.models.load, and chapter 03 asks them at the tier real: --tier real."
            ) from error
        return network.to(device).eval().requires_grad_(False)

    def contexts(self, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
        """Check contexts, and give them an ensemble axis; the last y may be NaN."""
        dim, networks = self.shape.dim, len(self.seeds)
        fits = ys.shape == xs.shape[:-1] and xs.shape[-1] == dim
        if not fits or (xs.ndim != 3 and (xs.ndim != 4 or len(xs) not in (1, networks))):
            raise IclError(
                f"Give xs (batch, n, {dim}) and ys (batch, n), or both with an ensemble axis of 1 "
                f"or {networks} before them; got {tuple(xs.shape)} and {tuple(ys.shape)}."
            )
        if not (xs.isfinite().all() and ys[..., :-1].isfinite().all()):
            raise IclError("The contexts hold NaN or infinite numbers: leave those pairs out.")
        weight = next(self.parameters())
        xs, ys = (xs, ys) if xs.ndim == 4 else (xs[None], ys[None])
        return xs.to(weight), ys.to(weight)


def draw_stacked(law: Callable[..., Tensor], seeds: Sequence[int]) -> Callable[..., Tensor]:
    """Draw of one size for every network, (ensemble, ...), each network's from its own seed."""
    sources = [torch.Generator().manual_seed(seed) for seed in seeds]
    return lambda *size: torch.stack([law(size, generator=source) for source in sources])
