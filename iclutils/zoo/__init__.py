"""The zoo: small models that our own recipes trained and this package ships.

A model's folder holds the log of its training, a model card, checksums, ``curves.jsonl`` with what
chapters measured along it, and weights in folders such as ``step-04000``, of which the last is the
finished model. They are stored in half precision, those of linear self-attention in single.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import IclError, unknown
from ..files import check_sums, output_folder

ROOT = Path(__file__).parent
HELD_OUT = (3, 4, 5, 6, 7)  # seeds trained once the recipes were frozen: verdicts are theirs


def trained_folder() -> Path:
    """Return where ``python -m training`` puts models: ``$ICLUTILS_TRAINED``, or ``_build/train``
    of the checkout, or ``iclutils-trained`` in the current folder (an installed package).
    """
    return output_folder("ICLUTILS_TRAINED", "_build/train", "iclutils-trained")


def names(root: Path | None = None) -> list[str]:
    """Return the names of the shipped models, or of the finished ones in another folder."""
    return sorted(p.parent.name for p in (root or ROOT).glob("*/SHA256SUMS"))


def has(name: str) -> bool:
    """Return whether a model of that name is shipped or was trained here."""
    return name in names() or name in names(trained_folder())


def model_folder(name: str) -> Path:
    """Return the folder of a model that is shipped or was trained here."""
    if not has(name):
        raise unknown("zoo model", name, names())
    return (ROOT if name in names() else trained_folder()) / name


def steps(name: str) -> list[int]:
    """Return the training steps whose weights are there, in order; the last are the model's."""
    return sorted(int(p.name.removeprefix("step-")) for p in model_folder(name).glob("step-*"))


def curves(name: str) -> dict[str, list[Any]]:
    """Return the columns that chapters measured along a training: ``step`` and the measures."""
    lines = (model_folder(name) / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {key: [row[key] for row in rows] for key in rows[0]}


def folder(name: str, step: int | None = None) -> Path:
    """Return the folder with the weights of one step (the last if None), its checksums verified."""
    known = steps(name)
    step = known[-1] if step is None and known else step
    if step not in known:
        raise unknown(f"training step of {name}", step, known)
    inside = f"step-{step:05d}"
    check_sums(
        model_folder(name),
        [f"{inside}/config.json", f"{inside}/model.safetensors"],
        f"Reinstall the package, or rebuild the model with: python -m training {name}",
    )
    return model_folder(name) / inside


def find(name_or_path: str | Path, step: int | None = None) -> Path:
    """Return the folder of a model that is shipped or was trained here, or that of this path."""
    name = str(name_or_path)
    if has(name):
        return folder(name, step)
    if (own := Path(name).expanduser()).is_dir() and step is None:
        return own
    raise IclError(
        f"There is no model {name!r}: not shipped, not in {trained_folder()}, and no folder. "
        f"If a recipe has that name, train it: python -m training {name}"
    )


def read_card(name: str) -> str:
    """Return the model card (Markdown)."""
    return (model_folder(name) / "README.md").read_text(encoding="utf-8")
