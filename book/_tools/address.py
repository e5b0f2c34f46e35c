"""The repository's public address, set here and nowhere else; there is none yet.

Launch buttons, links to the repository, the notebooks' set-up cell and CITATION.cff leave it out
while ``ADDRESS`` is empty. After a change ``python -m book._tools address`` rewrites the files.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from string import Template

from iclutils.errors import IclError
from iclutils.files import read_json, write_text

ADDRESS = ""  # for example "https://github.com/OWNER/REPOSITORY"
TAG = f"v{metadata.version('iclutils')}"  # the release that Colab installs

_LOCAL = """\
# Set-up: the same cell in every notebook.
import importlib.util

if importlib.util.find_spec("iclutils") is None:
    raise SystemExit("iclutils is not installed: see 'How to run this book'.")
"""

_BEGIN = """
import iclutils

book = iclutils.begin(
    tier=tier, model=model, weights=weights, seed=seed, device=device
)"""


def set_up_cell(address: str = ADDRESS, tag: str = TAG) -> str:
    """Source of the set-up cell, which installs the release where there is an address."""
    if not address:
        return _LOCAL + _BEGIN
    # torch and numpy are named in the same call, so that pip has to refuse rather than replace
    # them; transformers too, unless it is one that the release cannot work with.
    text = Path(__file__).with_name("set_up_cell.txt").read_text(encoding="utf-8")
    return Template(text).substitute(release=f"git+{address}@{tag}") + _BEGIN


def launch_options(address: str = ADDRESS) -> dict[str, object]:
    """Theme options of the book that exist only when there is an address."""
    if not address:
        return {}
    if not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", address):
        raise IclError(f"{address!r} is not of the form https://HOST/OWNER/REPOSITORY.")
    colab = {"launch_buttons": {"colab_url": "https://colab.research.google.com"}}
    return {
        **{"repository_url": address, "use_repository_button": True, "use_issues_button": True},
        "repository_branch": TAG,  # so that a launched notebook fits the release that it installs
        **(colab if address.startswith("https://github.com/") else {}),  # it opens no other host's
    }


def apply(root: Path, address: str = ADDRESS, tag: str = TAG) -> list[Path]:
    """Write the address, and the tag or commit that is installed from it, into the files of the
    checkout ``root`` that store them; return those that changed."""
    launch_options(address)
    citation = root / "CITATION.cff"
    if not citation.is_file():
        raise IclError(f"{root} has no CITATION.cff. Run this at the top of the checkout.")
    lines = citation.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("repository-code:")]
    named = [f'repository-code: "{address}"'] if address else []
    wanted = {citation: "\n".join([*kept, *named]) + "\n"}
    for path in sorted(root.glob("notebooks/**/*.ipynb")):
        notebook = read_json(path)
        for cell in notebook["cells"]:
            if "set-up" in cell["metadata"].get("tags", []):
                cell["source"] = set_up_cell(address, tag).splitlines(keepends=True)
        wanted[path] = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    changed = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    for path in changed:
        write_text(path, wanted[path])
    return changed
