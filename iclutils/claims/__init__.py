"""Claims: what the sources say, what we measured, and the verdict between them.

To add a claim, write its entry in the ledger, and call ``book.check(id, values)`` in the cell that
it names. ``verdicts`` judges what was measured.

Each notebook has a ledger, ``NN_chapter.yml``, written before the measurement; a claim that cannot
fail is refused. The *null* is the same measurement on networks with random weights, or what the
ledger names. Verdicts are never stored: they follow from what was measured.
"""

import math
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import FileLock

from .. import presets
from ..errors import IclError, unknown
from ..files import CHECKOUT, output_folder, read_json, write_json
from .verdicts import CRITERIA, FAILS, HOLDS, UNDEFINED, WEAKER, bounds, criterion, judge_mean

ROOT = Path(__file__).parent
COMMITTED = CHECKOUT / "book" / "results"  # one file for each chapter and tier
ORIGINS = ("paper", "note", "own")
NULL = "-null"  # after the name of a tier: its networks with random weights
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times faster
Summary = tuple[float, float, int]  # a mean, its standard error, and over how many repetitions
VERSIONED = ("iclutils", "torch", "transformers", "transformer-lens", "numpy")


@dataclass(frozen=True)
class Claim:
    """One line of the ledger."""

    id: str  # NN.some_name
    origin: str  # who says it: a paper, a note, or we ourselves
    statement: str  # in our words
    source: str  # where the source says it, with keys of the bibliography
    measure: str | dict[str, str]  # what we measure, with its unit; one text, or one for each tier
    cell: str  # the name of the notebook cell that checks it
    tiers: dict[str, dict[str, str]]  # for each that it applies to: holds, and perhaps weaker
    tolerance: str  # where the bounds come from
    over: str | dict[str, str] = ""  # what was repeated, the unit of n; likewise
    null: str = ""  # the fair null, where it is not random weights; the cell measures it
    undefined: str = ""  # why random weights leave nothing to measure, where that is so
    headline: bool = False  # one of the three that the evidence of a chapter opens with
    added_after: str = ""  # the claim that had failed when this easier one was added
    published: float | int | str | None = None  # the source's value of the same quantity
    published_of: str = ""  # of what, where its models or texts are unlike ours
    range: tuple[float, float] = (-math.inf, math.inf)  # values that the measure can take
    step: float = 0.0  # how far rounding can move a measure that jumps, such as one of ranks

    @property
    def chapter(self) -> str:
        """Return the number of the chapter, the part of the id before the dot."""
        return self.id.split(".")[0]

    def criteria(self, tier: str) -> dict[str, str]:
        """Return the criteria of a tier, or of the tier whose null it is."""
        name = tier_of(tier)
        if name not in self.tiers:
            raise unknown(f"tier of claim {self.id}", name, self.tiers)
        return self.tiers[name]

    def text_at(self, field: str, tier: str) -> str:
        """Return the ``measure``, or what was repeated (``over``), at a tier."""
        text = getattr(self, field)
        return text if isinstance(text, str) else text.get(tier_of(tier), "")

    def refuse(self, value: float, spread: float) -> None:
        """Refuse what the measure cannot give: no number, or one outside its range."""
        if not math.isfinite(value) or not math.isfinite(spread):
            raise IclError(f"{self.id}: measured {value} ± {spread}, which is not a number.")
        if not self.range[0] <= value <= self.range[1]:
            raise IclError(f"{self.id}: measured {value}, outside its range {self.range}.")

    def verdict(self, tier: str, value: float, spread: float = 0.0, count: int = 1) -> str:
        """Judge a mean with its standard error over ``count`` repetitions."""
        self.refuse(value, spread)
        return judge_mean(self.criteria(tier), self.range, (value, spread, count))


