"""Coursework: masters score everything, stubs nothing, typical mistakes get their message."""

import ast
import importlib
import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import checks
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from grading import assignments
from random_prompts import random_prompts
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from iclutils.chapters.attention_circuits import stability
from iclutils.chapters.contrastive_kernel import dual
from iclutils.chapters.every_lens import lens_scores
from iclutils.chapters.label_anchors import saliency
from iclutils.chapters.label_anchors.isolation import cut_edges
from iclutils.chapters.ridge_ols import algorithms
from iclutils.errors import IclError

ROOT = Path(__file__).parents[2]
MASTERS = {path.stem[:4]: path for path in sorted((ROOT / "notebooks/assignments").glob("*.ipynb"))}
hw01, _, hw03, hw04, hw05, hw06, hw07 = (importlib.import_module(name) for name in MASTERS)
CHAPTER = json.loads((ROOT / "notebooks/01_gpt2_induction.ipynb").read_text("utf-8"))["cells"]
ALL = [(homework, name) for homework in MASTERS for name in checks.questions(homework)]


def master(homework):
    return json.loads(MASTERS[homework].read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


@cache
def solutions(homework):
    """What the solved master defines: its set-up, imports and solutions, without its tests."""
    names = {}
    testing = False
    for cell in master(homework):
        text = source(cell)
        testing = (testing or text == "# BEGIN TESTS") and text != "# END TESTS"
        if cell["cell_type"] == "code" and not testing and not text.startswith("checks.check"):
            exec(text, names)
            plt.close("all")
    return names


def answers(homework, question):
    """The master's; letters as a student without a name sees them."""
    asked = checks.questions(homework)[question]
    return [solutions(homework)[part.name] for part in asked]


def seen(part, letter, student=""):
    """The letter that stands before a choice for a student."""
    return "abcd"[part.order(student).index(letter)]


@pytest.mark.parametrize("homework", MASTERS)
def test_a_master_is_made_of_what_otter_and_students_need(homework):
    assert list(MASTERS) == list(assignments.masters()) == [f"hw0{i}" for i in range(1, 8)]
    cells = master(homework)
    texts = [source(cell) for cell in cells]
    assert texts[0].startswith("# ASSIGNMENT CONFIG\nname: " + homework)
    set_up = [source(c) for c in cells if "set-up" in c["metadata"].get("tags", [])]
    assert set_up == [source(c) for c in CHAPTER if "set-up" in c["metadata"].get("tags", [])]
    assert not any(cell.get("outputs") for cell in cells), "outputs would show the solution"
    assert len(checks.questions(homework)) >= 2
    for name, question in checks.questions(homework).items():
        given = ", ".join(part.name for part in question)
        begin = texts.index(next(t for t in texts if re.search(rf"^name: {name}\n", t, re.M)))
        part = texts[begin : texts.index("# END QUESTION", begin) + 2]
        points = int(re.search(r"^points: (\d+)$", part[0], re.M)[1])
        assert points % 2 == 0, "half for the public checks, half for the hidden ones"
        assert re.search(rf"\*{points} points · (warm-up|medium|hard) · \d+ minutes\*", part[1])
        tests = part[part.index("# BEGIN TESTS") + 1 : part.index("# END TESTS")]
        body = "    from checks import grade\n    grade('{}.{}', {}{})"
        assert [ast.unparse(ast.parse(text)) for text in tests] == [
            f"def test_public({given}):\n" + body.format(homework, name, given, ""),
            f"def test_hidden({given}):\n" + body.format(homework, name, given, ", hidden=True"),
        ]
        assert tests[1].startswith("# HIDDEN")
        assert ast.unparse(ast.parse(part[-1])) == f"checks.check('{homework}.{name}', {given})"


LONG = {("hw01", "q6"), ("hw02", "q6")}  # half a minute each
EVERY = [pytest.param(*each, marks=pytest.mark.nightly if each in LONG else ()) for each in ALL]


@pytest.mark.parametrize(("homework", "question"), EVERY)
def test_the_master_is_right_a_stub_is_nothing_and_mistakes_are_named(homework, question):
    """A mistake is named by the first message that a student gets, in the notebook or graded."""
    right, name = answers(homework, question), f"{homework}.{question}"
    for hidden in (False, True):
        checks.grade(name, *right, hidden=hidden)
        stubs = [(lambda *given: None) if callable(each) else ... for each in right]
        with pytest.raises(checks.Mistake, match="nothing is written yet"):
            checks.grade(name, *stubs, hidden=hidden)
    parts = checks.questions(homework)[question]
    assert sum(len(part.mistakes) for part in parts) >= 4
    assert {len(part.choices) for part in parts} <= {0, 4}
    for i, part in enumerate(parts):
        for message, made in (part.mistakes).items():
            if part.inputs:
                answer = own(checks.mistaken(part.truth, made))
            else:
                answer = made(right[i]) if callable(made) else made
                answer = seen(part, answer) if part.choices else answer
            assert message in first_mistake(name, [*right[:i], answer, *right[i + 1 :]])


@pytest.mark.parametrize(
    ("homework", "question"), [(n, q) for n, q in ALL if checks.questions(n)[q][0].verdict]
)
def test_what_a_control_draws_is_judged_again(homework, question):
    """No verdict is taken from where the answer ran; a notebook's random numbers go on."""
    (part,) = checks.questions(homework)[question]
    for forged in (1.0, [1.0, 1.0], [], "right", [[0.0]] * 9):
        with pytest.raises((checks.Mistake, TypeError, ValueError, RuntimeError, IndexError)):
            part.judge(forged, 0)
    state = torch.get_rng_state()
    part.judge(part.ask(own(part.truth), 0), 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_those_of_single_precision_whatever_the_default_is(dtype):
    (part,) = checks.questions("hw01")["q4"]
    torch.set_default_dtype(dtype)
    try:
        part.judge(part.ask(own(part.truth), 1), 1)
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def own(function):
    """As if a student had written it: the real ones stand where answers may not take from."""
    return lambda *given: function(*given)


def first_mistake(question, given):
    for hidden in (False, True):
        try:
            checks.grade(question, *given, hidden=hidden)
        except checks.Mistake as mistake:
            return str(mistake)
    return "no mistake was found"


FORMS = {
    "single": lambda v: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v,
    "numpy": lambda v: v.detach().numpy() if isinstance(v, Tensor) else np.float32(v),
    "entries": lambda v: entries(v) if isinstance(v, Tensor) else [v],
    "one more axis": lambda v: v[None] if isinstance(v, Tensor) else torch.tensor([[v]]),
}


def entries(value):
    """Lists of lists of tensors without axes."""
    return [entries(each) for each in value] if value.ndim else value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("homework", "question"), ALL)
def test_a_right_answer_is_right_in_other_forms(homework, question, form):
    """Of functions what they return, and in single precision what they are given."""
    parts, given = checks.questions(homework)[question], answers(homework, question)

    def in_form(function, name):
        theirs = {"biased_loss", "gradient_layer"} & {name}  # autograd, four matrices
        return own(function) if theirs else lambda *args: FORMS[form](function(*args))

    for i, part in enumerate(parts):
        if part.inputs:
            given[i] = in_form(given[i], part.name)
        elif not part.choices:
            given[i] = FORMS[form](given[i])
    for hidden in (False, True):
        checks.grade(f"{homework}.{question}", *given, hidden=hidden)


@pytest.mark.parametrize("homework", MASTERS)
def test_students_carry_public_checks_alone(homework, monkeypatch):
    """They say the same as the table does, and hold no solution, no hidden value."""
    monkeypatch.delitem(sys.modules, "checks")
    names = {}
    exec(assignments.carried(homework), names)
    theirs = sys.modules["checks"]
    monkeypatch.setitem(sys.modules, "checks", checks)
    public, asked = theirs.carried, checks.questions(homework)
    assert list(public) == list(asked)
    for question, parts in asked.items():
        for part, other in zip(public[question], parts, strict=True):
            assert (part.name, part.truth, part.mistakes) == (other.name, None, {})
            assert f"def {part.name}(" not in names["half"]
            if part.inputs:
                answer = own(solutions(homework)[part.name])
                part.judge(part.ask(answer, 0), 0)
                with pytest.raises(theirs.Mistake):
                    part.judge("another", 0)
            else:
                part.judge("whatever" if not part.choices else "a", 0)
    assert checks.MARK not in names["half"]


def test_a_solution_above_the_line_is_refused(tmp_path, monkeypatch):
    text = assignments.table("hw05").read_text(encoding="utf-8")
    (tmp_path / "answers").mkdir()
    moved = text.replace(checks.MARK, "") + checks.MARK
    (tmp_path / "answers" / "hw05.py").write_text(moved, encoding="utf-8")
    monkeypatch.setenv("ICLUTILS_HOMEWORK", str(tmp_path))
    with pytest.raises(IclError, match=r"has the solution .*part_and_change.* above the line"):
        assignments.carried("hw05")


def choices(homework):
    parts = [part for asked in checks.questions(homework).values() for part in asked]
    return [part for part in parts if part.choices]


def test_choices_come_in_another_order_for_each_student(capsys, monkeypatch):
    """The right letter is any of the four, and that of one student is wrong for others."""
    monkeypatch.setattr(checks, "signed", ["Ada"])
    for homework in MASTERS:
        for part in choices(homework):
            letters = [seen(part, part.truth, f"student {i}") for i in range(80)]
            assert min(letters.count(letter) for letter in "abcd") >= 8
            part.judge(seen(part, part.truth, " ADA "), 1, "Ada")
            other = next(letter for letter in "abcd" if letter != seen(part, part.truth, "Ada"))
            with pytest.raises(checks.Mistake):
                part.judge(other, 1, "Ada")
    checks.choose("hw05.q4")
    (part,) = choices("hw05")
    shown = " ".join(capsys.readouterr().out.split())
    places = [shown.index(f"{letter} {part.choices['abcd'.index(order)]}")
              for letter, order in zip("abcd", part.order("Ada"), strict=True)]  # fmt: skip
    assert places == sorted(places)


@pytest.mark.parametrize("homework", MASTERS)
def test_each_homework_has_something_of_the_student_a_figure_and_a_control(homework):
    """What is right for one student is not right for another; torch's default changes nothing."""
    parts = [part for asked in checks.questions(homework).values() for part in asked]
    own = [part for part in parts if not part.inputs and callable(part.truth)]
    assert own
    differ = 0
    for part in own:
        torch.set_default_dtype(torch.float64)
        theirs = part.truth(checks.number("Ada"))
        torch.set_default_dtype(torch.float32)
        part.judge(theirs, 1, "Ada")
        try:
            part.judge(part.truth(checks.number("Bo")), 1, "Ada")
        except checks.Mistake:
            differ += 1
    assert differ, "no number tells Ada from Bo"
    text = "\n".join(source(cell) for cell in master(homework))
    assert text.count("**Read the figure**") == 1
    assert text.count("Design a control") == 1
    assert "plt.show()" in text
    assert 'student = ""' in text


# Solutions, against what the package or a library gives for the same inputs


def prompts(places, target):
    """Of 14 tokens; they and the classes mean nothing."""
    tokens = torch.zeros(len(places), 14).long()
    at = {"target": target, "label_pos": places, "cue_pos": places, "demo_class": places}
    return replace(random_prompts(count=len(places)), tokens=tokens, roles=tokens, **at)


def step_by_autograd(W0, xs, ys, query, A):
    W = W0.clone().requires_grad_()
    loss = (xs @ W.T - ys).square().sum() / (2 * len(xs))
    return (W - torch.autograd.grad(loss, W)[0] @ A).detach() @ query


def saliency_by_autograd(attention, written, gradient):
    a = attention.clone().requires_grad_()
    ((a @ written).sum(1) * gradient).sum().backward()
    return (a * a.grad).sum(1).abs().detach()


def examples_left_out(query, keys, values, example):
    """The parts as the package has them; the changes by attention to the other keys."""

    def head(keep):
        return scaled_dot_product_attention(query[None], keys[keep], values[keep])[0]

    its = [example == i for i in range(int(example.max()) + 1)]
    parts = [dual.dual_form(query[None], keys, values, each)[1][0] for each in its]
    return torch.stack(
        [torch.stack(parts), torch.stack([head(example > -2) - head(~each) for each in its])]
    )


def with_negatives(query, keys, values, demos, beta):
    changed = values.clone()
    for i in demos.nonzero()[:, 0]:
        others = demos & (torch.arange(len(demos)) != i)
        changed[i] -= beta * values[others].mean(0)
    return scaled_dot_product_attention(query[None], keys, changed)[0]


def root(gram):
    """Activations with these inner products."""
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp(min=0).sqrt()


def bayes(noise, prior):
    kernel = ConstantKernel(prior**2, "fixed") * DotProduct(0.0, "fixed")
    return GaussianProcessRegressor(kernel, alpha=noise.numpy() ** 2)


def isolated(scores, places):
    cut = cut_edges(prompts(places, places[:, 0])) | torch.ones(14, 14).triu(1).bool()
    return scores.masked_fill(cut[:, None], -torch.inf).softmax(-1)


def shared_heads(a, b, top):
    layer = torch.arange(len(a)).repeat_interleave(a.shape[1])
    return stability.overlap_excess(*(stability.top(x.flatten(), top) for x in (a, b)), layer)


TRUTHS = {
    "hw02.saliency": saliency_by_autograd,
    "hw02.flow": lambda s, *at: saliency.flow(s[:, None], prompts(*at)).mean[:, 0],
    "hw02.isolated": isolated,
    "hw02.auc": lambda scores, predicted: roc_auc_score(predicted, scores),
    "hw03.weighted_ridge": lambda X, y, a, c, w: (
        Ridge(alpha=c, fit_intercept=False).fit(X, y - X @ w, a).coef_ + w.numpy()
    ),
    "hw03.least_squares": algorithms.ols,
    "hw03.bayes_weights": lambda X, y, *sd: bayes(*sd).fit(X, y).predict(np.eye(4)),
    "hw03.expected_error": lambda X, x, noise, prior, new: (
        bayes(noise, prior).fit(X, X[:, 0]).predict(x[None], True)[1].item() ** 2 + new**2
    ),
    "hw04.one_step": step_by_autograd,
    "hw05.part_and_change": examples_left_out,
    "hw05.with_negatives": with_negatives,
    "hw06.cka": lambda x, y: stability.cka(root(x)[None], root(y)[None]).item(),
    "hw07.beyond_chance": shared_heads,
    "hw07.smooth": lambda query, keys, shows, choices: scaled_dot_product_attention(
        query[None], keys, torch.eye(choices).double()[shows]
    )[0],
    "hw07.common_share": lens_scores.common_share,
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_solution_gives_what_the_package_or_a_library_does(name):
    homework, _, solution = name.partition(".")
    parts = (part for parts in checks.questions(homework).values() for part in parts)
    (entry,) = (part for part in parts if part.name == solution)
    for seed in (0, 1, 2):
        given = entry.inputs(seed)
        checks.compare(entry.truth(*given), TRUTHS[name](*given), {})


def test_two_layers_of_homework_4_take_two_steps():
    W0, xs, ys, query, A = hw04._regression(1)
    tokens = torch.cat([torch.cat([ys, xs], 1), torch.cat([-W0 @ query, query])[None]])
    W = W0
    for _ in range(2):  # the second layer goes on
        tokens = hw04.attend(tokens, *hw04.gradient_layer(W0, A, len(xs)))
        W = W - (xs @ W.T - ys).T @ xs @ A / len(xs)
        torch.testing.assert_close(-tokens[-1, : len(W0)], W @ query)


def test_rates_of_homework_4_are_best_among_many_contexts():
    """The least-squares fit of w to b, by coordinate, is what the formula approaches."""
    draw, pairs, noise = checks.generator(5), 4, 0.3
    sides, prior = torch.tensor([1.0, 2.0]).double(), torch.tensor([2.0, 0.5]).double()
    xs = sides * (torch.rand(200_000, pairs, 2, generator=draw).double() - 0.5)
    w = checks.normal(draw, 200_000, 2) * prior.sqrt()
    ys = (xs * w[:, None]).sum(-1) + noise**0.5 * checks.normal(draw, 200_000, pairs)
    b = (ys[..., None] * xs).mean(1)
    fitted = (w * b).mean(0) / b.square().mean(0)
    found = hw04.best_rates(sides**2 / 12, sides**4 / 80, prior, noise, pairs)
    torch.testing.assert_close(found, fitted, rtol=0.03, atol=0)


def test_a_step_on_the_loss_of_homework_5_is_linear_attention_to_the_keys():
    W, values, f, biases, total, rate = hw05._dual(1)
    after = hw05._step_taken(hw05.biased_loss, W, values, f, biases, total, rate)[:2]
    weights = biases.exp() * (f @ f[-1]) / total
    torch.testing.assert_close(after, W @ f[-1] + weights @ values)


def test_patching_in_homework_6_is_a_run_of_two_copies_of_a_model():
    nodes, clean, corrupt = hw06._network(1)

    def forked(writer, reader):
        """One node reads a second copy of another, by recursion."""

        @cache
        def reads(node, patched):
            stream = clean if patched else corrupt
            for before in range(node):
                foreign = patched and (before, node) == (writer, reader)
                stream = stream + writes(before, patched and not foreign)
            return stream

        @cache
        def writes(node, patched):
            return nodes[node](reads(node, patched))

        return reads(len(nodes), True)

    for edge in ((0, 1), (1, 3), (2, len(nodes))):
        found = hw06.patched(nodes, clean, corrupt, *edge)
        torch.testing.assert_close(found, forked(*edge))


def test_a_circuit_with_a_back_up_outside_is_not_complete():
    """Wang et al. 2022, section 4: the circuit alone, and the model without it, score as the whole
    does; without both heads of the circuit the back-up goes on."""

    def any_head(some):
        return float(len(some) > 0)

    def head_0(some):
        return float(0 in some)

    assert hw06.incompleteness(any_head, [0, 1], [0, 1, 2]) == 1.0
    assert hw06.incompleteness(head_0, [0, 1], [0, 1, 2]) == 0.0
    assert hw06.minimality(any_head, [0, 1]).tolist() == [1.0, 1.0]
    assert hw06.minimality(head_0, [0, 1]).tolist() == [1.0, 0.0]


def _imports(pattern, tokens):
    from iclutils.interp.head_scores import olsson_prefix_matching

    return olsson_prefix_matching(pattern, tokens)


@pytest.mark.parametrize(
    ("question", "given", "message"),
    [
        ("hw01.q2", [3], "should be a function; it is a int"),
        ("hw01.q4", [_imports], "Write it yourself"),
        ("hw05.q4", [own(hw05.with_negatives), 0.5, "because"], "one of the letters"),
        ("hw04.q2", [own(hw04.attend), lambda W0, rate, pairs: W0], "returns four matrices"),
        ("hw05.q2", [own(hw05.features), lambda *given: 1.0], r"no \.item\(\), no detach"),
    ],
)
def test_answers_of_a_wrong_kind(question, given, message):
    with pytest.raises(checks.Mistake, match=message):
        checks.grade(question, *given)


@pytest.mark.parametrize(
    ("got", "truth", "message"),
    [
        (torch.zeros(2), torch.zeros(3), r"shape \(3,\); got \(2,\)"),
        (torch.tensor([torch.nan]), torch.ones(1), "NaN"),
        (["a"], torch.ones(1), "Expected a number or a tensor; got a list"),
        (torch.ones(1) + 1j, torch.ones(1), "got a complex tensor"),
        ("b", "a", "not the right answer"),
        (torch.ones(2).double() + 1e-7, torch.ones(2), ""),
        (torch.tensor(2.0), 2.0, ""),
    ],
)
def test_what_is_wrong_is_said(got, truth, message):
    if not message:
        return checks.compare(got, truth, {"never": got})
    with pytest.raises(checks.Mistake, match=message):
        checks.compare(got, truth, {"gives the truth by chance": truth})
