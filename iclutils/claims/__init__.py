"""Claims: what the sources say, what we measured, and the verdict between them.

Each notebook has a ledger, ``NN_chapter.yml``, written before the measurement; a claim that cannot
fail is refused. A criterion is ``"> a"``, ``">= a"``, ``"< a"``, ``"<= a"`` or ``"a .. b"`` (both
ends included). A claim *holds* if the whole 95 % interval of the mean meets the criterion; *partly*
if a part of it does, or if the mean meets a second, weaker criterion. The *null* is the same
measurement on networks with random weights, or what the ledger names.
"""

from __future__ import annotations

import math
import operator
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.stats import t as student

from .. import presets
from ..errors import IclError, unknown
from ..files import CHECKOUT, output_folder, read_json, write_json

ROOT = Path(__file__).parent
KINDS = ("finding", "identity", "erratum")
ORIGINS = ("paper", "note", "own")
HOLDS, PARTLY, FAILS, UNDEFINED = "holds", "holds partly", "does not hold", "undefined"
VERDICTS = (HOLDS, PARTLY, FAILS, UNDEFINED, "not run")
CRITERIA = ("holds", "partly")
NULL = "-null"  # after the name of a tier: its networks with random weights
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times faster
NUMBER = r"-?\d+(?:\.\d*)?(?:e-?\d+)?"
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
Summary = tuple[float, float, int]  # a mean, its standard error, and over how many repetitions
VERSIONED = ("iclutils", "torch", "transformers", "transformer-lens", "numpy")


@dataclass(frozen=True)
class Claim:
    """One line of the ledger."""

    id: str  # NN.some_name
    kind: str  # finding, identity (true of any network) or erratum (something printed is wrong)
    origin: str  # who says it: a paper, a note, or we ourselves
    statement: str  # in our words
    source: str  # where the source says it, with keys of the bibliography
    measure: str | dict[str, str]  # what we measure, with its unit; one text, or one for each tier
    cell: str  # the name of the notebook cell that checks it
    tiers: dict[str, dict[str, str]]  # for each that it applies to: holds, and perhaps partly
    tolerance: str  # where the bounds come from
    over: str | dict[str, str] = ""  # what was repeated; likewise
    null: str = ""  # the fair null, where it is not random weights; the cell measures it
    undefined: str = ""  # why random weights leave nothing to measure, where that is so
    headline: bool = False  # one of the three that the evidence of a chapter opens with
    added_after: str = ""  # the claim that had failed when this easier one was added
    published: float | str | None = None  # the source's value of the same quantity
    range: tuple[float, float] = (-math.inf, math.inf)  # values that the measure can take

    @property
    def chapter(self) -> str:
        """Number of the chapter, the part of the id before the dot."""
        return self.id.split(".")[0]

    def criteria(self, tier: str) -> dict[str, str]:
        """The criteria of a tier, or of the tier whose null it is."""
        name = of(tier)
        if name not in self.tiers:
            raise unknown(f"tier of claim {self.id}", name, self.tiers)
        return self.tiers[name]

    def said(self, field: str, tier: str) -> str:
        """The ``measure``, or what was repeated (``over``), at a tier."""
        text = getattr(self, field)
        return text if isinstance(text, str) else text.get(of(tier), "")

    def verdict(self, tier: str, value: float, spread: float = 0.0, count: int = 1) -> str:
        """Verdict on a mean with its standard error over ``count`` repetitions."""
        criteria = self.criteria(tier)
        if not math.isfinite(value) or not math.isfinite(spread):
            raise IclError(f"{self.id}: measured {value} ± {spread}, which is not a number.")
        low, high = self.range  # no repetition can lie outside
        if not low <= value <= high:
            raise IclError(f"{self.id}: measured {value}, outside its range {self.range}.")
        reach = spread * _reach(count)
        first, last = max(low, value - reach), min(high, value + reach)
        bounds = [float(x) for x in re.findall(NUMBER, criteria["holds"])]
        points = [first, value, last, *(x for x in bounds if first < x < last)]
        met = [criterion(criteria["holds"])(x) for x in points]
        if all(met):
            return HOLDS
        weaker = "partly" in criteria and criterion(criteria["partly"])(value)
        return PARTLY if any(met) or weaker else FAILS


