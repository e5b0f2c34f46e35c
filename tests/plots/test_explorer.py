"""Explorers say what the arrays say, and fit the library's schema."""

from __future__ import annotations

import base64
import copy
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonschema import ValidationError
from notebook_rules import faults
from PIL import Image
from random_layers import seeded

from iclutils.errors import IclError
from iclutils.files import read_json
from iclutils.plots import explorer
from iclutils.plots.explorer import MIME, Specification

ROOT = Path(__file__).parents[2]
WORDS = ["<bos>", "one", "</script>", '"two"', "one", "three"]


def heads(layers: int = 2, count: int = 3, n: int = 6) -> torch.Tensor:
    raw = torch.rand(layers, count, n, n, generator=seeded(0)).tril()
    return raw / raw.sum(-1, keepdim=True)


def edges(layers: int = 3, n: int = 6) -> torch.Tensor:
    return torch.rand(layers, n, n, generator=seeded(1)).pow(3).tril()


def reached(kept: list[dict[str, Any]], layers: int, token: int, into: bool) -> set[int]:
    """Edges that some path joins to the token: every path there is, walked by hand."""
    steps = {(e["layer"], e["src"], e["dest"]): number for number, e in enumerate(kept)}

    def paths(layer: int, place: int, used: frozenset[int]) -> Iterator[tuple[int, frozenset[int]]]:
        if layer == layers:
            yield place, used
            return
        yield from paths(layer + 1, place, used)
        for (at, src, dest), number in steps.items():
            if (at, src) == (layer, place):
                yield from paths(layer + 1, dest, used | {number})

    starts = range(6) if into else [token]
    ends = {token} if into else set(range(6))
    found = (used for start in starts for end, used in paths(0, start, frozenset()) if end in ends)
    return set().union(*found)


@pytest.mark.parametrize(
    "made", [explorer.attention(WORDS, heads()), explorer.flow(WORDS, edges())]
)
def test_a_specification_fits_the_schema(made: explorer.Explorer) -> None:
    altair = pytest.importorskip("altair")
    altair.Chart.from_dict(made.spec | {"$schema": altair.SCHEMA_URL})  # it validates
    assert json.loads(json.dumps(made.spec, allow_nan=False)) == made.spec
    with pytest.raises(ValidationError):
        altair.Chart.from_dict(made.spec | {"width": "wide"})


def test_attention_says_what_the_pattern_says() -> None:
    pattern = heads()
    params = {p["name"]: p for p in explorer.attention(WORDS, pattern, 1, 2, 3).spec["params"]}
    for layer, of_layer in enumerate(params["weights"]["value"]):
        for head, rows in enumerate(of_layer):
            assert [len(row) for row in rows] == [1, 2, 3, 4, 5, 6]
            for dest, row in enumerate(rows):
                wanted = pattern[layer, head, dest, : dest + 1]
                assert (torch.tensor(row) - wanted).abs().max() <= 0.0005 + 1e-6
    assert params["words"]["value"] == WORDS
    assert (params["layer"]["value"], params["head"]["value"]) == (1, 2)
    assert params["head"]["bind"]["options"] == [0, 1, 2]
    assert params["token"]["value"] == [{"i": 3}]


def test_flow_keeps_the_strongest_edges_as_shares() -> None:
    flows, strongest = edges(), 5
    made = explorer.flow(WORDS, flows, {"even": [2, 4]}, strongest)
    kept = made.spec["layer"][1]["data"]["values"]
    for layer in range(3):
        below = [(flows[layer, i, j].item(), i, j) for i in range(6) for j in range(i)]
        wanted = sorted(below, reverse=True)[:strongest]
        found = [e for e in kept if e["layer"] == layer]
        assert [(e["dest"], e["src"]) for e in found] == [(i, j) for _, i, j in wanted]
        for edge, (weight, *_) in zip(found, wanted, strict=True):
            assert abs(edge["w"] - weight / wanted[0][0]) <= 0.0005 + 1e-6
            assert edge["group"] == ("even" if edge["dest"] in (2, 4) else "other tokens")


