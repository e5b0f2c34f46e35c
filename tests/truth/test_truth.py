"""The public measures on SmolLM2 against what transformers alone gave: ``NN.py`` wrote ``NN.json``.

Both sides read the same token ids. ``chapter_NN`` computes the values of a chapter from them.
"""

import ast
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny import language_model

from iclutils import models
from iclutils.chapters import gpt2_induction as induction
from iclutils.chapters.attention_circuits import interactions
from iclutils.chapters.attention_circuits.pair import path_drops
from iclutils.chapters.contrastive_kernel import ablation, heads
from iclutils.chapters.every_lens import compare, lens_scores
from iclutils.chapters.every_lens.question import Question, lost_without_each
from iclutils.chapters.label_anchors import (
    answers,
    compression,
    confusion,
    extraction,
    isolation,
    reweighting,
)
from iclutils.chapters.ridge_ols import text
from iclutils.interp import (
    at_query,
    attribution,
    circuit,
    graph,
    head_scores,
    hooks,
    patching,
    readout,
    removal,
    weights,
)
from iclutils.interp.clean_corrupt import CleanCorrupt, Margin, baselines
from iclutils.interp.graph import Node, head
from iclutils.tasks.numbers import NumberFormat
from iclutils.tasks.prompts import Prompts
from iclutils.tasks.regression import Contexts
from iclutils.tasks.repeated import RepeatedTokens

HERE = Path(__file__).parent


@cache
def model(fold=False):
    language_model()
    return models.load("smollm2", fold=fold)


@cache
def stored(number):
    """What both sides read (lists as tensors), and the values."""
    both = json.loads((HERE / f"{number}.json").read_text(encoding="utf-8"))
    given = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in both["given"].items()}
    return given, both["values"]


@cache
def measured(number):
    measure = globals()[f"chapter_{number}"]
    return measure(model(), stored(number)[0])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name"),
    [(path.stem, name) for path in sorted(HERE.glob("*.json")) for name in stored(path.stem)[1]],
)
def test_a_measure_is_what_transformers_alone_gives(number, name):
    got, expected = (
        torch.as_tensor(values[name]).double() for values in (measured(number), stored(number)[1])
    )
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-4)


def test_every_chapter_has_values_that_owe_the_package_nothing():
    roots = {"__future__", "alone", "collections", "json", "math", "os", "pathlib"}
    assert sorted(path.stem for path in HERE.glob("*.json")) == ["01", "02", "03", "05", "06", "07"]
    for script in {*HERE.glob("*.py")} - {HERE / "test_truth.py"}:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            known = roots | {"numpy", "torch", "transformers", "typing"}
            assert {name.split(".")[0] for name in names} <= known, script


def test_every_measure_is_still_where_it_is_looked_for():
    """By day, so that a move is not found at night."""
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = globals().get(node.value.id)
            assert not isinstance(found, ModuleType) or hasattr(found, node.attr), node.attr


def chapter_01(net, given):
    batch, other = (RepeatedTokens(given[k], given["length"]) for k in ("tokens", "other"))
    cut, clean = [tuple(h) for h in given["heads"].tolist()], batch.clean_half
    found = head_scores.score_heads(net, batch.tokens, batch.length)
    _, right = readout.predictions(net, batch.tokens)
    ways = [[], hooks.ablate_heads(net, batch.tokens, cut, "mean", other.tokens)]
    second, without = induction.second_copy(net, batch, ways)
    pair = induction.Circuit((16, 0), (18, 6), ((18, 6),), ((16, 0),))
    cuts = induction.effect_of_cuts(net, batch, pair, other, [])
    folded = model(fold=True)
    start = torch.zeros_like(batch.tokens[:, :1])
    two = CleanCorrupt(batch.tokens, other.tokens, start, start)
    drops = path_drops(net, two, [head(18, 6)])
    return {
        "prefix_matching 18.6": found["prefix"][:, 18, 6],
        "accuracy": right[:, clean].double().mean(1),
        "loss": second["loss"],
        "loss without four heads": without["loss"],
        "matching without 16.0": cuts.without_previous,
        "matching without the path from 16.0": cuts.without_path,
        "direct effect of 18.6": induction.direct_effects(folded, batch)[:, 18, 6],
        "copying score of 18.6": weights.copying_scores(folded)[18, 6],
        "share of the matching lost with the path": drops[16 * 9, 0],
    }