@dataclass(frozen=True)
class Result:
    """One measurement and its provenance; ``spread`` is the standard error over ``count``."""

    id: str
    value: float | None  # None where there was nothing to measure
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
    null: dict[str, Any] | None = None  # the cell's own: value, spread, count, perhaps ``paired``
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return the verdict on what was measured, whatever its null."""
        if self.value is None:
            return UNDEFINED
        return find(self.id).verdict(self.tier, self.value, self.spread, self.count)


def tier_of(column: str) -> str:
    """Return the tier of a column of results: ``real`` for ``real-null`` and ``real-part``."""
    return column.partition("-")[0]


def chapters() -> list[str]:
    """List the chapters that have a ledger, such as ``01_gpt2_induction``."""
    return sorted(path.stem for path in ROOT.glob("*.yml"))


@cache
def ledger(chapter: str | None = None) -> dict[str, Claim]:
    """Return claims by id, of one chapter (name or number) or of all."""
    names = [name for name in chapters() if chapter in (None, name, name.split("_")[0])]
    if chapter is not None and not names:
        raise unknown("chapter", chapter, chapters())
    return {k: v for name in names for k, v in read_ledger(ROOT / f"{name}.yml").items()}


def matching(name: str) -> list[Claim]:
    """Return the claim of an id, or those of a chapter (``"06"``) or section (``"06-circuit"``)."""
    several = [c for c in ledger().values() if name in (c.chapter, f"{c.chapter}-{c.cell}")]
    return several or [find(name)]


def find(name: str) -> Claim:
    """Return the claim of an id."""
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
        try:
            fields: dict[str, Any] = {key or "null": value for key, value in entry.items()}  # YAML
            criteria = fields["tiers"]  # "real: mini" takes the criteria of another tier
            same = {k: criteria.get(v, v) for k, v in criteria.items() if isinstance(v, str)}
            fields["tiers"] = criteria | same
            if "range" in fields:
                fields["range"] = tuple(map(float, fields["range"]))
            claim = Claim(**fields)
            if claim.id in claims or claim.chapter != path.stem.split("_")[0]:
                raise IclError("there are two of that name, or it does not belong here.")
            validate(claim)
        except (TypeError, ValueError, AttributeError, KeyError) as error:  # an IclError, too
            name = f"{path.name}, claim {entry.get('id')!r}"
            raise IclError(f"{name}: {error}".rstrip(".") + ".") from error
        claims[claim.id] = claim
    return claims


def write(
    folder: Path,
    claim: Claim,
    measured: Summary,
    null: Summary | None = None,
    paired: Summary | None = None,
    **where: Any,
) -> Result:
    """Write a mean with its provenance into ``folder/TIER/NN.json``, in the place of an earlier
    one; refuse what cannot be judged. ``null`` is the cell's own, if any, ``paired`` the difference
    from it, ``where`` the other fields of a ``Result``: tier, model, seed, device, detail."""
    stored = [_measured(where["tier"], *each) for each in (measured, null) if each]
    own = stored[1] | ({"paired": paired} if paired else {}) if null else None
    result = Result(claim.id, **stored[0], null=own, **provenance(), **where)
    _refuse(result)
    path = folder / result.tier / f"{claim.chapter}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.stem}.lock")):  # of a chapter and its appendix
        before = read_file(path) if path.is_file() else {}
        write_file(path, before | {claim.id: result})
    return result


def write_file(path: Path, results: Mapping[str, Result]) -> None:
    """Write the results of a chapter at a tier, by claim. Those with the same provenance stand
    together, so that it is written once."""
    runs: list[dict[str, Any]] = []
    for name in sorted(results):
        fields = asdict(results[name])
        del fields["id"]
        values = {key: fields.pop(key) for key in ("value", "spread", "count", "null", "detail")}
        run = next((r for r in runs if {k: r[k] for k in fields} == fields), None)
        if run is None:
            runs.append(run := fields | {"claims": {}})
        run["claims"][name] = {k: v for k, v in values.items() if v not in (None, {})}
    write_json(path, {"runs": runs})


def read_file(path: Path) -> dict[str, Result]:
    """Read the results of a chapter at a tier, by claim; claims that the ledger no longer has are
    left out, and a value that its measure cannot give is refused."""
    results = {}
    try:
        for run in read_json(path)["runs"]:
            measured = run.pop("claims")
            for name in measured.keys() & ledger().keys():
                _refuse(result := Result(name, **{"value": None} | measured[name], **run))
                results[name] = result
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # an IclError, too
        raise IclError(f"{path} holds no results of a chapter ({error}). Delete it.") from error
    return results


def summary(value: Any, spread: float = 0.0, count: int = 1) -> Summary:
    """Return mean, standard error and number of repetitions; a number stands for itself, with the
    spread and the count that are given. Refuse these beside repetitions, and none."""
    if not np.ndim(value):
        return float(value), float(spread), int(count)
    if spread or count != 1 or not len(value):
        raise IclError("Give a number with its standard error and count, or repetitions alone.")
    repeated = np.asarray([float(x) for x in value])
    number = len(repeated)
    error = repeated.std(ddof=1) / math.sqrt(number) if number > 1 else 0.0
    return float(repeated.mean()), float(error), number


def paired_difference(value: Any, null: Any) -> Summary | None:
    """Return the difference of repetitions from as many of the null; None where they are no pairs,
    or one of a pair was not measurable."""
    repeated = not isinstance(null, tuple) and np.ndim(value) and np.ndim(null)  # tensors, too
    if not (repeated and 1 < len(value) == len(null)):
        return None
    less = summary([float(one) - float(other) for one, other in zip(value, null, strict=True)])
    return less if math.isfinite(less[0]) else None


def _measured(tier: str, value: float, spread: float, count: int) -> dict[str, Any]:
    """Return a measurement as it is stored; None where random weights left nothing to measure."""
    if math.isnan(value) and NULL in tier:
        return {"value": None, "spread": 0.0, "count": count}
    return {"value": value, "spread": spread, "count": count}


def _refuse(result: Result) -> None:
    """Refuse a result, or a null of its own, that its measure cannot give, or of no tier of it."""
    claim = find(result.id)
    for each in (result, null_of(result, {})):
        if each and each.value is not None:
            claim.criteria(each.tier)
            claim.refuse(each.value, each.spread)


def null_of(result: Result, results: Mapping[tuple[str, str], Result]) -> Result | None:
    """Return the result of the null: the cell's own, or that of the run with random weights."""
    if result.null:
        own = {key: result.null[key] for key in ("value", "spread", "count")}
        return replace(result, **own, null=None)
    return results.get((result.tier + NULL, result.id))