@pytest.mark.parametrize("into", [True, False])
def test_a_token_keeps_the_edges_that_some_path_joins_to_it(into: bool) -> None:
    every = explorer.flow(WORDS, edges(), strongest=6).spec["layer"][1]["data"]["values"]
    for threshold in (0.05, 0.3, 0.6):
        kept = [e for e in every if e["w"] >= threshold]
        for token in range(6):
            shown = {
                number
                for number, e in enumerate(kept)
                if e["into" if into else "out"].get(str(token), 0) >= threshold
            }
            assert shown == reached(kept, 3, token, into), (threshold, token)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[..., :5, :5], "must both be the number of tokens"),
        (lambda x: x[..., :5, :], "must both be the number of tokens"),
        (lambda x: -x, "negative or no number"),
        (lambda x: x * float("nan"), "negative or no number"),
        (lambda x: x.mT, "looks ahead"),
    ],
)
def test_arrays_that_cannot_be_drawn_are_refused(change: Any, message: str) -> None:
    for make, arrays in ((explorer.attention, heads()), (explorer.flow, edges())):
        with pytest.raises(IclError, match=message):
            make(WORDS, change(arrays))


def test_choices_and_sizes_are_checked() -> None:
    for message, draw, *given in (
        ("no layer 2: they are numbered 0 to", explorer.attention, WORDS, heads(), 2),
        ("no head -1: they are numbered 0 to", explorer.attention, WORDS, heads(), 0, -1),
        ("no token 6", explorer.attention, WORDS, heads(), 0, 0, 6),
        ("positions 0 to 5", explorer.flow, WORDS, edges(), {"there": [6]}),
        ("positions 0 to 5", explorer.flow, WORDS, edges(), {}, 16, -1),
        ("101 tokens are too many", explorer.attention, ["a"] * 101, torch.zeros(1, 1, 101, 101)),
        ("fewer layers", explorer.attention, ["a"] * 100, torch.zeros(8, 8, 100, 100)),
    ):
        with pytest.raises(IclError, match=message):
            draw(*given)


def test_a_notebook_shows_the_picture_of_the_same_specification() -> None:
    pytest.importorskip("vl_convert")
    made = explorer.attention(WORDS, heads())
    bundle = made._repr_mimebundle_()
    assert bundle[MIME] == made.spec
    assert bundle["text/plain"] == "Attention of 2 x 3 heads over 6 tokens, to explore"
    with Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))) as picture:
        assert picture.width > 200
        assert picture.height > 200
    assert "text/html" not in bundle


def test_without_the_converter_the_drawing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    look = lambda name: None if name == "vl_convert" else SimpleNamespace()  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", look)
    assert set(explorer.flow(WORDS, edges())._repr_mimebundle_()) == {MIME, "text/plain"}


def test_colab_gets_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("altair")
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    made = explorer.flow(WORDS, edges())
    monkeypatch.setattr(explorer.Explorer, "still", lambda self: None)
    assert "vegaEmbed" in made._repr_mimebundle_()["text/html"]


def test_the_rules_for_notebooks_want_a_picture_and_an_unchecked_cell() -> None:
    notebook = read_json(ROOT / "notebooks/01_gpt2_induction.ipynb")
    cell = next(c for c in notebook["cells"] if MIME in str(c.get("outputs")))
    bare, checked = copy.deepcopy(cell), copy.deepcopy(cell)
    del bare["outputs"][-1]["data"]["image/png"]
    checked["metadata"]["tags"] = []
    for changed, wrong in ((cell, 0), (bare, 1), (checked, 1)):
        cells = [changed if c is cell else c for c in notebook["cells"]]
        found = faults(notebook | {"cells": cells}, "01", {})
        assert sum("an explorer that is checked" in fault for fault in found) == wrong


def test_no_token_can_end_the_script() -> None:
    data = SimpleNamespace(mime_type=MIME, content=explorer.attention(WORDS, heads()).spec)
    (node,) = Specification.handle_mime(None, data, False) or []
    body = node.astext().removeprefix('<script type="application/json">').removesuffix("</script>")
    assert "</script>" not in body
    assert json.loads(body) == {k: v for k, v in data.content.items() if k != "$schema"}
