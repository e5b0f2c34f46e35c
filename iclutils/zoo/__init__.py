"""The zoo: small models that our own recipes trained and this package ships.

Each model is a Hugging Face folder (``config.json``, ``model.safetensors``) with the log of its
training, a model card and checksums; checkpoints along its training are folders inside it named
``step-00500``. Weights are stored in half precision and computed in single.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import IclError, unknown
from ..files import check_sums

ROOT = Path(__file__).parent


def names() -> list[str]:
    """Names of the shipped models."""
    return sorted(p.parent.name for p in ROOT.glob("*/SHA256SUMS"))


def steps(name: str) -> list[int]:
    """Training steps of which a checkpoint is shipped, in order (the final one is the last).

    Raises:
        IclError: if there is no such model.
    """
    if name not in names():
        raise unknown("zoo model", name, names())
    return sorted(int(p.name.removeprefix("step-")) for p in (ROOT / name).glob("step-*"))


def folder(name: str, step: int | None = None) -> Path:
    """Folder of one checkpoint, its checksums verified.

    Raises:
        IclError: if the model or step is unknown, or a file is missing or damaged.
    """
    known = steps(name)
    step = known[-1] if step is None else step
    if step not in known:
        raise unknown(f"training step of {name}", step, known)
    inside = f"step-{step:05d}"
    check_sums(
        ROOT / name,
        [f"{inside}/config.json", f"{inside}/model.safetensors"],
        f"Reinstall the package, or rebuild the model with: python -m iclutils train {name}",
    )
    return ROOT / name / inside


def read_card(name: str) -> str:
    """The model card (Markdown).

    Raises:
        IclError: if there is no such model.
    """
    if name not in names():
        raise unknown("zoo model", name, names())
    card = ROOT / name / "README.md"
    if not card.is_file():
        raise IclError(f"{name} has no model card. Reinstall the package.")
    return card.read_text(encoding="utf-8")
