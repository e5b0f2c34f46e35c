"""The repository's public address: the theme's ``repository_url`` in ``_config.yml``, and nowhere
else; there is none yet.

The notebooks' set-up cell and CITATION.cff leave it out while there is none. After a change
``python -m book._tools address`` rewrites them.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from string import Template

import yaml

from iclutils.errors import IclError
from iclutils.files import CHECKOUT, read_json, write_text

_SETTINGS = yaml.safe_load((CHECKOUT / "_config.yml").read_text(encoding="utf-8"))
ADDRESS = _SETTINGS["sphinx"]["config"]["html_theme_options"].get("repository_url", "")
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


def apply(root: Path, address: str = ADDRESS, tag: str = TAG) -> list[Path]:
    """Write the address, and the tag or commit that is installed from it, into the files of the
    checkout ``root`` that store them; return those that changed."""
    if address and not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", address):
        raise IclError(f"{address!r} is not of the form https://HOST/OWNER/REPOSITORY.")
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
