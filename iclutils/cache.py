"""Measurements stored on disk, so that an interrupted run of a chapter goes on where it was.

``joblib.Memory`` stores them. The key is what a measurement depends on: the code of this package,
the versions of the libraries, the function, and its arguments: tensors by their content, models by
their weights, generators by their state. A change of any file of the package measures all again.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from joblib import Memory
from joblib.hashing import NumpyHasher
from torch import Tensor, nn

from . import claims
from .errors import IclError
from .files import PACKAGE
from .zoo import smollm2

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def cached(
    function: Callable[Arguments, Value], *args: Arguments.args, **named: Arguments.kwargs
) -> Value:
    """Return ``function(*args, **named)``, from disk if it was computed before by the same code.

    A generator among the arguments is left as the function left it; models with hooks are refused.
    A function that is not this package's is computed, since what it depends on is not known. What
    is read says so on stderr, with the seconds that an earlier run took for it. Use
    ``Session.cached`` in a notebook: at the tier ``mini`` it computes and stores nothing.
    """
    if not _is_ours(function):
        return function(*args, **named)
    memory = Memory(folder(), verbose=0, compress=1)
    stored = memory.cache(_call, ignore=["function", "args", "named"])
    key = _Hasher().hash((_versions(), function, args, named))
    is_stored = stored.check_call_in_cache(key, function, args, named)
    value, states, seconds = stored(key, function, args, named)
    if is_stored:
        print(f"{function.__name__}: read; an earlier run took {seconds:.1f} s", file=sys.stderr)
    for generator, state in zip(_generators(args, named), states, strict=True):
        generator.set_state(state)
    return cast(Value, value)


def folder() -> Path:
    """Return the folder of the measurements, in the user's cache; it may be deleted at any time."""
    return smollm2.cache() / "measured"


def _call(
    key: str, function: Callable[..., Value], args: Any, named: Any
) -> tuple[Value, list[Tensor], float]:
    """Compute what is stored: the value, the states in which its generators are left, seconds."""
    start = time.perf_counter()
    value = function(*args, **named)
    states = [draw.get_state() for draw in _generators(args, named)]
    return value, states, time.perf_counter() - start


def _generators(args: Any, named: Any) -> list[torch.Generator]:
    return [x for x in (*args, *named.values()) if isinstance(x, torch.Generator)]


def _is_ours(function: Callable[..., object]) -> bool:
    return function.__module__.startswith("iclutils.") and "<" not in function.__qualname__


@cache
def _versions() -> str:
    """Hash the package's code and data, and name the libraries."""
    digest = hashlib.sha256(repr(claims.provenance()["versions"]).encode())
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".toml", ".tsv", ".yml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _Hasher(NumpyHasher):
    """joblib's hash, which also knows tensors, models, generators, devices and functions."""

    def save(self, value: Any) -> None:
        if isinstance(value, Tensor):
            value = (str(value.dtype), value.detach().cpu().contiguous().numpy())
        elif isinstance(value, nn.Module):
            value = _weights(value)
        elif isinstance(value, torch.Generator):
            value = ("generator", value.get_state().numpy())
        elif isinstance(value, torch.device):
            value = str(value)
        elif isinstance(value, FunctionType):
            if not _is_ours(value):
                raise IclError(
                    f"The code of {value.__name__} is not known: it is none of iclutils."
                )
            value = value.__module__, value.__qualname__
        super().save(value)


_DIGESTS: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()


def _weights(model: nn.Module) -> tuple[Any, ...]:
    """Return what tells a model from another: its sizes and weights, whose hash is known as long as
    these are where they were, unchanged as torch counts changes, and of the same sums."""
    points = getattr(model, "hook_dict", {}).values()
    if any(point.fwd_hooks or point.bwd_hooks for point in points):
        raise IclError("A model with hooks is not cached: set them inside the function.")
    settings = vars(getattr(model, "cfg", model)) or {}
    plain = {k: v for k, v in settings.items() if isinstance(v, int | float | str | bool)}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    now = [(name, x.data_ptr(), x._version, float(x.sum())) for name, x in tensors.items()]
    if model not in _DIGESTS or _DIGESTS[model][0] != now:
        _DIGESTS[model] = now, _Hasher().hash(tensors)
    return "model", type(model).__name__, plain, _DIGESTS[model][1]
