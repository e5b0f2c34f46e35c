"""A small ledger for tests."""

LEDGER = """
- id: "90.first"
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