@cache
def _reach(count: int) -> float:
    """Half the 95 % interval of a mean, in standard errors."""
    return float(student.ppf(0.975, count - 1)) if count > 1 else 2.0


@dataclass(frozen=True)
class Result:
    """One measurement and its provenance; ``spread`` is the standard error over ``count``."""

    id: str
    verdict: str
    value: float | None  # None where it is undefined
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
    null: dict[str, Any] | None = None  # value, spread, count and verdict of the cell's own null
    detail: dict[str, Any] = field(default_factory=dict)


def of(column: str) -> str:
    """The tier that a column of results belongs to: ``real`` for ``real-null``, ``real-part``."""
    return column.partition("-")[0]


def chapters() -> list[str]:
    """Names of the chapters that have a ledger, such as ``01_gpt2_induction``."""
    return sorted(path.stem for path in ROOT.glob("*.yml"))


def named_in(cells: Iterable[Mapping[str, Any]]) -> set[str]:
    """Ids that the code of a notebook's cells names, other than to show what was found."""
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = re.sub(r"\bbook\.(table|kept)\(.*?\)", "", code, flags=re.DOTALL)
    return set(re.findall(r"""["'](\d\d\.[a-z]\w*)["']""", code))


@cache
def ledger(chapter: str | None = None) -> dict[str, Claim]:
    """Claims by id, of one chapter (name or number) or of all."""
    names = [name for name in chapters() if chapter in (None, name, name.split("_")[0])]
    if chapter is not None and not names:
        raise unknown("chapter", chapter, chapters())
    return {k: v for name in names for k, v in read_ledger(ROOT / f"{name}.yml").items()}


def matching(name: str) -> list[Claim]:
    """The claim of an id, or those of a chapter or section, such as ``"06"``, ``"06-circuit"``."""
    several = [c for c in ledger().values() if name in (c.chapter, f"{c.chapter}-{c.cell}")]
    return several or [find(name)]


def find(name: str) -> Claim:
    """The claim of an id."""
    if name not in ledger():
        raise unknown("claim", name, ledger())
    return ledger()[name]