def chapter_02(net, given):
    asked = Prompts(**given)
    found = answers.answers(net, asked)
    read, _ = extraction.label_attention(net, asked)
    step = reweighting.prepare(net, asked)
    beta = torch.tensor([0.5, -0.3]).expand(30, 9, -1)
    queries, keys, _ = confusion.queries_and_keys(net, asked)
    near = confusion.key_distances(queries, keys, 1)
    cut = dict.fromkeys(range(5), isolation.cut_edges(asked))
    zeroed = hooks.cut_attention(net, cut, renormalise=False)
    rules = [compression.hidden_anchor, compression.label_only]
    anchors, labels = compression.compress(net, asked, rules)
    return {
        "logits of the labels": found.class_logits,
        "logits less the mean of the set": (
            answers.centre(answers.answers_by_set(net, asked), asked).class_logits
        ),
        "label words isolated in 5 layers": isolation.isolate(net, asked, range(5)).class_logits,
        "attention to earlier tokens zeroed in 5 layers": (
            answers.answers(net, asked, zeroed).class_logits
        ),
        "attention to the labels in layer 18": read[:, 18],
        "from formatting and labels": anchors.class_logits,
        "from labels alone": labels.class_logits,
        "without the texts": answers.answers(net, compression.text_anchor(asked)).class_logits,
        "re-weighted": step.answers(beta).class_logits,
        "distance of the keys in layer 18": near[18, 0, 1],
    }


def chapter_07(net, given):
    four, choices = [head(*h) for h in given["heads"].tolist()], given["choices"]
    at = torch.full((len(choices), 1), given["clean"].shape[1] - 1)
    task = Margin(given["clean"], given["corrupt"], at, choices[:, :1], choices=choices)
    asked = Question(task, given["example"], given["cues"], torch.zeros_like(given["cues"]))
    found, (layer, h) = lens_scores.measure(net, asked, layer=20), (18, 6)
    vector = found.u[14]
    vectors = [(14, vector), (14, torch.zeros_like(vector))]
    steered = compare.add_at_target(net, asked, vectors).margin
    sets = [four, [Node("mlp", 20)]]
    resampled = found.clean - patching.ablate(net, task, sets)
    other = removal.mean_over([removal.head_means(net, given["corrupt"])], "the other side")
    turned = replace(asked, task=replace(task, clean=given["corrupt"]))
    rival = removal.mean_over([compare.means_at_target(net, turned)], "the other side")
    numbers = frozenset(net.cfg.n_heads * la + h for la, h in given["heads"].tolist())
    moved = compare.without_at_target(net, asked, [numbers], rival)
    by_mean = removal.without(net, task, [[tuple(h) for h in given["heads"].tolist()]], other)
    return {
        "margin": found.clean,
        "margin of the corrupt side": found.corrupt,
        "circuit 18.6": found.circuit[:, layer, h],
        "anchors 18.6": found.anchors[:, layer, h],
        "vector 18.6": found.vector[:, layer, h],
        "dual 18.6": found.dual[:, layer, h],
        "common share after layer 20": lens_scores.common_share(found.states[:, 20]),
        "lost without each example": lost_without_each(net, asked),
        "task vector after layer 14": vector[:4],
        "margin with the vector": steered[0],
        "margin of the bare prompt": steered[1],
        "margin without four heads, resampled": resampled[0],
        "margin without four heads, zero": found.clean
        - patching.ablate(net, task, sets[:1], "zero")[0],
        "margin without four heads, mean over the other side": by_mean.margin[0],
        "probability without four heads, mean over the other side": by_mean.p[0],
        "margin without MLP 20": resampled[1],
        "margin with the other side's mean of four heads at the last token": moved.margin[0],
    }


