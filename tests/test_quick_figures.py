"""Quick figures: the chapters' numbers, on any model; refusals; costs that are said before."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from tiny import real_tokenizer, save_gpt2, save_grouped, save_neox
from wired import save_wired

import iclutils
from iclutils import IclError, models, presets
from iclutils.__main__ import main
from iclutils.chapters.contrastive_kernel import heads
from iclutils.chapters.label_anchors import saliency
from iclutils.chapters.ridge_ols.distances import predict
from iclutils.chapters.ridge_ols.text import IDLE
from iclutils.interp import at_query, clean_corrupt, head_scores, patching, weights
from iclutils.models.lsa import LinearSelfAttention, Shape
from iclutils.quick_figures import circuits, quick_figure
from iclutils.session import Session
from iclutils.tasks import regression, text
from iclutils.tasks.repeated import RepeatedTokens, repeated_tokens
from iclutils.tasks.sources import open_source

SHOWN: list[tuple[str, str]] = [("a great movie", "Positive"), ("a bad film", "Negative")]
mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> presets.Tier:
    """The mini tier with few sequences."""
    few = replace(
        presets.get("mini"),
        induction=presets.Induction(length=12, sequences=12),
        label_words=presets.LabelWords(saliency_prompts=6),
        circuits=presets.Circuits(length=10, sequences=4),
        regression=presets.Regression(contexts=40),
    )
    monkeypatch.setitem(presets.TIERS, "mini", few)
    return few


@pytest.fixture
def session(small: presets.Tier) -> Session:
    return Session(small, "", 0, "cpu")


def test_01_finds_the_induction_head_of_the_chapter() -> None:
    made = iclutils.show("01", "induction-0")
    model = models.load("induction-0", fold=True)
    source = Session(presets.get("mini"), "", 0, "cpu").generator("doubled")
    batch = repeated_tokens(model, presets.Induction.sequences, 30, source)
    byhand = head_scores.score_heads(model, batch.tokens, 30)["prefix"].mean(0)
    torch.testing.assert_close(made.numbers["prefix matching"], byhand)
    torch.testing.assert_close(made.numbers["copying (weights)"], weights.copying_scores(model))
    assert made.numbers["induction head"] == (1, 0)  # as in chapter 01
    assert f"{byhand[1, 0]:.2f}" in made.text


def test_02_measures_the_flow_of_the_chapter(session: Session) -> None:
    made = iclutils.show("02", "anchors-0")
    model = models.load("anchors-0")
    prompts = open_source("topics", model, session.generator).varied(6)
    torch.testing.assert_close(made.numbers["S"], saliency.measure(model, prompts).relative)


def test_03_predicts_as_the_chapter_does(session: Session) -> None:
    numbers = iclutils.show("03", "regression-d2").numbers
    net = session.regressors("regression-d2")
    drawn = regression.sample(regression.Task(2), 40, 5, session.generator("contexts"))
    error = (predict(net, drawn.xs, drawn.ys)[-1] - drawn.ys).square().mean(0) / 2
    torch.testing.assert_close(numbers["squared error"]["the model"], error)
    assert numbers["nearest"] == min(numbers["distances"], key=numbers["distances"].get)


@pytest.mark.parametrize("grouped", [False, True])
def test_05_takes_the_heads_apart_as_the_chapter_does(
    grouped: bool, tmp_path: Path, session: Session
) -> None:
    """Also those of a small random Llama, which answers nothing."""
    if grouped:
        save_grouped(tmp_path)
    made = iclutils.show("05", name := tmp_path if grouped else "induction-0")
    model = models.load(name)
    tokens = repeated_tokens(model, 16, 12, session.generator("copying"), distinct=True).tokens
    query = at_query.read(model, tokens[:, :19])
    duals = heads.dual_heads(query, heads.first_copy(RepeatedTokens(tokens, 12))[:, :19])
    others = torch.arange(model.cfg.d_vocab)[None]
    split = heads.direct_logit_attribution(query, duals, tokens[:, 19], others)
    torch.testing.assert_close(made.numbers["updates"], split.demonstration_update.mean(0))
    assert ("It does not copy" in made.text) == grouped
    if not grouped:
        assert made.numbers["share of updates"] == pytest.approx(split.update_share.item())
        assert made.numbers["accuracy"] > 0.9 > 0.1 > made.numbers["accuracy without updates"]


def test_04_compares_linear_attention_with_a_step() -> None:
    made = iclutils.show("04", "lsa-1")
    assert made.numbers["cosine"].min() > 0.99  # chapter 04
    assert made.numbers["loss ratio"] == pytest.approx(1, abs=0.05)


def test_06_finds_the_edges_that_were_built(session: Session, tmp_path: Path) -> None:
    save_wired(tmp_path)
    made = iclutils.show("06", tmp_path)
    assert made.numbers["exact"]
    strongest = {f"{u} -> {v}" for u, v in made.numbers["strongest"][:8]}
    assert {"0.0 -> k 1.0", "1.0 -> logits", "embed -> v 0.0"} <= strongest
    model = models.load(tmp_path)
    task = clean_corrupt.copying(model, 4, 10, session.generator("sequences"))
    lost = patching.path_patching(model, task).mean(-1) / made.numbers["gap"]
    torch.testing.assert_close(made.numbers["effects"], lost)
    assert made.numbers["enough"] <= 15  # the heads that do nothing have edges, too
    assert made.numbers["faithfulness"][-1] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("chapter", "save"),
    [*((chapter, save_neox) for chapter in ("01", "03", "05", "06")), ("06", save_grouped)],
)
@pytest.mark.usefixtures("small")
def test_a_random_model_with_rotary_positions_and_what_it_costs(
    chapter: str, save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is near an algorithm that learns nothing, and does not copy."""
    monkeypatch.delenv("ICLUTILS_QUIET")
    monkeypatch.setattr(circuits, "EXACT", 0)
    save(tmp_path)
    made = iclutils.show(chapter, tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert re.match("loading .* of weights in memory", first)
    assert re.search("seconds, .* of memory beside the weights", second)
    assert len(made.alt.split()) > 10
    assert repr(made) == made.text
    if chapter == "03":
        far = made.numbers["distances"]
        assert min(far["the middle"], far["mean label"]) < far["OLS"]
        assert made.numbers["squared error"]["the model"].mean() > 0.5 * made.numbers["scale"]
    if chapter == "05":
        assert math.isnan(made.numbers["share of updates"])
        assert "does not copy" in made.text
    if chapter == "06":
        assert not made.numbers["exact"]
        assert "gains nothing" in made.text
        assert "%" not in made.text, "no share of nothing"


@pytest.mark.usefixtures("small")
def test_the_command_on_a_short_context_writes_what_the_figure_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_gpt2(tmp_path, n_positions=15)
    out = tmp_path / "deep" / "figure.png"
    assert main(["show", "01", "--model", str(tmp_path), "--out", str(out)]) == 0
    even = head_scores.uniform_baselines(7)["prefix"]
    assert f"even attention would give {even:.2f}" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    assert b"Heat maps by layer and head" in out.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["figure.png"]
    assert main(["show", "01", "--model", str(tmp_path), "--out", str(tmp_path / "a.bmp")]) == 2


@pytest.mark.shared
@pytest.mark.usefixtures("small")
def test_texts_and_labels_of_the_readers_own(text_model: Path) -> None:
    made = iclutils.show("01", text_model, prompt="The cat sat on the mat")
    ticks = [label.get_text() for label in made.figure.axes[0].get_xticklabels()]
    assert "".join(ticks) == "<|endoftext|>" + "The cat sat on the mat" * 2
    there = head_scores.prefix_matching(made.numbers["pattern"], 6).item()
    assert made.numbers["prefix matching on the text"] == pytest.approx(there)
    made = iclutils.show("02", text_model, demonstrations=SHOWN, query=("I loved it", "Positive"))
    model = models.load(text_model)
    task = text.TextTask("mine", "Text:", "Label:", (" Positive", " Negative"))
    rows = [("a great movie", 0), ("a bad film", 1)]
    prompts = text.build(task, model.tokenizer, [rows], [("I loved it", 0)], context=1024)
    torch.testing.assert_close(made.numbers["S"], saliency.measure(model, prompts).relative)
    long = [("a", "Positive"), ("b", "Extraordinarily")]
    said = iclutils.show("02", text_model, demonstrations=long, query="c").text
    assert "of Extraordinarily only the first token counts); for that answer" in said


def test_a_model_with_grouped_heads_is_asked_about_our_sentences(tmp_path: Path) -> None:
    """A small random Llama with the vocabulary of SmolLM2."""
    real_tokenizer("smollm2").save_pretrained(tmp_path)
    save_grouped(tmp_path, vocab_size=49_152, max_position_embeddings=256, bos_token_id=1)
    made = iclutils.show("02", tmp_path)
    prompts = open_source("sentiment", models.load(tmp_path)).varied(10)
    again = saliency.measure(models.load(tmp_path), prompts).relative
    torch.testing.assert_close(made.numbers["S"], again, atol=1e-5, rtol=1e-4)
    assert "sentences that praise or blame" in made.text


def test_algorithms_that_learn_nothing() -> None:
    xs, ys = torch.zeros(1, 4, 1), torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    found = [rule(xs, ys).tolist()[0] for rule in IDLE.values()]
    assert found == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 3, 5]]


