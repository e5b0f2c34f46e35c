"""The one exception of this package.

Every mistake a user can make (unknown name, missing file, wrong shape, no network) raises
``IclError`` with one message that says what is wrong and what to do. The command line prints
that message alone; a notebook shows it as the last line of the traceback.
"""

import difflib
from collections.abc import Iterable


class IclError(ValueError):
    """A mistake with a cure: the message names both."""


def unknown(kind: str, name: object, known: Iterable[object]) -> IclError:
    """Build the error for a name that is not in a list, with the nearest one that is."""
    names = [str(each) for each in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return IclError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")
