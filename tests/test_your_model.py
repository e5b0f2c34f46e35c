"""``your_model.ipynb`` and ``show``: the chapters' numbers, on any model; refusals; costs that are
said before."""

import re
from functools import partial

import matplotlib as mpl
import pytest
import torch
from notebook_rules import code
from notebook_rules import tags as tags_of
from tiny import real_tokenizer, save_gpt2, save_grouped, save_neox, save_opt
from wired import save_wired

import iclutils
from iclutils import IclError, files, models, presets, your_model
from iclutils.__main__ import main
from iclutils.chapters.label_anchors import saliency
from iclutils.files import read_json
from iclutils.interp import clean_corrupt, head_scores, patching, weights
from iclutils.session import Session
from iclutils.tasks import text
from iclutils.tasks.repeated import repeated_tokens
from iclutils.tasks.sources import open_source

LABELLED = [("a great movie", "Positive"), ("a bad film", "Negative")]
NOTEBOOK = read_json(your_model._notebook())
mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")


@pytest.fixture
def session():
    return Session(presets.get("mini"), "", 0, "cpu")


@pytest.mark.parametrize("chapter", your_model.CHAPTERS)
def test_it_says_of_our_models_what_the_notebook_has_stored(chapter):
    cells = [cell for cell in code(NOTEBOOK) if chapter in tags_of(cell)]
    outputs = [each for cell in cells for each in cell["outputs"]]
    said = ["".join(each["text"]) for each in outputs if each["output_type"] == "stream"]
    made = iclutils.show(chapter)
    assert made.text.split() == "".join(said).split()
    assert len(made.alt.split()) > 10


def test_01_finds_the_induction_head_of_the_chapter(session):
    made = iclutils.show("01", "induction-0")
    model = models.load("induction-0", fold=True)
    batch = repeated_tokens(model, 32, 30, session.generator("doubled"))
    byhand = head_scores.score_heads(model, batch.tokens, 30)["prefix"].mean(0)
    torch.testing.assert_close(made.numbers["scores"]["prefix"], byhand)
    copying = made.numbers["maps"]["copying (weights)"]
    torch.testing.assert_close(copying, weights.copying_scores(model))
    assert (made.numbers["layer"], made.numbers["head"]) == (1, 0)  # as in chapter 01
    assert f"{byhand[1, 0]:.2f}" in made.text


def test_02_measures_the_flow_of_the_chapter(session):
    made = iclutils.show("02", "anchors-0")
    model = models.load("anchors-0")
    prompts = open_source("topics", model, session.generator).varied(64)
    torch.testing.assert_close(made.numbers["share"], saliency.measure(model, prompts).relative)


def test_04_compares_linear_attention_with_a_step():
    made = iclutils.show("04", "lsa-1")
    assert made.numbers["cosine"] > 0.99  # chapter 04
    assert made.numbers["ratio"] == pytest.approx(1, abs=0.05)


