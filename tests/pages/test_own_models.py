"""The chapters beyond their defaults: the code of the other tiers, and a reader's own model."""

import contextlib
import io
import linecache
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from notebook_rules import code, printed, source, tags
from tiny import real_tokenizer, save_gpt2, save_grouped, save_neox

from iclutils import claims, presets
from iclutils.claims.verdicts import FAILS, HOLDS
from iclutils.files import read_json, sha256
from iclutils.models import language
from iclutils.models.regressors import Shape
from iclutils.tasks.regression import Task
from iclutils.zoo import smollm2
from tools.run import LEFT_OUT, notebooks
from training import loop, regression

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("results_elsewhere")

# Sizes of all tiers, cut down, by the field of the tier.
SIZES = {
    "induction": {"sequences": 4, "pairs": 3},
    "label_words": {"prompts": 20, "saliency_prompts": 6, "many_shots": 2, "sets": 2,
                    "diagnosed_sets": 2, "queries": 24, "train_per_class": 2, "epochs": 1,
                    "asked": 2, "strong": 3, "layers": 2},
    "regression": {"contexts": 60, "fitted": 6, "queries": 24, "probe_contexts": 640,
                   "probe_steps": 8, "read": 6, "asked": 4},
    "gradient_descent": {"contexts": 400, "tuned": 400, "prompts": 6},
    "circuits": {"length": 12, "sequences": 6, "patterned": 30, "influenced": 6, "draws": 2,
                 "ranked": 2, "untrained": 1, "cases": 12},
    "lenses": {"tried": 6, "prompts": 6, "fresh": 6, "steps": 1, "length": 12,
               "layer": 1, "strong": 4},
}  # fmt: skip
SMALL = {"n_positions": 80, "vocab_size": 90, "bos_token_id": 89, "eos_token_id": 89}
LARGE = {"n_positions": 128, "vocab_size": 400, "bos_token_id": 399, "eos_token_id": 399}
LARGE |= {"n_layer": 12, "n_head": 12, "n_embd": 48, "n_inner": 64}  # heads as in GPT-2 small


def sized(sizes, **others):
    """Sizes of a chapter with some of them changed."""
    return SimpleNamespace(**vars(sizes) | others)


def run(chapter, **parameters):
    """Execute a chapter's code here, its appendix too, on the CPU, and return what it prints."""
    mpl.use("Agg")
    out = io.StringIO()
    for path in notebooks([chapter], "mini"):
        space = {"__name__": "__main__"}
        with contextlib.redirect_stdout(out):
            for n, cell in enumerate(read_json(path)["cells"]):
                left_out = LEFT_OUT.get(parameters.get("tier")) in tags(cell)
                if cell["cell_type"] == "code" and not left_out:
                    file, text = f"<{path.stem} {n}>", source(cell)  # what ``cached`` reads
                    linecache.cache[file] = len(text), None, text.splitlines(True), file
                    exec(compile(text, file, "exec"), space)
                    plt.close("all")
                    if "parameters" in tags(cell):
                        space.update(parameters, device="cpu")
    return out.getvalue()


def cut_down(tier):
    """The tier, with the sizes above."""
    return replace(tier, **{f: sized(getattr(tier, f), **sizes) for f, sizes in SIZES.items()})


@pytest.fixture
def small(monkeypatch):
    for name, tier in list(presets.TIERS.items()):
        monkeypatch.setitem(presets.TIERS, name, cut_down(tier))


@pytest.fixture
def stand_in(monkeypatch):
    """``stand_in(name, folder)`` puts a folder in the place of a model of the hub."""

    def put(name, folder):
        found = {p.name: sha256(p) for p in folder.iterdir() if p.name != "generation_config.json"}
        made = language.HubModel("openai-community/stand-in", "0" * 40, found)
        monkeypatch.setitem(language.HUB, name, made)
        monkeypatch.setattr(language, "snapshot_download", lambda *_, **__: str(folder))

    return put


def written(tmp_path, chapter, tier, printed):
    """Results by claim of a chapter that asked every claim of its tier; None where undefined."""
    results = claims.read_results(tmp_path / "results")
    found = dict.fromkeys(re.findall(r"^not measurable +(\S+)$", printed, re.MULTILINE))
    found |= {name: result for (column, name), result in results.items() if column == tier}
    asked = {name for name, claim in claims.ledger(chapter).items() if tier in claim.tiers}
    return found, asked - found.keys()


PAPER = {  # of each chapter the stand-in's name; what a network without training fails, and holds
    "01": ("gpt2", ["01.prefix_best", "01.offset", "01.cause_loss"], []),
    "02": ("gpt2-xl", ["02.isolate_first", "02.swp_shallow"], []),
    "03": ("", ["03.shift_scale"], []),
    "04": ("", [], ["04.one_cosine", "04.one_weights"]),
    "05": ("gpt2", [], []),
    "06": ("gpt2", ["06.behaviour_gap", "06.pair_formula"], []),
}
REAL_ROWS = ("02", "05")


