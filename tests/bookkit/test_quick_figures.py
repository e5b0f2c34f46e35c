"""Quick figures: the chapters' numbers, on any model; refusals; costs that are said before."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
from tiny import save_gpt2, save_gptj, save_neox
from wired import save_wired

import iclutils
from iclutils import IclError, models
from iclutils.__main__ import main
from iclutils.bookkit import presets
from iclutils.bookkit.quick_figures import circuits, quick_figure
from iclutils.bookkit.quick_figures.regression import IDLE
from iclutils.bookkit.session import Session
from iclutils.chapters.gradient_descent import heads
from iclutils.chapters.label_words import saliency
from iclutils.chapters.regression.distances import predict
from iclutils.interp import head_scores, patching, weights
from iclutils.models.lsa import LinearSelfAttention, Shape
from iclutils.tasks import regression, text
from iclutils.tasks.repeated import RepeatedTokens, repeated_tokens
from iclutils.tasks.sources import open_source

SHOWN: list[tuple[str, str]] = [("a great movie", "Positive"), ("a bad film", "Negative")]
mpl.use("Agg")


@pytest.fixture(autouse=True)
def closed() -> Any:
    yield
    plt.close("all")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> presets.Tier:
    """The mini tier with few sequences."""
    tier = presets.get("mini")
    few = replace(
        tier,
        induction=replace(tier.induction, length=12, sequences=12),
        label_words=replace(tier.label_words, saliency_prompts=6),
        circuits=replace(tier.circuits, length=10, sequences=4),
        regression=replace(tier.regression, contexts=40),
    )
    monkeypatch.setitem(presets.TIERS, "mini", few)
    return few


@pytest.fixture
def session(small: presets.Tier) -> Session:
    return Session(small, "", 0, "cpu")


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    save_gpt2(folder)
    return folder


@pytest.fixture(scope="module")
def neox_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neox")
    save_neox(folder)
    return folder


# The numbers are those of the lenses, called by hand


def test_01_finds_the_induction_head_of_the_chapter() -> None:
    session = Session(presets.get("mini"), "", 0, "cpu")
    made = iclutils.show("01", "induction-0")
    model = models.load("induction-0", fold=True)
    batch = repeated_tokens(model, 64, 30, session.generator("doubled"))
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
    assert made.numbers["S"].sum(1).tolist() == pytest.approx([1.0] * 4)


def test_03_predicts_as_the_chapter_does(session: Session) -> None:
    made = iclutils.show("03", "regression-d2")
    net = session.regressors("regression-d2")
    drawn = regression.sample(regression.Task(2), 40, 5, session.generator("contexts"))
    error = (predict(net, drawn.xs, drawn.ys)[-1] - drawn.ys).square().mean(0) / 2
    torch.testing.assert_close(made.numbers["squared error"]["the model"], error)
    assert (
        min(made.numbers["distances"], key=made.numbers["distances"].get)
        == (made.numbers["nearest"])
    )


def test_04_takes_the_heads_apart_as_the_chapter_does(session: Session) -> None:
    made = iclutils.show("04", "induction-0")
    model = models.load("induction-0")
    tokens = repeated_tokens(model, 16, 12, session.generator("copying"), distinct=True).tokens
    shown = heads.first_copy(RepeatedTokens(tokens, 12))[:, :19]
    others = torch.arange(model.cfg.d_vocab)[None]
    duals = heads.dual_heads(model, tokens[:, :19], shown)
    split = heads.direct_logit_attribution(model, tokens[:, :19], duals, tokens[:, 19], others)
    torch.testing.assert_close(made.numbers["updates"], split.demonstration_update.mean(0))
    assert made.numbers["share of updates"] == pytest.approx(split.update_share.item())
    assert made.numbers["accuracy"] > 0.9 > 0.1 > made.numbers["accuracy without updates"]


def test_04_compares_linear_attention_with_a_step() -> None:
    made = iclutils.show("04", "lsa-1")
    assert made.numbers["cosine"].min() > 0.99  # chapter 04
    assert made.numbers["loss ratio"] == pytest.approx(1, abs=0.05)


def test_05_finds_the_edges_that_were_built(small: presets.Tier, tmp_path: Path) -> None:
    save_wired(tmp_path / "wired")
    made = iclutils.show("05", tmp_path / "wired")
    assert made.numbers["exact"]
    strongest = {f"{u} -> {v}" for u, v in made.numbers["strongest"][:8]}
    assert {"0.0 -> k 1.0", "1.0 -> logits", "embed -> v 0.0"} <= strongest
    model = models.load(tmp_path / "wired")
    source = Session(small, "", 0, "cpu").generator("sequences")
    task = circuits.clean_corrupt.copying(model, 4, 10, source)
    lost = patching.path_patching(model, task).mean(-1) / made.numbers["gap"]
    torch.testing.assert_close(made.numbers["effects"], lost)
    assert made.numbers["enough"] <= 15  # the heads that do nothing have wires, too
    assert made.numbers["faithfulness"][-1] == pytest.approx(1, abs=1e-4)


def test_05_estimates_what_is_too_dear_to_patch(
    small: presets.Tier, gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuits, "EXACT", 0)
    made = iclutils.show("05", gpt2_folder)
    assert not made.numbers["exact"]
    assert "estimated from gradients" in made.text


# Any model


@pytest.mark.parametrize("chapter", ["01", "03", "04", "05"])
def test_a_random_model_with_rotary_positions_and_what_it_costs(
    chapter: str,
    small: presets.Tier,
    neox_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is near an algorithm that learns nothing, and does not copy."""
    monkeypatch.delenv("ICLUTILS_QUIET")
    made = iclutils.show(chapter, neox_folder)
    first, second = capsys.readouterr().out.splitlines()
    assert re.match("loading .* of weights in memory", first)
    assert re.search("seconds, .* of memory beside the weights", second)
    assert made.chapter == chapter
    assert len(made.alt.split()) > 10
    assert repr(made) == made.text
    if chapter == "03":
        far = made.numbers["distances"]
        assert min(far["the middle"], far["mean label"]) < far["OLS"]
        assert made.numbers["squared error"]["the model"].mean() > 0.5 * made.numbers["scale"]
        assert "always answering the middle" in made.text
    if chapter == "04":
        assert math.isnan(made.numbers["share of updates"])
        assert "does not copy" in made.text


