"""iclutils: the measurements behind *In-Context Learning, Taken Apart*.

Arrows point one way: models -> tasks -> lenses -> figures -> claims -> book.

The names below are imported when they are first used, so that ``python -m iclutils`` answers at
once, and can say what is missing where a dependency is.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import IclError
    from .glimpses import Glimpse, show
    from .session import Session, begin

__all__ = ["Glimpse", "IclError", "Session", "begin", "show"]
__version__ = metadata.version("iclutils")

_MODULES = {
    "Glimpse": "glimpses",
    "IclError": "errors",
    "Session": "session",
    "begin": "session",
    "show": "glimpses",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
