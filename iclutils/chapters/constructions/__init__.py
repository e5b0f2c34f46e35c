"""Constructions: weights set by hand with which a standard transformer runs an algorithm.

{cite}`akyurek2023`, section 3: four primitives (``mov``, ``mul``, ``div``, ``aff``) are single
layers of a transformer, and their composition takes a gradient step (theorem 1) or updates a ridge
solution (theorem 2). Here they are weights of GPT-2 blocks, and they run: ``layout`` says what each
channel holds and how it is calculated with, ``primitives`` sets the weights of a block,
``programs`` composes blocks, and ``reports`` measures how far a program is from the formula.
"""
