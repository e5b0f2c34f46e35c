"""iclutils: the measurements behind *In-Context Learning, Taken Apart*.

Arrows point one way: models -> tasks -> interp -> chapters -> plots; ``bookkit`` makes the book.

The names below are imported when they are first used, so that ``python -m iclutils`` answers at
once, and can say what is missing where a dependency is.
"""

import os
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

# Before torch is imported: a thread that waits sleeps, so that other programs are not in its way.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if os.environ.get("ICLUTILS_QUIET"):  # also the bars of the libraries below
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

if TYPE_CHECKING:
    from .bookkit.quick_figures import QuickFigure, show
    from .errors import IclError
    from .session import Session, begin

__all__ = ["IclError", "QuickFigure", "Session", "begin", "show"]
__version__ = metadata.version("iclutils")

_MODULES = {
    "IclError": "errors",
    "QuickFigure": "bookkit.quick_figures",
    "Session": "session",
    "begin": "session",
    "show": "bookkit.quick_figures",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
