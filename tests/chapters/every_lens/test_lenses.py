"""The lenses of chapter 07: against plain passes, libraries and sums that must come out."""

import pytest
import torch

from iclutils import models
from iclutils.chapters.every_lens import compare, lens_scores
from iclutils.chapters.every_lens.question import of_prompts
from iclutils.interp import removal
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
    return lens_scores.measure(net, here, layer=2, steps=1)


def at_target(net, here, name):
    """What the target holds with the examples, less without."""
    bare, end = here.bare
    sides = (here.task.clean, here.at), (bare, end)
    first, second = (
        net.run_with_cache(tokens, names_filter=name)[1][name][torch.arange(len(here)), at]
        for tokens, at in sides
    )
    return first - second


def test_heads_and_mlps_write_the_whole_vector(net, here, found):
    """All but what the embedding of another position adds."""
    common = found.u[2]
    others = sum(at_target(net, here, get_act_name("mlp_out", layer)) for layer in range(3))
    others = others + at_target(net, here, get_act_name("resid_pre", 0))
    share = others @ common / common.square().sum()
    assert torch.allclose(found.vector.sum((1, 2)).mean() + share.mean(), torch.ones(()), atol=1e-3)
    assert not found.vector[:, 3].any()
    assert torch.allclose(
        found.writes[2].sum(0), at_target(net, here, get_act_name("attn_out", 2)).mean(0), atol=1e-4
    )


def test_the_difference_of_two_states_in_the_last_layer_makes_one_answer_the_other(net, here):
    one = here[:1]
    u = lens_scores.measure(net, one, layer=2, steps=1).u
    said = compare.add_at_target(net, one, [(3, u[3]), (3, 0 * u[3])])
    sides = compare.outcomes(net, one, one.shuffle(torch.Generator().manual_seed(0)))
    assert torch.allclose(said.margin[0], sides["examples"].margin, atol=1e-2)
    assert torch.equal(said.right[0], sides["examples"].right)
    assert torch.allclose(said.p[1], sides["none"].p, atol=1e-5)
    random = compare.random_like(u[3], torch.Generator().manual_seed(0))
    assert torch.isclose(random.norm(), u[3].norm())


def test_sets_to_remove_part_the_marked_heads_and_controls_are_others_of_their_layers():
    layer = torch.arange(6).repeat_interleave(10)
    top = {"circuit": {0, 1, 2}, "anchors": {1, 2, 3, 12}, "induction": {2, 12, 13}, "vector": {12}}
    sets = compare.sets_to_remove(top)
    assert sets["match and read"] == {2, 12}
    assert (sets["match only"], sets["read only"]) == ({13}, {1, 3})
    assert (sets["match, not vector"], sets["vector, not match"]) == ({2, 13}, set())
    assert sets[compare.EITHER] == set().union(*(sets[k] for k in compare.GROUPS))
    for heads in sets.values():
        for others in compare.redraw(heads, 10, 3, torch.Generator().manual_seed(0)):
            assert sorted(layer[sorted(others)].tolist()) == sorted(layer[sorted(heads)].tolist())
            assert not others & heads


def test_controls_hold_no_head_of_the_lists_that_are_compared(net):
    top = {"circuit": {4}, "anchors": {1, 4, 5, 12}, "induction": {2, 5, 12, 13}, "vector": {6, 12}}
    sets = compare.sets_to_remove(top)
    assert sets[compare.BOTH] == {5, 12}
    width, controls = 4, compare.controls(sets, net, 7, torch.Generator().manual_seed(0))
    for name, rows in controls.items():
        lists = top["induction"] | top["vector" if "vector" in name else "anchors"] | sets[name]
        for drawn in rows:
            others = {layer * width + head for layer, head in drawn}
            assert len(drawn) == len(others) == len(sets[name])
            assert not others & lists


def put_at_target(here, heads, values):
    """Make a hook of z: some heads, by their number, write their values at the target."""

    def put(z, hook):
        z, layer = z.clone(), hook.layer()
        for head in (i % 4 for i in heads if i // 4 == layer):
            z[torch.arange(len(here)), here.at, head] = values[layer, head]
        return z

    return put


def test_heads_removed_at_the_target_are_removed_nowhere_else(net, here):
    """Against whole runs in which the mean stands at one place."""
    means = removal.head_means(net, here.task.clean)
    sets = [frozenset({1, 5, 6}), frozenset()]
    got = compare.without_at_target(net, here, sets, removal.mean_over([means], "these"))

    hooks = [(get_act_name("z", la), put_at_target(here, sets[0], means)) for la in (0, 1)]
    for row, hooked in enumerate((hooks, [])):
        expected = here.outcome(logits_at(net, here.task.clean, here.task.at, hooked)[:, 0])
        assert torch.allclose(got.p[row], expected.p, atol=1e-5)
        assert torch.allclose(got.margin[row], expected.margin, atol=1e-4)


def test_the_vector_without_heads_is_that_of_a_run_without_them(net, here, found):
    means = compare.means_at_target(net, here)
    z = get_act_name("z", 1)
    _, cache = net.run_with_cache(here.task.clean, names_filter=z)
    assert torch.allclose(means[1], cache[z][torch.arange(len(here)), here.at].mean(0), atol=1e-5)
    new = removal.mean_over([0 * means], "nothing")
    whole = compare.vector_without(net, here, frozenset(), new, 2)
    assert torch.allclose(whole.cpu(), found.u[2], atol=1e-4)
    heads, name, states = frozenset(range(4, 8)), get_act_name("resid_post", 1), []  # of layer 1
    silence = z, put_at_target(here, heads, 0 * means)
    for tokens, at, hooks in ((here.task.clean, here.at, [silence]), (*here.bare, [])):
        keep = (name, lambda x, hook, at=at: states.append(x[torch.arange(len(here)), at].mean(0)))
        net.run_with_hooks(tokens, fwd_hooks=[*hooks, keep])
    got = compare.vector_without(net, here, heads, new, 1)
    assert torch.allclose(states[0] - states[1], got, atol=1e-4)


def test_heads_of_the_same_size_are_the_nearest_and_no_head_comes_twice():
    sizes = torch.tensor([9.0, 8.0, 5.0, 4.0, 3.0, 7.5, 0.0])
    found = compare.as_large(frozenset({0, 1}), sizes, {0, 1, 3})
    assert found == {5, 2}  # 9 takes 7.5, then 8 takes 5
    assert compare.as_large(frozenset({1}), sizes, {1}) == {5}
    assert compare.as_large(frozenset({0, 1}), sizes, {*range(6)}) == {6}, "no other is left"


def test_common_shares_are_those_of_pairs():
    one, two = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    pairs = [one[a] @ one[b] for a in range(4) for b in range(4) if a != b]
    mean_square = one.square().sum(1).mean()
    wanted = float(sum(pairs) / 12 / mean_square)
    assert lens_scores.common_share(one) == pytest.approx(wanted, abs=1e-6)
    cross = sum(a @ b for a in one for b in two) / 16
    size = (mean_square * two.square().sum(1).mean()).sqrt()
    assert lens_scores.common_share(one, two) == pytest.approx(float(cross / size), abs=1e-6)
