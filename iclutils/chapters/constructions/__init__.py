"""Constructions: weights set by hand with which a standard transformer runs an algorithm.

Akyurek et al. 2023, section 3: four primitives (``mov``, ``mul``, ``div``, ``aff``) are single
layers of a transformer, and their composition takes a gradient step (theorem 1) or updates a ridge
solution (theorem 2). Here they are weights of GPT-2 blocks, and they run: ``block`` is the
forward pass, ``layout`` says what each channel holds, ``stencils`` multiplies with GELUs,
``primitives`` sets the weights, ``gradient`` and ``ridge`` compose them into programs, and
``reports`` measures how far a program is from the formula.
"""