def test_06_finds_the_edges_that_were_built(session, tmp_path):
    save_wired(tmp_path)
    made = iclutils.show("06", tmp_path)
    assert made.numbers["way"] == "patched one by one"
    strongest = {f"{u} -> {v}" for u, v in made.numbers["ranking"][:8]}
    assert {"0.0 -> k 1.0", "1.0 -> logits", "embed -> v 0.0"} <= strongest
    model = models.load(tmp_path)
    length = min(20, (model.cfg.n_ctx - 1) // 2)
    task = clean_corrupt.copying(model, 8, length, session.generator("sequences"))
    lost = patching.path_patching(model, task).mean(-1) / made.numbers["gap"]
    torch.testing.assert_close(made.numbers["share"], lost)
    assert made.numbers["enough"] <= 15  # the heads that do nothing have edges, too
    assert made.numbers["faithful"][-1] == pytest.approx(1, abs=1e-4)


def edited(folder, old, new):
    """A copy of the notebook, changed as its reader may."""
    path = folder / "edited.ipynb"
    path.write_text(your_model._notebook().read_text().replace(old, new))
    return path


@pytest.mark.parametrize(
    ("chapter", "save"),
    [*((chapter, save_neox) for chapter in ("01", "03", "05", "06")), ("06", save_grouped)],
)
def test_a_random_model_with_rotary_positions_and_what_it_costs(
    chapter, save, tmp_path, monkeypatch, capsys
):
    """It is near an algorithm that learns nothing, and does not copy."""
    monkeypatch.delenv("ICLUTILS_QUIET")
    path = edited(tmp_path, "work <= 2e12", "work <= 0")
    monkeypatch.setattr(your_model, "_notebook", lambda: path)
    save(tmp_path)
    made = iclutils.show(chapter, tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert re.match("loading .* of weights in memory", first)
    assert re.search("seconds, .* of memory beside the weights", second)
    assert repr(made) == made.text
    if chapter == "03":
        far = dict(zip(made.numbers["best"].names, made.numbers["best"].distances, strict=True))
        assert min(far["the middle"], far["mean label"]) < far["OLS"]
        assert made.numbers["error"][1:].mean() > 0.5 * made.numbers["middle"][1:].mean()
    if chapter == "05":
        assert "does not copy" in made.text
    if chapter == "06":
        assert made.numbers["way"] == "estimated from gradients"
        nothing = made.numbers["gap"] <= 2 * made.numbers["error"]
        assert ("gains nothing" in made.text) == ("%" not in made.text) == nothing


def test_the_command_on_a_short_context_builds_what_the_figure_shows(tmp_path, capsys, monkeypatch):
    save_gpt2(tmp_path, n_positions=15)
    (tmp_path / "_toc.yml").touch()  # a checkout, in which nothing is left untracked
    monkeypatch.setattr(files, "CHECKOUT", tmp_path)
    out = tmp_path / "_build/show/01.png"
    assert main(["show", "01", "--model", str(tmp_path)]) == 0
    even = head_scores.uniform_baselines(7)["prefix"]
    assert f"even attention would give {even:.2f}" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    assert b"heat maps by layer and head" in out.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["01.png"]
    assert main(["show", "01", "--model", str(tmp_path), "--out", str(tmp_path / "a.bmp")]) == 2


@pytest.mark.shared
def test_texts_and_labels_of_the_readers_own(text_model):
    made = iclutils.show("01", text_model, prompt="The cat sat on the mat")
    ticks = [label.get_text() for label in made.figure.axes[0].get_xticklabels()]
    assert "".join(ticks) == "<|endoftext|>" + "The cat sat on the mat" * 2
    there = head_scores.prefix_matching(made.numbers["pattern"], 6).item()
    assert made.numbers["here"] == pytest.approx(there)
    asked = {"demonstrations": LABELLED, "query": "I loved it"}
    made = iclutils.show("02", text_model, **asked, answer="Positive")
    model = models.load(text_model)
    task = text.TextTask("mine", "Text:", "Label:", (" Positive", " Negative"))
    rows = [("a great movie", 0), ("a bad film", 1)]
    prompts = text.build(task, model.tokenizer, [rows], [("I loved it", 0)], context=1024)
    torch.testing.assert_close(made.numbers["share"], saliency.measure(model, prompts).relative)
    said = iclutils.show("02", text_model, **asked)
    assert said.numbers["asked"].gold == said.numbers["said"], "what it says is explained"


def test_a_model_with_grouped_heads_is_asked_about_our_sentences(tmp_path):
    """A small random Llama with the vocabulary of SmolLM2."""
    real_tokenizer("smollm2").save_pretrained(tmp_path)
    save_grouped(tmp_path, vocab_size=49_152, max_position_embeddings=256, bos_token_id=1)
    made = iclutils.show("02", tmp_path)
    asked = open_source("sentiment", models.load(tmp_path)).varied(10)
    again = saliency.measure(models.load(tmp_path), asked).relative
    torch.testing.assert_close(made.numbers["share"], again, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("chapter", "asked", "message"),
    [
        ("09", {}, "Unknown chapter '09'"),
        ("01", {"model": "no/such/folder"}, "hub model must be pinned"),
        ("03", {"prompt": "hello"}, "for chapter 01"),
        ("01", {"model": "regression-d2"}, "ask for chapter 03"),
        ("04", {"model": "lsa-waves"}, "not trained on linear functions"),
        ("02", {"demonstrations": LABELLED, "query": "x"}, "reads no text"),
        ("02", {"demonstrations": LABELLED, "query": "x", "answer": "Neutral"}, "no label that is"),
        ("01", partial(save_grouped, kind="mistral", sliding_window=16), "Use shorter copies"),
        ("03", partial(save_gpt2, n_positions=5), "Only 2 pairs"),
        ("06", save_opt, "^Path patching does not fit this model"),
    ],
)
def test_what_cannot_be_is_refused(chapter, asked, message, tmp_path):
    if callable(asked):
        asked(tmp_path)
        asked = {"model": tmp_path}
    with pytest.raises(IclError, match=message):
        iclutils.show(chapter, **asked)
