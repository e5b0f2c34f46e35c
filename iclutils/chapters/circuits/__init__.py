"""Circuits: which parts of a model do one thing, how they are wired, and what happens if not."""
