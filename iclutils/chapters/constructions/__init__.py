"""Constructions: weights set by hand with which a standard transformer runs an algorithm.

{cite}`akyurek2023`, section 3: the primitives ``mov``, ``mul``, ``div`` and ``aff`` are layers of a
transformer; composed, they take a gradient step (theorem 1) or update a ridge solution (theorem 2).
Here they are weights of GPT-2 blocks, and they run.
"""
