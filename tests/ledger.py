"""A small ledger for tests, and sound claims to be changed."""

import yaml

from iclutils import claims

LEDGER = """
- id: "90.first"
  headline: true
  cell: start
  origin: paper
  statement: It is big.
  source: "{cite}`xiang2024`"
  published: -13.898
  measure: the size
  tiers: {paper: {holds: "> 1"}, mini: {holds: "> 1", weaker: "> 0"}, real: mini}
  tolerance: a bar for the test
- id: "90.second"
  cell: start
  added_after: "90.first"
  origin: own
  statement: It is round.
  source: a bar of ours
  measure: the roundness
  tiers: {mini: {holds: "> 1"}}
  tolerance: a bar for the test
"""


def measured(name, value, spread=0.0, count=1, null=None, **where):
    """Judge and keep a value as the mini tier does, or a sequence of them."""
    where = {"tier": "mini", "model": "m", "seed": 0, "device": "cpu"} | where
    own = None if null is None else claims.summary(null)
    found = claims.summary(value, spread, count)
    pairs = claims.paired_difference(value, null)
    return claims.write(claims.results_folder(), claims.find(name), found, own, pairs, **where)


def entry(**changes):
    """A sound ledger entry, with changes; ``None`` removes a field."""
    sound = {
        "id": "90.score",
        "statement": "The score is high.",
        "source": "nobody2026",
        "measure": "score, a fraction",
        "cell": "90-score",
        "origin": "own",
        "range": [0, 1],
        "tolerance": "made up",
        "tiers": {"mini": {"holds": ">= 0.8", "weaker": ">= 0.5"}},
    }
    return {k: v for k, v in (sound | changes).items() if v is not None}


def dump(*entries):
    """YAML in the order given: the order of criteria matters."""
    return yaml.safe_dump([*entries], sort_keys=False)