def test_short_contexts_get_short_sequences(small: presets.Tier, tmp_path: Path) -> None:
    save_gpt2(tmp_path, n_positions=15)
    made = iclutils.show("01", tmp_path)
    assert made.numbers["even prefix matching"] == head_scores.uniform_baselines(7)["prefix"]


@pytest.mark.shared
def test_a_text_of_the_readers_own(small: presets.Tier, text_model: Path) -> None:
    made = iclutils.show("01", text_model, prompt="The cat sat on the mat")
    ticks = [label.get_text() for label in made.figure.axes[0].get_xticklabels()]
    assert "".join(ticks) == "<|endoftext|>" + "The cat sat on the mat" * 2
    pattern = made.numbers["pattern"]
    assert pattern.shape == (13, 13)
    assert made.numbers["prefix matching on the text"] == pytest.approx(
        head_scores.prefix_matching(pattern, 6).item()
    )


@pytest.mark.shared
def test_texts_and_labels_of_the_readers_own(small: presets.Tier, text_model: Path) -> None:
    given = {"demonstrations": SHOWN, "query": ("I loved it", "Positive")}
    made = iclutils.show("02", text_model, **given)
    model = models.load(text_model)
    task = text.TextTask("mine", "Text:", "Label:", (" Positive", " Negative"))
    rows = [("a great movie", 0), ("a bad film", 1)]
    prompts = text.build(
        task, model.tokenizer, [rows], [("I loved it", 0)], context=model.cfg.n_ctx
    )
    torch.testing.assert_close(made.numbers["S"], saliency.measure(model, prompts).relative)
    guessed = iclutils.show("02", text_model, demonstrations=SHOWN, query="I loved it")
    assert "for that answer" in guessed.text
    long = [("a", "Positive"), ("b", "Extraordinarily")]
    made = iclutils.show("02", text_model, demonstrations=long, query="c")
    assert "of Extraordinarily only the first token counts" in made.text