def provenance() -> dict[str, Any]:
    """Return versions and time of a result."""
    return {
        "versions": {name: metadata.version(name) for name in VERSIONED},
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def results_folder() -> Path:
    """Return the folder that results are written to: ``$ICLUTILS_RESULTS``, as the runner sets it,
    or, for a notebook that is run by hand, ``_build/by_hand`` or ``iclutils-results``."""
    return output_folder("ICLUTILS_RESULTS", "_build/by_hand", "iclutils-results")


def read_results(*folders: Path, name: str = "") -> dict[tuple[str, str], Result]:
    """Read results by (tier, claim id), of all claims or one; of folders the later one wins."""
    files = f"*/{name[:2] or '*'}.json"
    return {
        (result.tier, key): result
        for folder in folders
        for path in sorted(folder.glob(files))
        for key, result in read_file(path).items()
        if name in ("", key)
    }


@cache
def commit() -> str:
    """Return the checkout's commit, with ``+`` if the package differs; ``""`` outside of one."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*git, "status", "--porcelain", ".."], capture_output=True)
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout else "") if head.returncode == 0 else ""


def validate(claim: Claim) -> None:
    """Refuse a claim that cannot fail: some value of the measure must lead to each verdict."""
    texts = [text for text in (claim.measure, claim.over) if isinstance(text, dict)]
    for what, values, known in (
        ("origin", [claim.origin], ORIGINS),
        ("tier", claim.tiers, presets.TIERS),
        ("tier", [tier for text in texts for tier in text], claim.tiers),
        ("criterion", [name for each in claim.tiers.values() for name in each], CRITERIA),
    ):
        for value in values:
            if value not in known:
                raise unknown(what, value, known)
    if not claim.tiers or not claim.tolerance:
        raise IclError("a claim needs criteria for some tier, and a tolerance.")
    for tier, criteria in claim.tiers.items():
        if not claim.text_at("measure", tier):
            raise IclError(f"the ledger does not say what is measured at {tier}.")
        if "holds" not in criteria:
            raise IclError(f"{tier}: a claim needs the criterion 'holds'.")
        probes = [*claim.range, -1e300, 1e300]
        for text in criteria.values():
            criterion(text)
            for bound in bounds(text):
                step = max(abs(bound), 1.0) * 1e-6
                probes += [bound, bound - step, bound + step]
        low, high = claim.range
        possible = [p for p in probes if low <= p <= high and math.isfinite(p)]
        reached = {claim.verdict(tier, p) for p in possible}
        for name, verdict in zip(CRITERIA, (HOLDS, WEAKER), strict=True):
            if name in criteria and verdict not in reached:
                raise IclError(f"{tier}: {name} {criteria[name]!r} can never decide.")
        if FAILS not in reached:
            raise IclError(f"{tier}: no value fails its criteria: it cannot fail.")
