"""Files that are either whole or not there: atomic writes and checksums."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import IclError

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent  # or where the package is installed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` and rename it onto ``path`` on success.

    An interruption leaves the old file (or none) and no temporary behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def output_folder(variable: str, inside: str, outside: str) -> Path:
    """Return where outputs go: ``$variable``, else ``inside`` the checkout, or, where there is none
    (as on Colab), ``outside`` in the current folder."""
    if folder := os.environ.get(variable):
        return Path(folder)
    return CHECKOUT / inside if (CHECKOUT / "_toc.yml").is_file() else Path.cwd() / outside


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file: one of ours, which is made again, or a model's."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise IclError(
            f"{path} is not valid JSON ({error}). Delete it and run again, or copy the model again."
        ) from error


def sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write ``SHA256SUMS`` for every file under ``folder`` (the format ``sha256sum -c`` reads)."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    lines = [f"{sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in files]
    write_text(folder / "SHA256SUMS", "".join(lines))


def check_sums(folder: Path, names: list[str], cure: str) -> None:
    """Refuse files that are not those whose checksums ``folder/SHA256SUMS`` records, with the
    ``cure``."""
    listing = folder / "SHA256SUMS"
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for path, name in ((folder / name, name) for name in names):
        if not path.is_file() or sha256(path) != sums.get(name):
            raise IclError(f"{path} is missing, or damaged: {listing.name} has another. {cure}")
