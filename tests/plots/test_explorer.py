"""Explorers say what the arrays say, and fit the library's schema."""

import base64
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jsonschema import ValidationError
from PIL import Image
from random_layers import seeded

from iclutils.plots import explorer
from iclutils.plots.explorer import MIME, Specification

ROOT = Path(__file__).parents[2]
WORDS = ["<bos>", "one", "</script>", '"two"', "one", "three"]


def heads(layers=2, count=3, n=6):
    raw = torch.rand(layers, count, n, n, generator=seeded(0)).tril()
    return raw / raw.sum(-1, keepdim=True)


def edges(layers=3, n=6):
    return torch.rand(layers, n, n, generator=seeded(1)).pow(3).tril()


def reached(kept, layers, token, into):
    """Edges that some path joins to the token: every path there is, walked by hand."""
    steps = {(e["layer"], e["src"], e["dest"]): number for number, e in enumerate(kept)}

    def paths(layer, place, used):
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
def test_a_specification_fits_the_schema(made):
    altair = pytest.importorskip("altair")
    altair.Chart.from_dict(made.spec | {"$schema": altair.SCHEMA_URL})  # it validates
    assert json.loads(json.dumps(made.spec, allow_nan=False)) == made.spec
    with pytest.raises(ValidationError):
        altair.Chart.from_dict(made.spec | {"width": "wide"})


def test_attention_says_what_the_pattern_says():
    pattern = heads()
    made = explorer.attention(WORDS, pattern, 1, 2, 3, first=17)
    params = {p["name"]: p for p in made.spec["params"]}
    assert params["layer"]["bind"]["labels"] == ["17", "18"]
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


def test_flow_keeps_the_strongest_edges_as_shares():
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
def test_a_token_keeps_the_edges_that_some_path_joins_to_it(into):
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


def test_a_notebook_shows_the_picture_of_the_same_specification():
    pytest.importorskip("vl_convert")
    made = explorer.attention(WORDS, heads())
    bundle = made._repr_mimebundle_()
    assert bundle[MIME] == made.spec
    assert bundle["text/plain"] == "Attention of 2 x 3 heads over 6 tokens, to explore"
    with Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))) as picture:
        assert picture.width > 200
        assert picture.height > 200
    assert "text/html" not in bundle


def test_colab_gets_a_page(monkeypatch):
    pytest.importorskip("altair")
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    made = explorer.flow(WORDS, edges())
    monkeypatch.setattr(explorer.Explorer, "still", lambda self: None)
    assert "vegaEmbed" in made._repr_mimebundle_()["text/html"]


def test_no_token_can_end_the_script():
    data = SimpleNamespace(mime_type=MIME, content=explorer.attention(WORDS, heads()).spec)
    (node,) = Specification.handle_mime(None, data, False) or []
    body = node.astext().removeprefix('<script type="application/json">').removesuffix("</script>")
    assert "</script>" not in body
    assert json.loads(body) == {k: v for k, v in data.content.items() if k != "$schema"}
