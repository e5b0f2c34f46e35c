"""The repository's public address, set here and nowhere else.

There is none yet. Everything that needs it (launch buttons, edit links, the set-up cell of the
notebooks, CITATION.cff) asks this module, and leaves the thing out while ``ADDRESS`` is empty.
After changing it, ``python -m iclutils address`` rewrites what is stored in files.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

from .errors import IclError
from .files import read_json, write_text

ADDRESS = ""  # for example "https://github.com/OWNER/REPOSITORY"
TAG = f"v{metadata.version('iclutils')}"  # the release that Colab installs

_LOCAL = """\
# Set-up: the same cell in every notebook.
import importlib.util

if importlib.util.find_spec("iclutils") is None:
    raise SystemExit("iclutils is not installed: see 'How to run this book'.")

import iclutils

book = iclutils.begin(tier=tier, model=model, seed=seed, device=device)"""

_PUBLIC = """\
# Set-up: the same cell in every notebook. On Colab it installs iclutils at a release.
import importlib.util

if importlib.util.find_spec("iclutils") is None:
    %pip install -q "iclutils @ git+{address}@{tag}"

import iclutils

book = iclutils.begin(tier=tier, model=model, seed=seed, device=device)"""


def set_up_cell(address: str = ADDRESS) -> str:
    """Source of the set-up cell."""
    return _PUBLIC.format(address=address, tag=TAG) if address else _LOCAL


def launch_options(address: str = ADDRESS) -> dict[str, object]:
    """Theme options of the book that exist only when there is an address."""
    if not address:
        return {}
    if not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", address):
        raise IclError(f"{address!r} is not of the form https://HOST/OWNER/REPOSITORY.")
    return {
        "repository_url": address,
        "repository_branch": "main",
        "use_repository_button": True,
        "use_issues_button": True,
        "use_edit_page_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }


def apply(root: Path, address: str = ADDRESS) -> list[Path]:
    """Write the address into the files that store it; return those that changed.

    Raises:
        IclError: if the address is malformed or ``root`` is no checkout.
    """
    launch_options(address)
    if not (root / "CITATION.cff").is_file():
        raise IclError(f"{root} has no CITATION.cff. Run this at the top of the checkout.")
    wanted = {path: _notebook(path, address) for path in sorted(root.glob("notebooks/*.ipynb"))}
    wanted[root / "CITATION.cff"] = _citation(root / "CITATION.cff", address)
    changed = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    for path in changed:
        write_text(path, wanted[path])
    return changed


def _notebook(path: Path, address: str) -> str:
    notebook = read_json(path)
    for cell in notebook["cells"]:
        if "set-up" in cell["metadata"].get("tags", []):
            cell["source"] = set_up_cell(address).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _citation(path: Path, address: str) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("repository-code:")]
    return "\n".join([*kept, *([f'repository-code: "{address}"'] if address else [])]) + "\n"
