"""Circuits: which parts of a model do one thing, how they connect, and what happens if not."""