def read_ledger(path: Path) -> dict[str, Claim]:
    """Read and check one ledger file."""
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), LOADER)
    except yaml.YAMLError as error:
        raise IclError(f"{path.name} is not valid YAML: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise IclError(f"{path.name} is not a list of claims, each a map of fields.")
    claims: dict[str, Claim] = {}
    for entry in entries:
        # YAML takes the key null, and the number 2, for something else.
        given: dict[str, Any] = {
            k or "null": float(v) if isinstance(v, int) and k != "headline" else v
            for k, v in entry.items()
        }
        try:
            criteria = given.get("tiers")
            if isinstance(criteria, dict):  # "real: mini" takes the criteria of another tier
                same = {k: v for k, v in criteria.items() if isinstance(v, str)}
                given["tiers"] = criteria | {k: criteria.get(v, v) for k, v in same.items()}
            if "range" in given:
                given["range"] = tuple(map(float, given["range"]))
            claim = Claim(**given)
            refuse_if_it_cannot_fail(claim)
        except (TypeError, ValueError, AttributeError) as error:  # an IclError is a ValueError
            if isinstance(error, IclError) and str(entry.get("id")) in str(error):
                raise
            raise IclError(
                f"{path.name}, claim {entry.get('id')!r}: {error}".rstrip(".") + "."
            ) from error
        if claim.id in claims:
            raise IclError(f"{path.name} has two claims {claim.id!r}.")
        if claim.chapter != path.stem.split("_")[0]:
            raise IclError(f"{claim.id!r} does not belong in {path.name}.")
        claims[claim.id] = claim
    return claims


def keep(claim: Claim, measured: Summary, null: Summary | None = None, **where: Any) -> Result:
    """Judge a mean and write the result with its provenance as JSON. ``where`` has the other fields
    of a ``Result``: tier, model, seed, device, detail."""
    made = _judged(claim, where["tier"], *measured) | provenance() | where
    made["null"] = None if null is None else _judged(claim, where["tier"], *null)
    result = Result(claim.id, **made)
    write_json(results_folder() / result.tier / f"{claim.id}.json", asdict(result))
    return result


def summary(value: Any, spread: float = 0.0, count: int = 1) -> Summary:
    """Mean, standard error and number of repetitions; a number stands for itself."""
    if not np.ndim(value):
        return float(value), float(spread), int(count)
    repeated = np.asarray([float(x) for x in value])
    number = len(repeated)
    error = repeated.std(ddof=1) / math.sqrt(number) if number > 1 else 0.0
    return float(repeated.mean()), float(error), number


def _judged(
    claim: Claim, tier: str, value: float | None, spread: float, count: int
) -> dict[str, Any]:
    """A measurement as it is stored, with its verdict; None is undefined."""
    if value is None or (math.isnan(value) and tier.endswith(NULL)):  # nothing to measure there
        return {"verdict": UNDEFINED, "value": None, "spread": 0.0, "count": count}
    verdict = claim.verdict(tier, value, spread, count)
    return {"verdict": verdict, "value": value, "spread": spread, "count": count}


def null_of(result: Result, results: Mapping[tuple[str, str], Result]) -> Result | None:
    """Result of the null: the cell's own, or that of the run with random weights."""
    if result.null:
        return Result(**asdict(result) | result.null | {"null": None})
    return results.get((result.tier + NULL, result.id))


def provenance() -> dict[str, Any]:
    """Versions and time of a result."""
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


def read_results(*folders: Path, name: str = "*") -> dict[tuple[str, str], Result]:
    """Results by (tier, claim id), of all claims or one; of folders the later one wins."""
    found: dict[tuple[str, str], Result] = {}
    for path in (path for folder in folders for path in sorted(folder.glob(f"*/{name}.json"))):
        known = read_json(path)
        try:
            result = Result(**known)
            if result.id not in ledger():
                raise IclError(f"claim {result.id!r} is no longer in the ledger")
            found[result.tier, result.id] = _judged_anew(result)
        except (TypeError, ValueError, KeyError) as error:  # an IclError is a ValueError
            raise IclError(f"{path} is not a result ({error}). Delete it.") from error
    return found


def _judged_anew(result: Result) -> Result:
    """A stored measurement under the criteria of today, which may not be those it was stored under;
    what the measure cannot give is refused."""
    again = partial(_judged, ledger()[result.id], result.tier)
    null = result.null and again(*(result.null[key] for key in ("value", "spread", "count")))
    return replace(result, **again(result.value, result.spread, result.count), null=null)


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
    """Each verdict, ``does not hold`` too, must be that of some value the measure can take."""
    for what, value, known in (("kind", claim.kind, KINDS), ("origin", claim.origin, ORIGINS)):
        if value not in known:
            raise unknown(f"{what} in {claim.id}", value, known)
    if not claim.tiers or not claim.tolerance:
        raise IclError(f"{claim.id}: a claim needs criteria for some tier, and a tolerance.")
    for text in (claim.measure, claim.over):
        for tier in text if isinstance(text, dict) else ():
            if tier not in claim.tiers:
                raise unknown(f"tier in {claim.id}", tier, claim.tiers)
    for tier in claim.tiers:
        if not claim.said("measure", tier):
            raise IclError(f"{claim.id}: the ledger does not say what is measured at {tier}.")
    low, high = claim.range
    for tier, criteria in claim.tiers.items():
        if tier not in presets.TIERS:
            raise unknown(f"tier in {claim.id}", tier, presets.TIERS)
        probes = [low, high, -1e300, 1e300]
        for name, text in criteria.items():
            if name not in CRITERIA:
                raise unknown(f"criterion in {claim.id}", name, CRITERIA)
            criterion(text)
            for bound in map(float, re.findall(NUMBER, text)):
                step = max(abs(bound), 1.0) * 1e-6
                probes += [bound, bound - step, bound + step]
        if "holds" not in criteria:
            raise IclError(f"{claim.id}, {tier}: a claim needs the criterion 'holds'.")
        possible = [p for p in probes if low <= p <= high and math.isfinite(p)]
        reached = {claim.verdict(tier, p) for p in possible}
        for name, verdict in zip(CRITERIA, (HOLDS, PARTLY), strict=True):
            if name in criteria and verdict not in reached:
                raise IclError(f"{claim.id}, {tier}: {name} {criteria[name]!r} can never decide.")
        if FAILS not in reached:
            raise IclError(f"{claim.id}, {tier}: no value fails its criteria: it cannot fail.")
