"""Gradient: a program that takes one step of gradient descent for each example.

Source: Akyurek et al. 2023 {cite}`akyurek2023`, theorem 1. The step on an example (x, y) is
``w' = w - 2α (x (xᵀw) - x y + λ w)``, from w = 0.
"""

from __future__ import annotations

import math

import torch

from ...errors import IclError
from .layout import Layout, Numerics
from .primitives import aff, assemble, mov, mul, products
from .program import Program, check, columns


def gradient_program(
    dim: int,
    examples: int,
    rate: float,
    penalty: float = 0.0,
    numerics: Numerics | None = None,
) -> Program:
    """Two blocks for a step and one for the prediction, in O(d) channels and neurons.

    Step i, in every column that comes after y_i:

    1. fetch x = x_i from its column; add xᵀw to the residual
    2. fetch the residual xᵀw - y and a flag from the column of y_i, which columns before it cannot
       see, so that nothing happens there; w changes by -2α (x residual + λ w flag)

    Args:
        dim: d.
        examples: n, the steps; the program reads n + 1 pairs, the query's included.
        rate: α.
        penalty: λ.
        numerics: how it calculates; ``Numerics.improved(torch.float64)`` if omitted.
    """
    check(dim, examples, rate=rate)
    if not (math.isfinite(penalty) and penalty >= 0):
        raise IclError(f"The penalty λ must be 0 or more, not {penalty}.")
    numerics = numerics or Numerics.improved(torch.float64)
    fields = {"label": 1, "input": dim, "weights": dim, "prediction": 1}
    fields |= {"x": dim, "dot": 1, "residual": 1, "flag": 1}
    layout = Layout(fields, columns(examples), 1, numerics)
    pick = layout.pick
    x, dot, residual, flag, weights = map(pick, ("x", "dot", "residual", "flag", "weights"))
    spread = math.sqrt(dim)
    sizes = (1.0, spread) if numerics.balanced else (1.0, 1.0)

    dots = mul(layout, x[None], weights[:, None], dot[None])
    changes = [products(layout, x, residual.expand_as(x), -2 * rate * weights, sizes)]
    if penalty > 0:
        decay = -2 * rate * penalty * weights
        changes.append(products(layout, weights, flag.expand_as(x), decay))
    used = torch.cat([x, dot, residual, flag])
    changes.append(aff(layout, used, -used))
    blocks = []
    for example in range(1, examples + 1):
        given, answer = 2 * example - 1, 2 * example
        blocks.append(assemble(layout, [mov(layout, pick("input"), x, given)], [dots]))
        read = torch.cat([dot - pick("label"), layout.where[2:]])
        fetch = mov(layout, read, torch.cat([residual, flag]), answer)
        blocks.append(assemble(layout, [fetch], changes))
    query = mul(layout, pick("input")[None], weights[:, None], pick("prediction")[None])
    return Program(layout, (*blocks, assemble(layout, (), [query])), 2)
