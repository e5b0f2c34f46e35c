"""Typical mistakes in exercises: code in place of the stub, and a part of what the test says."""

MISTAKES: dict[str, tuple[str, str]] = {}
