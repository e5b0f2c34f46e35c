"""Reports: how far a construction is from the formula it implements, and what it costs.

Contexts are drawn as in the paper's main experiment: x and w from N(0, I), no noise. Errors are
measured in the predictions at all prefixes, against float64, as the largest over all contexts.

Example:
    >>> from iclutils.chapters.constructions import reports
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError, unknown
from ...tasks.regression import Contexts, Task, sample, scaled_inputs
from ..regression import algorithms
from .formulas import gradient_steps, sherman_morrison
from .gradient import gradient_program
from .layout import Layout, Numerics
from .primitives import assemble, products
from .program import Program
from .ridge import Form, ridge_program

Kind = Literal["gradient", "ridge"]
Variant = Literal["paper", "stencil", "improved"]
Precision = Literal["float32", "float64"]
KINDS = ("gradient", "ridge")
VARIANTS = ("paper", "stencil", "improved")
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Report:
    """A program, what it costs and how far it is off.

    ``error`` is the largest of a prediction; ``direct_error`` that of the plain formula,
    calculated in the same precision: what no construction can be expected to beat. Both are
    infinite where the result is not a number. ``largest`` is the largest absolute weight.
    """

    kind: str
    variant: str
    precision: str
    dim: int
    examples: int
    penalty: float
    eps: float
    scale: float
    layers: int
    per_example: int
    width: int
    neurons: int
    largest: float
    error: float
    direct_error: float


def report(
    kind: Kind,
    variant: Variant = "improved",
    dim: int = 4,
    examples: int = 4,
    penalty: float | None = None,
    rate: float = 0.03,
    precision: Precision = "float64",
    eps: float | None = None,
    scale: float = 1.0,
    contexts: int = 8,
    seed: int = 0,
) -> Report:
    """Build a program and measure it.

    Args:
        kind: ``gradient`` or ``ridge``.
        variant: ``paper``: three GELUs for a product, the inverse for ridge. ``stencil``: the
            same algebra with long stencils and balanced weights. ``improved``: for ridge also
            the gain form; the gradient needs no other form, so that it is the same as ``stencil``.
        dim: d.
        examples: n; predictions rest on 0 to n of them.
        penalty: λ; if omitted 1 for ``ridge`` and 0 for ``gradient``.
        rate: α; ``ridge`` has none.
        precision: in which weights are held and the program runs.
        eps: scale of the products; if omitted the best for the precision.
        scale: of the inputs; 1 is what the sizes of the products are set for.
        contexts: how many.
        seed: of the contexts.

    Example:
        >>> found = reports.report("ridge", dim=2, examples=2, contexts=2)
        >>> found.layers, found.error < 1e-3
        (9, True)
    """
    for given, noun, known in (
        (kind, "program", KINDS),
        (variant, "variant", VARIANTS),
        (precision, "precision", tuple(PRECISIONS)),
    ):
        if given not in known:
            raise unknown(noun, given, known)
    if not math.isfinite(scale):
        raise IclError(f"The scale of the inputs must be a finite number, not {scale}.")
    penalty = float(kind == "ridge") if penalty is None else penalty
    dtype = PRECISIONS[precision]
    numerics = (Numerics.paper if variant == "paper" else Numerics.improved)(dtype, eps)
    if kind == "gradient":
        program = gradient_program(dim, examples, rate, penalty, numerics)
    else:
        form: Form = "gain" if variant == "improved" else "inverse"
        program = ridge_program(dim, examples, penalty, form, numerics)
    source = torch.Generator().manual_seed(seed)
    drawn = scaled_inputs(sample(Task(dim), contexts, examples + 1, source), scale)
    error, direct_error = _errors(program.to(dtype), kind, penalty, rate, drawn)
    return Report(
        kind=kind,
        variant=variant,
        precision=precision,
        dim=dim,
        examples=examples,
        penalty=penalty,
        eps=numerics.eps,
        scale=scale,
        layers=len(program.blocks),
        per_example=program.per_example,
        width=program.layout.width,
        neurons=program.hidden,
        largest=program.largest,
        error=error,
        direct_error=direct_error,
    )


def _errors(
    program: Program, kind: str, penalty: float, rate: float, drawn: Contexts
) -> tuple[float, float]:
    xs, ys = drawn.xs.to(program.dtype), drawn.ys.to(program.dtype)
    if kind == "gradient":
        truth = algorithms.predictions(algorithms.sgd_weights(xs, ys, rate, penalty), xs)
        direct = gradient_steps(xs, ys, rate, penalty)
    else:
        truth = algorithms.ridge(xs, ys, penalty)
        direct = sherman_morrison(xs, ys, penalty)
    return _largest(program(xs, ys) - truth), _largest(direct - truth)


def _largest(errors: Tensor) -> float:
    return float(errors.double().abs().nan_to_num(nan=torch.inf).max())


def reports(kind: Kind, **choices: Any) -> list[Report]:
    """A report for every combination of ``choices``: arguments of ``report``, or lists of them.

    ``reports("ridge", variant=["paper", "improved"], dim=[2, 4], seed=1)`` gives four.

    Example:
        >>> kinds = ["float32", "float64"]
        >>> both = reports.reports("gradient", precision=kinds, dim=2, examples=2, contexts=2)
        >>> both[1].error < both[0].error
        True
    """
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
    seed: int = 0,
) -> Float[Tensor, "order scale"]:
    """Largest error of ``mul`` on products of N(0, 1) pairs, run through a block.

    Args:
        orders: of the stencils; 0 is the paper's.
        scales: ε.
        precision: in which it runs.
        pairs: how many; of 10⁴ the largest factors are about 4.
        seed: of the pairs.

    Example:
        >>> errors = reports.product_errors(orders=[0, 2], scales=[0.1], pairs=200)
        >>> errors.shape, bool(errors[1, 0] < errors[0, 0])
        (torch.Size([2, 1]), True)
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    dtype = PRECISIONS[precision]
    source = torch.Generator().manual_seed(seed)
    factors = torch.randn(pairs, 2, generator=source, dtype=torch.float64).to(dtype)
    truth = factors.double().prod(-1)
    ratio = Numerics.improved(dtype).ratio
    out = torch.zeros(len(orders), len(scales), dtype=torch.float64)
    for (row, order), (column, eps) in itertools.product(enumerate(orders), enumerate(scales)):
        numerics = Numerics(order, eps, ratio, balanced=order > 0)
        layout = Layout({"factors": 2, "product": 1}, 2, 1, numerics)
        ends = layout.pick("factors")
        block = assemble(layout, (), [products(layout, ends[:1], ends[1:], layout.pick("product"))])
        place = layout.places[1:] + layout.field_unit * factors.double() @ ends
        stream = block.to(dtype)(place.to(dtype)[:, None])
        found = layout.value(stream, "product")[:, 0, 0].double()
        out[row, column] = _largest(found - truth)
    return out
