"""A small ledger for tests, and sound claims to be changed."""

from typing import Any

import yaml

from iclutils import claims

LEDGER = """
- id: "90.first"
  headline: true
  cell: start
  kind: finding
  origin: paper
  statement: It is big.
  source: "{cite}`xiang2024`"
  published: -13.898
  measure: the size
  tiers: {paper: {holds: "> 1"}, mini: {holds: "> 1", partly: "> 0"}, real: mini}
  tolerance: a bar for the test
- id: "90.second"
  cell: start
  kind: erratum
  added_after: "90.first"
  origin: own
  statement: It is round.
  source: a bar of ours
  measure: the roundness
  tiers: {mini: {holds: "> 1"}}
  tolerance: a bar for the test
"""


def measured(
    name: str, value: Any, spread: float = 0.0, count: int = 1, null: Any = None, **where: Any
) -> claims.Result:
    """Judge and keep a value as the mini tier does, or a sequence of them."""
    where = {"tier": "mini", "model": "m", "seed": 0, "device": "cpu"} | where
    own = None if null is None else claims.summary(null)
    return claims.keep(claims.find(name), claims.summary(value, spread, count), own, **where)


def entry(**changes: object) -> dict[str, object]:
    """A sound ledger entry, with changes; ``None`` removes a field."""
    sound: dict[str, object] = {
        "id": "90.score",
        "statement": "The score is high.",
        "source": "nobody2026",
        "measure": "score, a fraction",
        "cell": "90-score",
        "kind": "finding",
        "origin": "own",
        "range": [0, 1],
        "tolerance": "made up",
        "tiers": {"mini": {"holds": ">= 0.8", "partly": ">= 0.5"}},
    }
    return {k: v for k, v in (sound | changes).items() if v is not None}


def dump(*entries: dict[str, object]) -> str:
    """YAML in the order given: the order of criteria matters."""
    return yaml.safe_dump([*entries], sort_keys=False)
