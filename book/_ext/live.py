"""Models that run in the page: figures of ``iclutils/plots/live``, and the weights they load.

A figure stands on its page as a still picture below its caption, which stays where scripts are off
and in print. Its script adds a bet and controls; once the reader acts, it loads the weights, as
scripts since a page on disk may not read files.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from safetensors.torch import load_file
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from iclutils import claims, zoo
from iclutils.errors import unknown
from iclutils.files import read_json
from iclutils.plots import live as scripts
from iclutils.tasks import topics

COMMON = ("transformer", "numbers", "live")  # then the figure's own
# What each figure may load: scripts of weights, and in each the models, with their training steps.
Parts = list[tuple[str, int]] | str  # or the claim of the tier `real` that has kept a record
FIGURES: dict[str, dict[str, Parts]] = {
    "induction": {
        **{f"induction-3-{s}": [("induction-3", s)] for s in zoo.steps("induction-3")},
        "detour": [("detour", 6000)],
    },
    "copies": {"induction-3-4000": [("induction-3", 4000)]},
    "labels": {"anchors-3": [("anchors-3", 3000)]},
    "points": {"regression-d2": [("regression-d2", 4000)]},
    "step": {"lsa-1": [("lsa-1", s) for s in (0, 30, 40, 45, 50, 55, 60, 80, 100, 3000)]},
    "waves": {"lsa-waves": [("lsa-waves", 6000)]},
    "smoother": {},  # needs no network
    "edges": {"anchors-3": [("anchors-3", 3000)]},
    "lenses": {"lenses": "07.way_decides"},
}
SCRIPT = {"copies": "induction"}  # where a figure is not in a script of its own name


class Live(SphinxDirective):
    """``{live} figure``: a figure whose model runs in the page; the content is its caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in FIGURES:
            raise self.error(str(unknown("live figure", name, list(FIGURES))))
        path = scripts.FOLDER / f"stills/{name}.html"
        self.env.note_dependency(str(path))
        still = path.read_text(encoding="utf-8")
        figure = nodes.container("", classes=["live-figure"])
        figure["ids"], figure["figure"] = [f"live-{name}"], name
        self.env.metadata[self.env.docname].setdefault("live", []).append(name)
        self.state.nested_parse(self.content, self.content_offset, figure)
        figure += nodes.raw("", still, format="html")
        return [figure]


def load_scripts(app: Sphinx, page: str, template: str, context: Any, doctree: Any) -> None:
    """Load on a page the scripts of the live figures that stand on it."""
    every = doctree.findall(nodes.container) if doctree else ()
    if figures := [node["figure"] for node in every if "figure" in node]:
        own = (SCRIPT.get(name, name) for name in figures)
        for name in dict.fromkeys((*COMMON, *own)):
            app.add_js_file(f"live/{name}.js", loading_method="defer")


def copy_scripts(app: Sphinx) -> None:
    """Copy the scripts of the figures into the static files, before pages name them."""
    if app.builder.format == "html":
        only = shutil.ignore_patterns("*.py", "__*", "notebook.js")
        out = Path(app.outdir, "_static/live")
        shutil.copytree(scripts.FOLDER, out, dirs_exist_ok=True, ignore=only)


def write_weights(app: Sphinx, exception: Exception | None) -> None:
    """Write scripts that hand over the weights of the figures that stand on some page."""
    figures = {name for about in app.env.metadata.values() for name in about.get("live", ())}
    if exception or app.builder.format != "html" or not figures:
        return
    folder = Path(app.outdir, "_static/live/weights")
    folder.mkdir(exist_ok=True)
    for key, parts in (pair for name in sorted(figures) for pair in FIGURES[name].items()):
        if isinstance(parts, str):
            results = claims.read_results(claims.COMMITTED, name=parts)
            models = [results["real", parts].detail["record"]]
        else:
            models = [_packed(*part) for part in parts]
        script = f"Live.weights[{json.dumps(key)}] = {json.dumps(models)};\n"
        (folder / f"{key}.js").write_text(script, encoding="utf-8")


def _packed(name: str, step: int) -> dict[str, Any]:
    """Return the first network of a model: its sizes, the names and shapes of its tensors, and
    their numbers in base64, in half precision (``f2``) or single (``f4``), as the zoo has them."""
    folder = zoo.folder(name, step)
    config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    if config["model_type"] == "gpt2":
        sizes = {"width": config["n_embd"], "heads": config["n_head"], "pos": config["n_positions"]}
        tensors = scripts.gpt2_weights(tensors)
        if config["vocab_size"] == topics.VOCAB:
            sizes["words"] = topics.NAMES
    else:  # networks side by side: the first
        shape = config["shape"]
        sizes = {key: shape[key] for key in ("dim", "pairs", "layers", "heads", "width")}
        if "attention" in shape:
            kinds = shape["attention"] * (shape["layers"] // len(shape["attention"]))
            sizes |= {"hidden": shape["hidden"], "kinds": kinds}
        tensors = {full: weight[0].squeeze(0) for full, weight in tensors.items()}
    (dtype,) = {weight.dtype for weight in tensors.values()}
    raw = b"".join(weight.contiguous().numpy().tobytes() for weight in tensors.values())
    return {
        "name": name,
        "step": step,
        "config": sizes,
        "dtype": {torch.float16: "f2", torch.float32: "f4"}[dtype],
        "tensors": [[full, *weight.shape] for full, weight in tensors.items()],
        "data": base64.b64encode(raw).decode(),
    }