def few_steps(monkeypatch, folder):
    """Train the networks of the paper's size in chapter 03, small and hastily."""
    monkeypatch.setenv("ICLUTILS_TRAINED", str(folder))
    for name in list(regression.PAPER):
        shape = replace(regression.recipe(name).shape, width=16, heads=2, pairs=17)
        settings = {"shape": shape, "members": [(0, Task(8))], "steps": 2, "warmup": 1}
        monkeypatch.setitem(regression.PAPER, name, settings)
        loop.train(regression.recipe(name), folder / name, progress=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "chapter",
    [pytest.param(c, marks=pytest.mark.shared if c in REAL_ROWS else ()) for c in PAPER],
)
def test_the_paper_tier_checks_its_claims(small, stand_in, request, monkeypatch, tmp_path, chapter):
    """On networks that were not trained, or hardly: what needs training fails."""
    name, fails, holds = PAPER[chapter]
    if chapter in REAL_ROWS:
        stand_in(name, request.getfixturevalue("text_model"))
    elif name:
        save_gpt2(tmp_path / "hub", **(LARGE if chapter == "01" else SMALL | {"n_embd": 48}))
        stand_in(name, tmp_path / "hub")
    elif chapter == "03":
        few_steps(monkeypatch, tmp_path / "trained")
    tasks = {"tasks": "sst2,trec,ag_news"} if chapter == "02" else {}
    printed = run(chapter, tier="paper", **tasks)
    found, missing = written(tmp_path, chapter, "paper", printed)
    assert [name for name in missing if not re.match(r"03\.(mspd|probe)", name)] == []
    wanted = dict.fromkeys(fails, FAILS) | dict.fromkeys(holds, HOLDS)
    assert {name: found[name].verdict for name in wanted} == wanted
    able = {r.model for r in found.values() if r}
    assert not name or able == ({name} if chapter != "05" else set()), "05 asks what can answer"


@pytest.mark.parametrize(
    "chapter", sorted({c.chapter for c in claims.ledger().values() if "real" in c.tiers})
)
def test_the_real_tier_checks_its_claims_on_a_small_network(tmp_path, monkeypatch, chapter):
    """A random Llama of three layers that reads the words of SmolLM2, in its place."""
    words, folder = real_tokenizer("smollm2"), tmp_path / "smollm2"
    blocks = {"hidden_size": 32, "intermediate_size": 64}  # of 32, to be rounded in four bits
    save_grouped(folder, vocab_size=len(words), max_position_embeddings=2048, **blocks)
    words.save_pretrained(folder)
    part = cut_down(presets.PART)
    few = {
        "induction": sized(part.induction, strongest=3, draws=2, prompts=6),
        "lenses": sized(part.lenses, functions=presets.TIERS["real"].lenses.functions),
    }
    monkeypatch.setitem(presets.TIERS, "real", replace(part, column="real", **few))
    monkeypatch.setattr(smollm2, "folder", lambda: folder)
    monkeypatch.setenv("ICLUTILS_CACHE", str(tmp_path / "cache"))
    found, missing = written(tmp_path, chapter, "real", run(chapter, tier="real"))
    assert not missing
    assert {result.model for result in found.values() if result} <= {"smollm2", "regression-d8"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("chapter", "said"),
    [
        ("01", "measured        01.prefix_best = "),
        pytest.param("02", "measured        02.more_shots = ", marks=pytest.mark.shared),
        ("03", "measured        03.ols_nearest = "),
        ("05", "not measurable  05.carry_labels"),  # a network that answers nothing loses nothing
        ("06", "measured        06.behaviour_gap = "),
    ],
)
def test_a_readers_own_model_gets_numbers_and_no_verdicts(small, tmp_path, request, chapter, said):
    if chapter == "02":
        folder = request.getfixturevalue("text_model")
    elif chapter == "03":
        shape = Shape(8, 20, "two", 1, 16, 2)
        plan = regression.RegressionRecipe.of("own", "cpu", shape, [(5, Task(8))], steps=3)
        folder = loop.train(plan, tmp_path / "own", progress=False) / "step-00003"
    else:
        folder = tmp_path / "own"
        save_gpt2(folder, **SMALL)
    printed = run(chapter, model=str(folder))
    assert said in printed
    assert not (tmp_path / "results").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_your_model_looks_at_the_model_in_a_folder_beside_the_user(tmp_path):
    """By papermill, as its page says. A random model copies nothing, and every chapter says so."""
    save_neox(tmp_path / "mine")
    notebook = str(ROOT / "notebooks" / "your_model.ipynb")
    asked = [notebook, "out.ipynb", "-p", "model", "mine", "-k", "python3"]
    quiet = {"ICLUTILS_QUIET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "papermill", *asked],
        cwd=tmp_path, env=os.environ | quiet, check=True, capture_output=True,
    )  # fmt: skip
    text = "\n".join(map(printed, code(read_json(tmp_path / "out.ipynb"))))
    assert f"{tmp_path.resolve()}/mine" in text
    assert "of its probability is on numbers" in text, "chapter 03 asked the reader's own model"
    assert "It does not copy, so there is no answer to have a share in." in text
    assert "Copying, the model gains nothing, of which no circuit has a share." in text
