"""Claims: what the sources say, what we measured, and the verdict between them.

Each notebook has a ledger, ``NN_chapter.yml``, written before the measurement; a claim that cannot
fail is refused. A criterion is ``"> a"``, ``">= a"``, ``"< a"``, ``"<= a"`` or ``"a .. b"`` (both
ends included). The first of a tier's criteria that holds decides; if none, ``not reproduced``.
"""

from __future__ import annotations

import math
import operator
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ...errors import IclError, unknown
from ...files import CHECKOUT, output_folder, read_json, write_json
from .. import presets

ROOT = Path(__file__).parent
VERDICTS = ("reproduced", "partly", "corrected", "not reproduced", "not run")
DECIDABLE = ("reproduced", "partly", "corrected")
NUMBER = r"-?\d+(?:\.\d*)?(?:e-?\d+)?"
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
VERSIONED = ("iclutils", "torch", "transformers", "transformer-lens", "numpy")


@dataclass(frozen=True)
class Claim:
    """One line of the ledger."""

    id: str  # NN.some_name
    statement: str  # in our words
    source: str  # where the source says it, with keys of the bibliography
    measure: str  # what we measure, with its unit
    cell: str  # the name of the notebook cell that checks it
    tiers: dict[str, dict[str, str]]  # for each that it applies to, a criterion for each verdict
    tolerance: str  # where the bounds come from
    published: float | str | None = None  # the source's value
    range: tuple[float, float] = (-math.inf, math.inf)  # values that the measure can take
    sigmas: float = 0.0  # spreads on either side of the value that must meet the criterion, too

    @property
    def chapter(self) -> str:
        """Number of the chapter, the part of the id before the dot."""
        return self.id.split(".")[0]

    def verdict(self, tier: str, value: float, spread: float = 0.0) -> str:
        """Verdict on a measured value."""
        if tier not in self.tiers:
            raise unknown(f"tier of claim {self.id}", tier, self.tiers)
        if not math.isfinite(value) or not math.isfinite(spread):
            raise IclError(f"{self.id}: measured {value} ± {spread}, which is not a number.")
        low, high = self.range  # no repetition can lie outside
        if not low <= value <= high:
            raise IclError(f"{self.id}: measured {value}, outside its range {self.range}.")
        reach = self.sigmas * spread
        ends = (max(low, value - reach), value, min(high, value + reach))
        held = (k for k, text in self.tiers[tier].items() if all(map(criterion(text), ends)))
        return next(held, "not reproduced")


@dataclass(frozen=True)
class Result:
    """One measurement and its provenance."""

    id: str
    verdict: str
    value: float
    spread: float
    count: int
    tier: str
    model: str
    seed: int
    device: str
    versions: dict[str, str]
    python: str
    commit: str
    date: str
    detail: dict[str, Any] = field(default_factory=dict)


def chapters() -> list[str]:
    """Names of the chapters that have a ledger, such as ``01_gpt2_induction``."""
    return sorted(path.stem for path in ROOT.glob("*.yml"))


@cache
def ledger(chapter: str | None = None) -> dict[str, Claim]:
    """Claims by id, of one chapter (name or number) or of all."""
    names = [name for name in chapters() if chapter in (None, name, name.split("_")[0])]
    if chapter is not None and not names:
        raise unknown("chapter", chapter, chapters())
    return {k: v for name in names for k, v in read_ledger(ROOT / f"{name}.yml").items()}


