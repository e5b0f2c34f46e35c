"""How far a construction is from the formula it implements, and what it costs.

Errors are those of the predictions against float64, the largest over all contexts and prefixes; x
and w are N(0, I), without noise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import unknown
from ...tasks.regression import Task, sample
from . import algorithms
from .layout import Layout, Numerics
from .primitives import aff, assemble, div, mov, products
from .programs import gradient_program, ridge_program

Kind = Literal["gradient", "ridge"]
Variant = Literal["paper", "stencil", "improved"]
Precision = Literal["float32", "float64"]
RATE, CONTEXTS = 0.03, 8


@dataclass(frozen=True)
class Report:
    """A program, what it costs and how far it is off. ``largest``: absolute weight;
    ``direct_error``: of the plain formula in the same precision. Errors are infinite for what is no
    number."""

    kind: str
    variant: str
    precision: str
    dim: int
    examples: int
    penalty: float
    layers: int
    width: int
    largest: float
    error: float
    direct_error: float


def report(
    kind: Kind,
    variant: Variant = "improved",
    dim: int = 4,
    examples: int = 4,
    penalty: float | None = None,
    precision: Precision = "float64",
    seed: int = 0,
) -> Report:
    """Build a program and measure it; ``penalty``: 1 for ``ridge``, 0 for ``gradient`` if omitted.
    ``variant``: ``paper``, three GELUs for a product and the inverse for ridge; ``stencil``, the
    same algebra with long stencils and balanced weights; ``improved``, for ridge also the gain.

    Example:
        >>> from iclutils.chapters.ridge_ols import reports
        >>> found = reports.report("ridge", dim=2, examples=2)
        >>> found.layers, found.error < 1e-3
        (9, True)
    """
    for name, given, known in (("program", kind, Kind), ("variant", variant, Variant)):
        if given not in get_args(known):
            raise unknown(name, given, get_args(known))
    penalty = float(kind == "ridge") if penalty is None else penalty
    dtype = getattr(torch, precision)
    numerics = (Numerics.paper if variant == "paper" else Numerics.improved)(dtype)
    drawn = sample(Task(dim), CONTEXTS, examples + 1, torch.Generator().manual_seed(seed))
    xs, ys = drawn.xs.to(dtype), drawn.ys.to(dtype)
    if kind == "gradient":
        program = gradient_program(dim, examples, RATE, penalty, numerics)
        truth, direct = algorithms.sgd(xs, ys, RATE, penalty), gradient_steps(xs, ys, RATE, penalty)
    else:
        form: Literal["gain", "inverse"] = "gain" if variant == "improved" else "inverse"
        program = ridge_program(dim, examples, penalty, form, numerics)
        truth, direct = algorithms.ridge(xs, ys, penalty), sherman_morrison(xs, ys, penalty)
    settings = (kind, variant, precision, dim, examples, penalty)
    return Report(
        *settings,
        layers=len(program.blocks),
        width=program.layout.width,
        largest=program.largest,
        error=_largest(program.to(dtype)(xs, ys) - truth),
        direct_error=_largest(direct - truth),
    )


def reports(kind: Kind, **choices: Any) -> list[Report]:
    """A report for every combination of ``choices``: arguments of ``report``, or lists of them.
    ``reports("ridge", variant=["paper", "improved"], dim=[2, 4], seed=1)`` gives four."""
    lists = [
        value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for value in choices.values()
    ]
    rows = itertools.product(*lists)
    return [report(kind, **dict(zip(choices, row, strict=True))) for row in rows]


def product_errors(
    orders: Sequence[int],
    scales: Sequence[float],
    precision: Precision = "float64",
    pairs: int = 10_000,
) -> Float[Tensor, "order scale"]:
    """Largest error of a product of N(0, 1) numbers in a block, by order and ε of its stencil."""
    dtype = getattr(torch, precision)
    source = torch.Generator().manual_seed(0)
    factors = torch.randn(pairs, 2, generator=source, dtype=torch.float64).to(dtype)
    ratio = Numerics.improved(dtype).ratio
    errors = torch.zeros(len(orders), len(scales), dtype=torch.float64)
    for (row, order), (column, eps) in itertools.product(enumerate(orders), enumerate(scales)):
        layout = Layout({"factors": 2, "product": 1}, 2, Numerics(order, eps, ratio, order > 0))
        ends = layout.pick("factors")
        times = products(layout, ends[:1], ends[1:], layout.pick("product"))
        stream = layout.places[1:] + layout.field_unit * factors.double() @ ends
        after = assemble(layout, None, [times]).to(dtype)(stream.to(dtype)[:, None])
        product = layout.value(after, "product")[:, 0, 0].double()
        errors[row, column] = _largest(product - factors.double().prod(-1))
    return errors


def primitive_errors(contexts: int = 1000) -> dict[str, float]:
    """Largest error of one layer of each primitive, by name, in double precision (lemma 1). Numbers
    are N(0, 1), divisors U(1, 2)."""
    layout = Layout({"a": 3, "b": 3, "by": 1, "out": 3}, 4, Numerics.improved(torch.float64))
    source = torch.Generator().manual_seed(0)
    values = torch.randn(contexts, 4, 10, generator=source, dtype=torch.float64)
    values[..., 6] = 1 + torch.rand(contexts, 4, generator=source, dtype=torch.float64)
    values[:, 0], values[..., 7:] = 0, 0  # the start token and what is written to
    a, b, by, _ = values.split([3, 3, 1, 3], -1)
    reads = {name: layout.pick(name) for name in layout.fields}
    stream = layout.places + layout.field_unit * values @ torch.cat(list(reads.values()))
    out, end = reads["out"], 3
    layers = {  # weights, and what the last column should then hold
        "mov": (mov(layout, reads["a"], out, 1, end), [], a[:, 1]),
        "mul": (None, [products(layout, reads["a"], reads["b"], out)], (a * b)[:, end]),
        "div": (div(layout, reads["by"], end), [aff(layout, reads["a"], out)], (a / by)[:, end]),
        "aff": (None, [aff(layout, reads["a"] - reads["b"], out)], (a - b)[:, end]),
    }
    errors = {
        name: layout.value(assemble(layout, head, neurons)(stream), "out")[:, end] - wanted
        for name, (head, neurons, wanted) in layers.items()
    }
    return {name: _largest(error) for name, error in errors.items()}


def gradient_steps(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], rate: float, penalty: float
) -> Float[Tensor, "*batch n"]:
    """Prediction of each y after w -= 2α (x (xᵀw - y) + λ w) on every pair before, in xs.dtype."""
    weights = torch.zeros_like(xs[..., 0, :])
    predicted = []
    for x, y in zip(xs.unbind(-2), ys.unbind(-1), strict=True):
        predicted.append((x * weights).sum(-1))
        weights = weights - 2 * rate * (x * (predicted[-1] - y)[..., None] + penalty * weights)
    return torch.stack(predicted, -1)


def sherman_morrison(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], penalty: float
) -> Float[Tensor, "*batch n"]:
    """Prediction of each y by A⁻¹b, A⁻¹ updated from I/λ by each pair before it, in xs.dtype."""
    inverse = torch.eye(xs.shape[-1], dtype=xs.dtype, device=xs.device) / penalty
    moment = torch.zeros_like(xs[..., 0, :])
    predicted = []
    for x, y in zip(xs.unbind(-2), ys.unbind(-1), strict=True):
        predicted.append((x * (inverse @ moment[..., None])[..., 0]).sum(-1))
        u = (inverse @ x[..., None])[..., 0]
        q = 1 + (x * u).sum(-1)
        inverse = inverse - u[..., :, None] * u[..., None, :] / q[..., None, None]
        moment = moment + x * y[..., None]
    return torch.stack(predicted, -1)


def _largest(errors: Tensor) -> float:
    return float(errors.double().abs().nan_to_num(nan=torch.inf).max())
