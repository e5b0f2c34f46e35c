"""The lenses of chapter 07: against plain passes, libraries and sums that must come out."""

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge

from iclutils import models
from iclutils.chapters.contrastive_kernel.heads import dual_heads
from iclutils.chapters.every_lens import compare, marks, smoothers, vectors
from iclutils.chapters.every_lens.question import of_prompts
from iclutils.interp.at_query import read
from iclutils.interp.hooks import logits_at
from iclutils.models import get_act_name
from iclutils.tasks import topics


@pytest.fixture(scope="module")
def net():
    return models.load("anchors-0")


@pytest.fixture(scope="module")
def here():
    return of_prompts(topics.sample(6, torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def found(net, here):
    return marks.measure(net, here, layer=2, steps=1)


def at_target(net, here, side, name):
    _, cache = net.run_with_cache(getattr(here.task, side), names_filter=name)
    return cache[name][torch.arange(len(here)), here.at]


def test_heads_and_mlps_write_the_whole_vector(net, here, found):
    common = found.states[:, 2].mean(0)
    mlps = sum(
        at_target(net, here, "clean", get_act_name("mlp_out", layer))
        - at_target(net, here, "corrupt", get_act_name("mlp_out", layer))
        for layer in range(3)
    )
    share = mlps @ common / common.square().sum()
    assert torch.allclose(found.vector.sum((1, 2)).mean() + share.mean(), torch.ones(()), atol=1e-3)
    assert not found.vector[:, 3].any()


def test_a_step_towards_a_vector_is_what_the_dual_model_writes_along_it(net, here):
    query, vector = read(net, here.task.clean, here.at), torch.randn(net.cfg.d_model)
    update = dual_heads(query, here.shown).demonstration_update
    written = torch.einsum("blhe,lhed->blhd", update, net.W_O.double()) @ vector.double()
    step = marks.step_towards(query, here, vector)
    assert torch.allclose(step.sum(-1), written / vector.double().square().sum(), atol=1e-9)


def test_the_difference_of_two_states_in_the_last_layer_makes_one_answer_the_other(net, here):
    one = here[:1]
    states, _ = vectors.task_vectors(net, one)
    margins, right = vectors.steered(net, one, [(3, states[3]), (3, 0 * states[3])])
    whole, sure = marks.answered(net, one)
    tokens, target = one.without(range(4))
    bare = logits_at(net, tokens, target[:, None])[:, 0]
    assert torch.allclose(margins[0], whole, atol=1e-2)
    assert torch.equal(right[0], sure)
    assert torch.allclose(margins[1], one.margin(bare), atol=1e-3)
    random = vectors.random_like(states[3], torch.Generator().manual_seed(0))
    assert torch.isclose(random.norm(), states[3].norm())


def test_smoothers_are_those_of_the_textbooks():
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(3, 6, 4, generator=draw, dtype=torch.double)
    labels = torch.randn(3, 5, generator=draw, dtype=torch.double)
    for name, rule in smoothers.SMOOTHERS.items():
        said = (rule(states) * labels).sum(1)
        for row, value in enumerate(said.tolist()):
            x, query, y = states[row, :-1].numpy(), states[row, -1:].numpy(), labels[row].numpy()
            gram = x @ x.T
            angle = (x @ query[0]) / np.linalg.norm(x, axis=1)
            expected = {
                "count": y.sum(),
                "last example": y[-1],
                "nearest example": y[angle.argmax()],
                "ridge on states": KernelRidge(
                    alpha=smoothers.RIDGE * gram.diagonal().mean(), kernel="linear"
                ).fit(x, y).predict(query)[0],
                "one gradient step": (x.T @ y) @ query[0],
            }  # fmt: skip
            assert value == pytest.approx(expected[name]), name


def test_sets_to_remove_part_the_marked_heads_and_their_controls_are_unmarked():
    layer = torch.arange(6).repeat_interleave(10)
    top = {"circuit": {0, 1, 2}, "anchors": {1, 2, 3, 12}, "induction": {2, 12, 13}}
    sets = compare.sets_to_remove(top, layer, torch.Generator().manual_seed(0))
    assert sets["both"] == {2, 12}
    assert (sets["matchers only"], sets["readers only"]) == ({13}, {1, 3})
    assert (sets["circuit only"], sets["no circuit"]) == ({0}, {3, 12})
    for name, heads in sets.items():
        own = sets[name.split(",")[0]]
        assert sorted(layer[sorted(heads)].tolist()) == sorted(layer[sorted(own)].tolist())
        if "others" in name:
            assert not heads & {0, 1, 2, 3, 12, 13}
