"""One answer: is it there, is it the student's own, is it right, and if not, what went wrong.

``compare`` knows what each typical mistake would have given, and so can name it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

# What an answer may not be made of.
LENSES = (
    *(f"iclutils.interp.{name}" for name in ("head_scores", "readout", "statistics", "weights")),
    *("iclutils.chapters", "iclutils.bookkit.coursework"),
)


class Mistake(Exception):
    """A wrong answer; the message names the likely mistake."""


def generator(seed: int) -> Generator:
    """The source of a question's random inputs."""
    return Generator().manual_seed(1000 + seed)


def normal(draw: Generator, *shape: int) -> Tensor:
    """Normal numbers, in double precision."""
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def letter(name: str, answer: Any) -> str:
    """The choice among four, whatever its case."""
    found = str(answer).strip().lower()
    if found not in tuple("abcd"):
        raise Mistake(f"`{name}` is one of the letters 'a' to 'd'; got {answer!r}.")
    return found


def prepared(name: str, answer: Any, function: bool) -> Any:
    """The answer, ready to be judged.

    A function gets copies of its tensors, and what it raises becomes a ``Mistake``.
    """
    if answer is None or answer is ...:
        raise Mistake(f"`{name}` is missing or still `...`: nothing is written yet.")
    if not function:
        return answer
    if not callable(answer):
        raise Mistake(f"`{name}` should be a function; it is a {type(answer).__name__}.")
    borrowed = next((each for each in _mentioned(answer) if each.startswith(LENSES)), "")
    if borrowed:
        raise Mistake(f"`{name}` uses {borrowed}. Write it yourself, on tensors.")

    @functools.wraps(answer)
    def guarded(*args: Any, **more: Any) -> Any:
        try:
            given = answer(*map(_copy, args), **{key: _copy(x) for key, x in more.items()})
        except Exception as error:
            raise Mistake(f"`{name}` raised {type(error).__name__}: {error}") from error
        if given is None or given is ...:
            raise Mistake(f"`{name}` returned None: nothing is written yet, or no `return`.")
        return given

    return guarded


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _mentioned(answer: Callable[..., Any]) -> Iterator[str]:
    """Modules that a function's code refers to, one level deep."""
    code = getattr(answer, "__code__", None)
    codes = [code] if code else []
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            value = getattr(answer, "__globals__", {}).get(name)
            module = value if isinstance(value, types.ModuleType) else None
            yield module.__name__ if module else str(getattr(value, "__module__", ""))
            yield name  # an import inside the function


def compare(
    got: Any, truth: Any, mistakes: Mapping[str, Any] | None = None, tolerance: float = 1e-5
) -> None:
    """Return if ``got`` is the truth.

    Args:
        got: what the answer is.
        truth: a tensor, number, word or tuple.
        mistakes: for each message, what that mistake would have given.
        tolerance: how far numbers may be off, relative to the largest of the truth and to 1.
    """
    if not _fault(got, truth, tolerance):
        return
    for message, value in (mistakes or {}).items():
        if _fault(value, truth, tolerance) and not _fault(got, value, tolerance):
            raise Mistake(message)
    raise Mistake(_fault(got, truth, tolerance))


def _fault(got: Any, truth: Any, tolerance: float) -> str:
    """What is wrong, or nothing."""
    if isinstance(truth, Tensor):
        return _tensor_fault(got, truth, tolerance)
    if isinstance(got, Tensor) and got.ndim == 0:
        got = got.item()
    if isinstance(truth, str):
        right = isinstance(got, str) and got.strip().lower() == truth.strip().lower()
        return "" if right else f"{got!r} is not the right answer."
    if isinstance(truth, tuple):
        given = tuple(got) if isinstance(got, list | tuple) else got
        return "" if given == truth else f"{given!r} is not the right answer."
    if isinstance(truth, bool) or isinstance(got, bool):
        return "" if got is truth else f"Expected True or False, and not {got!r}."
    if not isinstance(got, int | float):
        return f"Expected a number; got a {type(got).__name__}."
    close = abs(got - truth) <= tolerance * max(1.0, abs(truth))
    return "" if close else f"The value {got:.6g} is off. Check it by hand on a small case."


def _tensor_fault(got: Any, truth: Tensor, tolerance: float) -> str:
    if not isinstance(got, Tensor):
        return f"Expected a tensor; got a {type(got).__name__}."
    if got.shape != truth.shape:
        return f"Expected the shape {tuple(truth.shape)}; got {tuple(got.shape)}."
    if _kind(got) != _kind(truth):
        return f"Expected a tensor of {_kind(truth)}; its dtype is {got.dtype}."
    got, truth = got.detach().double(), truth.detach().double()
    if got.isnan().any() and not truth.isnan().any():
        return "The result has NaN in it: is there a division by zero, or a log of zero?"
    if truth.numel() == 0:
        return ""
    # Equal infinities and NaN are no difference.
    same = (got == truth) | (got.isnan() & truth.isnan())
    off = torch.where(same, torch.zeros_like(got), (got - truth).abs()).max().item()
    scale = truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 0.0
    if off <= tolerance * max(1.0, scale):
        return ""
    return f"The shape is right, the values are not: they are off by up to {off:.3g}."


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "True and False"
    return "real numbers" if tensor.is_floating_point() else "whole numbers"
