"""What was measured, and which pages show it: those are read again when it changes."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from ... import zoo
from .. import claims, scorecard
from ..claims import Result


def connect(app: Sphinx) -> None:
    """Keep the list of pages that show results, and reread them when those change."""
    app.connect("env-get-outdated", _outdated)
    app.connect("env-purge-doc", lambda _, env, name: _users(env).discard(name))
    app.connect("env-merge-info", lambda _, env, names, other: _users(env).update(_users(other)))


def use(env: BuildEnvironment) -> None:
    """Note that the page being read shows results or model cards."""
    _users(env).add(env.docname)


def results(env: BuildEnvironment) -> dict[tuple[str, str], Result]:
    """Results of the tree that is built, by (tier, claim id)."""
    return _read(_folder(env), env.iclutils_digest)  # type: ignore[attr-defined]


@cache
def _read(folder: Path, digest: str) -> dict[tuple[str, str], Result]:
    return claims.read_results(folder)


def _folder(env: BuildEnvironment) -> Path:
    return Path(env.srcdir, "book", "results")


def _digest(env: BuildEnvironment) -> str:
    """Hash of everything that our directives and roles show: ``results``, ``runs`` and so on."""
    files = [*claims.ROOT.glob("*.yml"), *_folder(env).parent.glob("r*/*/*.json")]
    files += [*zoo.ROOT.glob("*/README.md"), *Path(__file__).parent.glob("*.py")]
    digest = hashlib.sha256()
    for path in sorted([*files, Path(scorecard.__file__)]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _users(env: BuildEnvironment) -> set[str]:
    """Names of the pages that use a directive or role of ours."""
    if not hasattr(env, "iclutils_users"):
        env.iclutils_users = set()  # type: ignore[attr-defined]
    return env.iclutils_users  # type: ignore[attr-defined]


def _outdated(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Read such pages again whenever results, ledgers, cards or any other page changed."""
    digest = _digest(env)
    same = digest == getattr(env, "iclutils_digest", "")
    env.iclutils_digest = digest  # type: ignore[attr-defined]
    return [] if same and not (added or changed or removed) else sorted(_users(env))
