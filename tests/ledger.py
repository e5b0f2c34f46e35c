"""A small ledger for tests, and sound claims to be changed."""

import yaml

from book._tools import run
from iclutils import claims
from iclutils.files import read_json, write_json

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
  tiers: {paper: {holds: "> 1"}, mini: {holds: "> 1", weaker: "> 0"}, real: mini}
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
RECORD = {"chapter": "90_demo", "machine": {"cores": 2}, "seconds": 1.5, "date": "2026-01-01",
          "commit": "1" * 40, "science": {"measure": "1", "sizes": "1"}}  # fmt: skip
CELLS = ['tier = "mini"\nmodel = ""\nweights = "trained"\nseed = 0\n', "1 + 1"]


def measured(name, value, spread=0.0, count=1, null=None, **where):
    """Judge and keep a value as the mini tier does, or a sequence of them."""
    where = {"tier": "mini", "model": "m", "seed": 0, "device": "cpu"} | where
    own = None if null is None else claims.summary(null)
    found = claims.summary(value, spread, count)
    return claims.keep(claims.find(name), found, own, claims.paired(value, null), **where)


def entry(**changes):
    """A sound ledger entry, with changes; ``None`` removes a field."""
    sound = {
        "id": "90.score",
        "statement": "The score is high.",
        "source": "nobody2026",
        "measure": "score, a fraction",
        "cell": "90-score",
        "kind": "finding",
        "origin": "own",
        "range": [0, 1],
        "tolerance": "made up",
        "tiers": {"mini": {"holds": ">= 0.8", "weaker": ">= 0.5"}},
    }
    return {k: v for k, v in (sound | changes).items() if v is not None}


def dump(*entries):
    """YAML in the order given: the order of criteria matters."""
    return yaml.safe_dump([*entries], sort_keys=False)


def ran(root, value, tier="mini", **record):
    """Leave behind what a run of the chapter would."""
    done = run.plan("90", {"tier": tier}, root / "_build")
    for claim in done.asks():
        measured(claim, value, tier=done.kind)
    notebook = read_json(done.source)
    for number, cell in enumerate(notebook["cells"], 1):
        cell["execution_count"], cell["metadata"]["papermill"] = number, {"duration": 0.1}
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["2"]}]
    write_json(done.notebook, notebook)
    write_json(done.record, RECORD | {"tier": done.kind} | record)
    write_json(done.stamp, {"parameters": done.parameters})
    return done