def chapter_06(net, given):
    names = "clean", "corrupt", "at", "answer", "source", "choices"
    task = CleanCorrupt(**{name: given[name] for name in names})
    first, second, third = head(16, 0), head(18, 6), head(17, 3)
    nodes, keys = graph.model_graph(net), Node("k", 18, 6)
    edges = {
        "16.0 to the keys of 18.6": (first, keys),
        "MLP 2 to MLP 5": (Node("mlp", 2), Node("mlp_in", 5)),
        "18.6 to the logits": (second, Node("logits")),
        "MLP 29 to the logits": (Node("mlp", 29), Node("logits")),
    }
    lost = patching.path_patching(net, task, [*edges.values()])
    slope = attribution.edge_attribution(net, task)
    kept = nodes.exists & ~nodes.mask([(first, keys), (second, Node("logits"))])
    whole, corrupt = baselines(net, task)
    left = circuit.scores(net, task, kept[None])
    each, both = interactions.interactions(net, task, [[second], [third]])
    mean = patching.ablate(net, task, [[second, third]], "mean")
    return {
        "score": whole,
        "score of the corrupt side": corrupt,
        "lost without 18.6": each[0],
        "interaction of 18.6 and 17.3": both[0, 1],
        "score without 18.6 and 17.3, mean": whole - mean[0],
        **{f"lost, {name}": lost[nodes.index(edge)] for name, edge in edges.items()},
        "slope, 16.0 to the keys of 18.6": slope[nodes.index((first, keys))],
        "slope, MLP 2 to MLP 5": slope[nodes.index(edges["MLP 2 to MLP 5"])],
        "circuit without two edges": left[0],
        "faithfulness": circuit.faithfulness(left, whole, corrupt)[0],
        "direct logit of 18.6": attribution.direct_logits(net, task)[nodes.writers.index(second)],
    }


def chapter_03(net, given):
    around = (tuple(given[name].tolist()) for name in ("between", "after"))
    form = NumberFormat(given["values"], (), *around)
    xs, ys = given["xs"].double()[..., None], given["ys"].double()
    contexts = Contexts(xs, ys, torch.zeros(2, 1))
    assert torch.equal(form.write(xs, ys)[0], given["tokens"])
    means, sure = text.predict_numbers(net, form, xs, ys)
    return {
        "expected number": means,
        "probability of a number": sure,
        "every x after four pairs": text.ask_every_number(net, form, contexts, [4])[:, 0],
    }


def chapter_05(net, given):
    query, shown = at_query.read(net, given["tokens"]), given["shown"].bool()
    answer, (layer, h) = given["answer"], (18, 6)
    duals = heads.dual_heads(query, shown)
    parts = heads.direct_logit_attribution(query, duals, answer)
    found = ablation.ablations(query, shown, answer)
    mean = duals.update.mean(0, keepdim=True)
    hooks = ablation.replace_part(query, shown, "update", mean)
    found["mean update"] = ablation.predict(query, answer, hooks=hooks)
    one = ablation.ablations(query, shown, answer, heads=[(layer, h)], ways=["no update"])
    said = ("log p without updates", "log p without starts", "log p with the mean update")
    return {
        "log p": found["whole"].log_prob,
        "what 18.6 learns, to the logit": parts.update[:, layer, h],
        "MLP 20 to the logit": parts.mlp[:, 20],
        "embedding to the logit": parts.embedding,
        "logit": parts.logit,
        **{name: found[way].log_prob for name, way in zip(said, list(found)[1:], strict=True)},
        "log p without the update of 18.6": one["no update"].log_prob,
    }
