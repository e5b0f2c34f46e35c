"""A small ledger for tests."""

LEDGER = """
- id: "90.first"
  cell: start
  statement: It is big.
  source: "{cite}`xiang2024`"
  published: -13.898
  measure: the size
  tiers: {paper: {reproduced: "> 1"}, mini: {reproduced: "> 1", partly: "> 0"}}
  tolerance: a bar for the test
- id: "90.second"
  cell: start
  statement: It is round.
  source: a bar of ours
  measure: the roundness
  tiers: {mini: {corrected: "> 1"}}
  tolerance: a bar for the test
"""
