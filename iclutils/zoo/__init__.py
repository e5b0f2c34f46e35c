"""The zoo: small models that our own recipes trained and this package ships.

Each model is a folder (``config.json``, ``model.safetensors``: a Hugging Face GPT-2, or learners
and solvers of regressions) with the log of its training, a model card and checksums; checkpoints
along its training are folders inside it named ``step-00500``. Weights are stored in half
precision, those of solvers in single, and computed in single.

Example:
    >>> from pathlib import Path
    >>> from iclutils import zoo
"""

from __future__ import annotations

from pathlib import Path

from ..errors import IclError, unknown
from ..files import check_sums, output_folder

ROOT = Path(__file__).parent


def trained() -> Path:
    """Where ``python -m iclutils train`` puts models: ``$ICLUTILS_TRAINED``, or ``_build/train``
    of the checkout, or ``iclutils-trained`` in the current folder (an installed package).

    Example:
        >>> zoo.trained().name in ("train", "iclutils-trained")
        True
    """
    return output_folder("ICLUTILS_TRAINED", "_build/train", "iclutils-trained")


def names(root: Path | None = None) -> list[str]:
    """Names of the shipped models, or of the finished ones in another folder.

    Example:
        >>> "induction-0" in zoo.names()
        True
    """
    return sorted(p.parent.name for p in (root or ROOT).glob("*/SHA256SUMS"))


def steps(name: str, root: Path | None = None) -> list[int]:
    """Training steps of which there is a checkpoint, in order (the final one is the last).

    Of a shipped model, or one that was trained here, unless a folder of models is given.

    Example:
        >>> steps = zoo.steps("induction-0")
        >>> steps[0], steps == sorted(steps)
        (0, True)
    """
    if root is None and name not in names() and name in names(trained()):
        root = trained()
    if name not in names(root):
        raise unknown("zoo model", name, names(root))
    return sorted(int(p.name.removeprefix("step-")) for p in ((root or ROOT) / name).glob("step-*"))


def folder(name: str, step: int | None = None, root: Path | None = None) -> Path:
    """Folder of one checkpoint, its checksums verified.

    Example:
        >>> sorted(path.name for path in zoo.folder("induction-0").iterdir())
        ['config.json', 'model.safetensors']
    """
    root = root or ROOT
    known = steps(name, root)
    step = known[-1] if step is None else step
    if step not in known:
        raise unknown(f"training step of {name}", step, known)
    inside = f"step-{step:05d}"
    check_sums(
        root / name,
        [f"{inside}/config.json", f"{inside}/model.safetensors"],
        f"Reinstall the package, or rebuild the model with: python -m iclutils train {name}",
    )
    return root / name / inside


def find(name_or_path: str | Path, step: int | None = None) -> Path:
    """Folder of a shipped model, of one that was trained here, or the folder that is named.

    Example:
        >>> zoo.find("induction-0") == zoo.folder("induction-0")
        True
    """
    name = str(name_or_path)
    for root in (ROOT, trained()):
        if name in names(root):
            return folder(name, step, root)
    if Path(name).is_dir() and step is None:
        return Path(name)
    raise IclError(
        f"There is no model {name!r}: not shipped, not in {trained()}, and no folder. "
        f"If a recipe has that name, train it: python -m iclutils train {name}"
    )


def log(name: str) -> Path:
    """The log of a training, shipped or made here: a line of JSON for every few steps.

    Example:
        >>> zoo.log("induction-0").suffix
        '.jsonl'
    """
    root = ROOT if name in names() else trained()
    steps(name, root)
    return root / name / "training.jsonl"


def read_card(name: str) -> str:
    """The model card (Markdown)."""
    if name not in names():
        raise unknown("zoo model", name, names())
    card = ROOT / name / "README.md"
    if not card.is_file():
        raise IclError(f"{name} has no model card. Reinstall the package.")
    return card.read_text(encoding="utf-8")
