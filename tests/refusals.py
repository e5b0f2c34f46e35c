"""A table of calls that must be refused, and of what each says."""

from collections.abc import Callable

import pytest

from iclutils import IclError


def must_refuse(*rows: tuple[Callable[[], object], str]) -> None:
    """Each row: a call, and a part of its message."""
    for call, message in rows:
        with pytest.raises(IclError, match=message):
            call()


def refused(*rows: tuple[Callable[..., object], str]) -> Callable[..., None]:
    """A test with a case for each row: a call without arguments, and a part of its message."""

    @pytest.mark.parametrize(("call", "message"), rows)
    def test(call, message):
        must_refuse((call, message))

    return test
