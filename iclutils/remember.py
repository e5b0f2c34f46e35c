"""Measurements that are kept on disk, so that an interrupted run of a chapter goes on.

The key of a measurement is what it depends on: the function's name, the code and data of all
science modules that it can reach, the versions of the libraries, and the arguments: tensors by
their content, models by their weights, generators by their state. Entries are whole or not there;
one that is damaged is computed again, and where the disk is full nothing is kept.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import pickle
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from joblib.hashing import NumpyHasher
from torch import Tensor, nn

from . import claims
from .errors import IclError
from .files import PACKAGE, replacing
from .progress import say
from .zoo import smollm2

Given = ParamSpec("Given")
Found = TypeVar("Found")
# What says, shows, stores or draws, and never changes a number.
APART = (
    *("bookkit", "claims", "errors", "files", "machine", "plots", "presets", "progress"),
    *("remember", "room", "scorecard", "session", "zoo"),
)
_SEEN: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], str]] = WeakKeyDictionary()


def remember(function: Callable[Given, Found], *given: Given.args, **named: Given.kwargs) -> Found:
    """What ``function`` gives, or gave in an earlier run from the same code and arguments.

    A generator among the arguments is left as the function left it.
    """
    draws = [x for x in (*given, *named.values()) if isinstance(x, torch.Generator)]
    code = _code(function)
    key = _Hasher().hash((code, getattr(function, "__self__", None), given, named, _versions()))
    path = folder() / f"{code[1]}-{key}.pkl.gz"
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


def fingerprint(module: str) -> str:
    """Hash of the code and data that a module of the package can reach by its imports."""
    found, waiting = set[Path](), {_path(module)}
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= _imports(path) - found
    if any(path.is_relative_to(PACKAGE / "tasks") for path in found):
        found |= {path for path in sources() if path.suffix != ".py"}
    return hashlib.sha256(b"".join(sources()[path] for path in sorted(found))).hexdigest()


@cache
def sources() -> dict[Path, bytes]:
    """All code and data, as they were when this was first asked: what is edited while a chapter
    runs is not what it runs."""
    return {p: p.read_bytes() for p in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("tasks/data/**/*.*"))}


@cache
def _imports(path: Path) -> set[Path]:
    """Files of the science modules that a file names in its imports."""
    found, package = set[Path](), path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(ast.parse(sources()[path])):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            name = ".".join(filter(None, above))
            found |= {_path(name), *(_path(f"{name}.{alias.name}") for alias in node.names)}
    return {path for path in found if path in sources() and _counts(path)}


def _counts(path: Path) -> bool:
    part, *inside = path.relative_to(PACKAGE).parts
    return "recipes" in inside or part.removesuffix(".py") not in (*APART, "__init__")


def _path(module: str) -> Path:
    """The file of a module, or a path that is no file."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((k, v) for k, v in claims.provenance()["versions"].items() if k != "iclutils")


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


def _code(function: Any) -> tuple[str, str, str]:
    """What a function does: its module, its name, and the code that it can reach."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "?")
    if not module.startswith("iclutils.") or "<" in name:
        raise IclError(
            f"{name} is no function of the package at its top level, so what it depends on is not "
            "known: move it to iclutils, or call it without remember()."
        )
    return module, name, fingerprint(module)


class _Pickler(pickle.Pickler):
    """Keeps of a tensor what it shows, not all that it is a part of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.detach().cpu().numpy(), str(value.device))
        return NotImplemented


def _tensor(values: Any, device: str) -> Tensor:
    return torch.as_tensor(values).to(device)