def read_ledger(path: Path) -> dict[str, Claim]:
    """Read and check one ledger file."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise IclError(f"{path.name} is not valid YAML: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise IclError(f"{path.name} is not a list of claims, each a map of fields.")
    claims: dict[str, Claim] = {}
    for entry in entries:
        whole = {k: float(v) for k, v in entry.items() if isinstance(v, int)}  # YAML's 2 is one
        try:
            span = {"range": tuple(map(float, entry["range"]))} if "range" in entry else {}
            claim = Claim(**entry | whole | span)
            refuse_if_it_cannot_fail(claim)
        except IclError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise IclError(f"{path.name}, claim {entry.get('id')!r}: {error}.") from error
        if claim.id in claims:
            raise IclError(f"{path.name} has two claims {claim.id!r}.")
        if claim.chapter != path.stem.split("_")[0]:
            raise IclError(f"{claim.id!r} does not belong in {path.name}.")
        claims[claim.id] = claim
    return claims


def check(
    claim_id: str,
    value: float,
    *,
    tier: str,
    model: str,
    seed: int,
    device: str = "cpu",
    spread: float = 0.0,
    count: int = 1,
    **detail: Any,
) -> Result:
    """Judge a measured value, write the result with its provenance as JSON, print the verdict.

    ``spread`` is a standard error or deviation over ``count`` repetitions; ``detail`` is anything
    else worth keeping, JSON-serialisable.
    """
    known = ledger()
    if claim_id not in known:
        raise unknown("claim", claim_id, known)
    number, margin = float(value), float(spread)
    measured = (known[claim_id].verdict(tier, number, margin), number, margin, count)
    where = (tier, model, seed, device)
    result = Result(claim_id, *measured, *where, **provenance(), detail=detail)
    write_json(results_folder() / tier / f"{claim_id}.json", asdict(result))
    print(f"{result.verdict:<15} {claim_id}")
    return result


def provenance() -> dict[str, Any]:
    """What a result was made with, and when."""
    return {
        "versions": {name: metadata.version(name) for name in VERSIONED},
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def results_folder() -> Path:
    """Where results are written: ``$ICLUTILS_RESULTS``, or ``_build/results`` of the checkout,
    or ``iclutils-results`` in the current folder (an installed package, as on Colab)."""
    return output_folder("ICLUTILS_RESULTS", "_build/results", "iclutils-results")


def result_folders() -> list[Path]:
    """Folders of results: those committed in the checkout, then those of the latest run."""
    return [CHECKOUT / "book" / "results", results_folder()]


def read_results(*folders: Path) -> dict[tuple[str, str], Result]:
    """Results by (tier, claim id); where folders overlap, the later one wins."""
    found: dict[tuple[str, str], Result] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.json"))):
        try:
            result = Result(**read_json(path))
        except TypeError as error:
            raise IclError(f"{path} is not a result ({error}). Delete it.") from error
        if result.id not in ledger():
            raise IclError(f"{path}: claim {result.id!r} is no longer in the ledger. Delete it.")
        found[result.tier, result.id] = result
    return found


@cache
def commit() -> str:
    """Commit of the checkout, with ``+`` if the package differs from it; ``""`` outside one."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*git, "status", "--porcelain", ".."], capture_output=True)
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout else "") if head.returncode == 0 else ""


@cache
def criterion(text: str) -> Callable[[float], bool]:
    """The test that a criterion stands for."""
    if not isinstance(text, str):
        raise IclError(f"Criterion {text!r} is not text: put it in quotation marks.")
    if between := re.fullmatch(rf"({NUMBER}) \.\. ({NUMBER})", text.strip()):
        low, high = map(float, between.groups())
        return lambda x: low <= x <= high
    if compare := re.fullmatch(rf"(<=|>=|<|>) ({NUMBER})", text.strip()):
        holds, bound = COMPARE[compare[1]], float(compare[2])
        return lambda x: holds(x, bound)
    raise IclError(f"Criterion {text!r} is not one of '> a', '>= a', '< a', '<= a', 'a .. b'.")


def refuse_if_it_cannot_fail(claim: Claim) -> None:
    """Each verdict, ``not reproduced`` too, must be that of some value the measure can take."""
    if not claim.tiers or not claim.tolerance:
        raise IclError(f"{claim.id}: a claim needs criteria for some tier, and a tolerance.")
    low, high = claim.range
    for tier, criteria in claim.tiers.items():
        if tier not in presets.TIERS:
            raise unknown(f"tier in {claim.id}", tier, presets.TIERS)
        probes = [low, high, -1e300, 1e300]
        for verdict, text in criteria.items():
            if verdict not in DECIDABLE:
                raise unknown(f"verdict in {claim.id}", verdict, DECIDABLE)
            criterion(text)
            for bound in map(float, re.findall(NUMBER, text)):
                step = max(abs(bound), 1.0) * 1e-6
                probes += [bound, bound - step, bound + step]
        possible = [p for p in probes if low <= p <= high and math.isfinite(p)]
        reached = {claim.verdict(tier, p) for p in possible}
        for verdict, text in criteria.items():
            if verdict not in reached:
                raise IclError(f"{claim.id}, {tier}: {verdict} {text!r} can never decide.")
        if not criteria or "not reproduced" not in reached:
            raise IclError(f"{claim.id}, {tier}: no value fails its criteria: it cannot fail.")