@pytest.mark.parametrize(
    ("chapter", "more", "message"),
    [
        ("09", {}, "Unknown chapter '09'"),
        ("01", {"model": "no/such/folder"}, "hub model must be pinned"),
        ("01", {"model": "./nowhere"}, "is no model folder"),
        ("01", {"model": "induction-0", "prompt": "hello"}, "reads no text"),
        ("03", {"prompt": "hello"}, "for chapter 01"),
        ("01", {"query": "hello"}, "for chapter 02"),
        ("01", {"model": "regression-d2"}, "ask for chapter 03"),
        ("03", {"model": "lsa-1"}, "ask for chapter 04"),
        ("04", {"model": "induction-0"}, "ask for chapter 05"),
        ("04", {"model": "lsa-waves"}, "not trained on linear functions"),
        ("02", {"demonstrations": SHOWN, "query": "x"}, "reads no text"),
        ("02", {"demonstrations": SHOWN[:1], "query": "x"}, "at least two labels"),
        ("02", {"demonstrations": SHOWN}, "and a query"),
        ("02", {"demonstrations": SHOWN, "query": ("x", "Neutral")}, "none of those shown"),
    ],
)
def test_what_cannot_be_is_refused(chapter: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(IclError, match=message):
        iclutils.show(chapter, **more)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("chapter", "more", "message"),
    [
        ("01", {"prompt": "word"}, "at least two"),
        ("02", {"demonstrations": SHOWN, "query": "word " * 1100}, "Show fewer demonstrations"),
    ],
)
def test_texts_that_do_not_fit_are_refused(
    text_model: Path, chapter: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(IclError, match=message):
        iclutils.show(chapter, text_model, **more)


@pytest.mark.parametrize(
    ("chapter", "save", "message"),
    [
        ("03", partial(save_gpt2, n_positions=5), "Only 2 pairs"),
        ("04", LinearSelfAttention(Shape(dim=2, pairs=3), [0]).save, "not trained on linear"),
    ],
)
@pytest.mark.usefixtures("small")
def test_models_that_cannot_be_asked_are_refused(
    chapter: str, save: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    save(tmp_path)
    with pytest.raises(IclError, match=message):
        iclutils.show(chapter, tmp_path)


def test_amounts_and_durations_are_rounded() -> None:
    sizes = {3e5: "less than 1 MB", 1.44e6: "about 1.4 MB", 497.8e6: "about 500 MB"}
    assert {size: quick_figure.amount(size) for size in sizes} == sizes
    times = {0.3: "less than 2 seconds", 41.7: "about 42 seconds", 100: "about 1.7 minutes"}
    assert {time: quick_figure.duration(time) for time in times} == times
