"""Measurements that are kept on disk, so that an interrupted run of a chapter goes on.

The key of a measurement is what it depends on: the code that the function can reach (``science``),
the versions of the libraries, and the arguments: tensors by their content, models by their weights,
generators by their state. What is damaged is computed again; on a full disk nothing is kept.
"""

from __future__ import annotations

import gzip
import inspect
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from joblib.hashing import NumpyHasher
from torch import Tensor, nn

from . import claims, science
from .errors import IclError
from .files import replacing
from .progress import say
from .zoo import smollm2

Given = ParamSpec("Given")
Found = TypeVar("Found")
_SEEN: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], str]] = WeakKeyDictionary()


def remember(function: Callable[Given, Found], *given: Given.args, **named: Given.kwargs) -> Found:
    """What ``function`` gives, or gave in an earlier run from the same code and arguments.

    A generator among the arguments is left as the function left it.
    """
    draws = [x for x in (*given, *named.values()) if isinstance(x, torch.Generator)]
    code, versions = _code(function), claims.provenance()["versions"].items()
    used = tuple((k, v) for k, v in versions if k != "iclutils")
    key = _Hasher().hash((code, getattr(function, "__self__", None), given, named, used))
    path = folder() / f"{code[0]}-{key}.pkl.gz"
    if path.is_file():
        try:
            with gzip.open(path) as stream:  # its checksum finds what has changed
                found, states = pickle.loads(stream.read())
        except (OSError, EOFError, ValueError, zlib.error, pickle.UnpicklingError,
                ImportError, AttributeError):  # fmt: skip
            say(f"{path} is damaged; measuring again")
        else:
            for generator, state in zip(draws, states, strict=True):
                generator.set_state(state)
            return found
    found = function(*given, **named)
    try:
        with replacing(path) as temporary, gzip.open(temporary, "wb", compresslevel=1) as stream:
            _Pickler(stream).dump((found, [draw.get_state() for draw in draws]))
    except OSError as error:
        say(f"{path.parent} cannot keep a measurement ({error.strerror}); going on without")
    return found


def folder() -> Path:
    """Where measurements are kept, in the user's cache; it may be deleted at any time."""
    return smollm2.cache() / "measured"


def _weights(model: nn.Module) -> str:
    """Hash of a model's weights and of the sizes in its configuration; of each load once."""
    hooked = getattr(model, "hook_dict", {})
    if any(point.fwd_hooks or point.bwd_hooks for point in hooked.values()):
        raise IclError("A model with hooks is not remembered: set them inside the function.")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    changes = tuple(value._version for value in tensors.values())
    if model not in _SEEN or _SEEN[model][0] != changes:
        settings = vars(getattr(model, "cfg", model)) or {}
        plain = {k: v for k, v in settings.items() if isinstance(v, int | float | str | bool)}
        _SEEN[model] = changes, _Hasher().hash((type(model).__name__, plain, tensors))
    return _SEEN[model][1]


class _Hasher(NumpyHasher):
    """joblib's hash, which also knows tensors, models, generators, devices and functions."""

    def save(self, value: Any) -> None:
        if isinstance(value, Tensor):
            value = (str(value.dtype), value.detach().cpu().contiguous().numpy())
        elif isinstance(value, nn.Module):
            value = ("model", _weights(value))
        elif isinstance(value, torch.Generator):
            value = ("generator", value.get_state().numpy())
        elif isinstance(value, torch.device):
            value = str(value)
        elif isinstance(value, FunctionType):
            value = _code(value)
        super().save(value)


def _code(function: Any) -> tuple[str, Any, Any]:
    """What a function does: its name, the code that it can reach, and, of one that a notebook
    defines, the values that it takes from there."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "?")
    if module.startswith("iclutils.") and "<" not in name:
        return name, science.of_definition(module, name.partition(".")[0]), ()
    try:
        around = function.__globals__ | inspect.getclosurevars(function).nonlocals
        code, taken = science.of_source(inspect.getsource(function), around)
    except (AttributeError, OSError, TypeError, SyntaxError) as error:
        raise IclError(
            f"The code of {name} cannot be read, so what it depends on is not known: write it as a "
            "function (def) of the notebook, or call it without remember()."
        ) from error
    if drawn := [each for each in taken if isinstance(around[each], torch.Generator)]:
        raise IclError(f"{name} draws from {drawn[0]}, so that would be left as it is: hand it in.")
    return name, code, {each: around[each] for each in taken if each != function.__name__}


class _Pickler(pickle.Pickler):
    """Keeps of a tensor what it shows, not all that it is a part of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.detach().cpu().numpy(), str(value.device))
        return NotImplemented


def _tensor(values: Any, device: str) -> Tensor:
    return torch.as_tensor(values).to(device)