def test_algorithms_that_learn_nothing() -> None:
    xs, ys = torch.zeros(1, 4, 1), torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    found = [rule(xs, ys).tolist()[0] for rule in IDLE.values()]
    assert found == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 3, 5]]


# Doors


@pytest.mark.parametrize(
    ("chapter", "more", "message"),
    [
        ("06", {}, "Unknown chapter '06'"),
        ("01", {"model": "no/such/folder"}, "hub model must be pinned"),
        ("01", {"model": "./nowhere"}, "There is no folder"),
        ("01", {"model": "induction-0", "prompt": "hello"}, "reads no text"),
        ("03", {"prompt": "hello"}, "for chapter 01"),
        ("01", {"query": "hello"}, "for chapter 02"),
        ("01", {"model": "regression-d2"}, "ask for chapter 03"),
        ("03", {"model": "lsa-1"}, "ask for chapter 04"),
        ("04", {"model": "lsa-waves"}, "not trained on linear functions"),
        ("02", {"model": "induction-0"}, "something to label"),
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
def test_texts_that_do_not_fit_are_refused(text_model: Path) -> None:
    with pytest.raises(IclError, match="reads at most 1024"):
        iclutils.show("01", text_model, prompt="word " * 600)
    with pytest.raises(IclError, match="at least two"):
        iclutils.show("01", text_model, prompt="word")
    with pytest.raises(IclError, match="Show fewer demonstrations"):
        iclutils.show("02", text_model, demonstrations=SHOWN, query="word " * 1100)
    twins = [("a", "Positively"), ("b", "Positive")]
    with pytest.raises(IclError, match="begin with the same sub-token"):
        iclutils.show("02", text_model, demonstrations=twins, query="c")


def test_models_that_cannot_be_asked_are_refused(small: presets.Tier, tmp_path: Path) -> None:
    save_gptj(tmp_path / "gptj")
    for chapter in ("04", "05"):
        with pytest.raises(IclError):
            iclutils.show(chapter, tmp_path / "gptj")
    save_gpt2(tmp_path / "flat", n_layer=1)
    with pytest.raises(IclError, match="two attention layers"):
        iclutils.show("01", tmp_path / "flat")
    save_gpt2(tmp_path / "short", n_positions=5)
    with pytest.raises(IclError, match="Only 2 pairs"):
        iclutils.show("03", tmp_path / "short")
    (tmp_path / "taskless").mkdir()
    LinearSelfAttention(Shape(dim=2, pairs=3), [0]).save(tmp_path / "taskless")
    with pytest.raises(IclError, match="not trained on linear functions"):
        iclutils.show("04", tmp_path / "taskless")


# What is said, and what is written


def test_the_weights_are_counted_from_their_headers(tmp_path: Path) -> None:
    network = save_gpt2(tmp_path)
    assert models.size(tmp_path) == 4 * network.num_parameters()
    with pytest.raises(IclError, match="Unknown model"):
        models.size("gpt3")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(IclError, match=r"damaged: model\.safetensors"):
        models.size(tmp_path)


def test_amounts_and_durations_are_rounded() -> None:
    sizes = {3e5: "less than 1 MB", 1.44e6: "about 1.4 MB", 497.8e6: "about 500 MB"}
    assert {size: quick_figure.amount(size) for size in sizes} == sizes
    times = {0.3: "less than 2 seconds", 41.7: "about 42 seconds", 100: "about 1.7 minutes"}
    assert {time: quick_figure.duration(time) for time in times} == times


def test_the_command_writes_a_figure_that_says_what_it_shows(
    small: presets.Tier, gpt2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "deep" / "figure.png"
    assert main(["show", "01", "--model", str(gpt2_folder), "--out", str(out)]) == 0
    assert "attends most to what followed" in capsys.readouterr().out
    written_png = out.read_bytes()
    assert written_png.startswith(b"\x89PNG")
    assert b"Heat maps by layer and head" in written_png
    assert [path.name for path in out.parent.iterdir()] == ["figure.png"]
    assert main(["show", "01", "--out", str(tmp_path / "figure.bmp")]) == 2
    assert main(["show", "02", "--demonstration", "no label"]) == 2
