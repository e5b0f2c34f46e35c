"""iclutils: the measurements behind *In-Context Learning, Taken Apart*.

Arrows point one way: models -> tasks -> lenses -> figures -> claims -> book.
"""

from importlib import metadata

from .errors import IclError
from .session import Session, begin

__all__ = ["IclError", "Session", "begin"]
__version__ = metadata.version("iclutils")
