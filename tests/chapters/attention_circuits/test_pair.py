"""The induction pair: found wherever it is wired, paths against hooks, the rule by brute force."""

import pytest
from random_layers import seeded
from tiny import save_grouped
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.attention_circuits import pair
from iclutils.interp import clean_corrupt
from iclutils.interp.graph import Node, all_heads, head
from iclutils.models import load

PLACES = [((0, 0), (1, 1), 2), ((0, 1), (2, 0), 3), ((1, 0), (2, 1), 3)]
LENGTH = 11


def copying(model, count=8, length=LENGTH):
    return clean_corrupt.copying(model, count, length, seeded())


@pytest.mark.parametrize(("previous", "induction", "layers"), PLACES)
def test_wired_pair_is_found(tmp_path, previous, induction, layers):
    """Catches heads in another order, a path into queries or values, and a wrong distance."""
    save_wired(tmp_path, (previous,), (induction,), layers)
    model = load(tmp_path)
    task = copying(model)
    found = pair.find_induction_circuit(model, task)
    assert (found.previous, found.induction) == (head(*previous), head(*induction))
    assert found.edges == ((head(*previous), Node("k", *induction)),)
    assert found.matchers == [found.induction]
    assert found.layer_distance == induction[0] - previous[0]
    assert found.drop.mean() > 0.9
    drops = pair.path_drops(model, task, [found.induction]).mean(-1)[:, 0]
    idle = [i for i, node in enumerate(all_heads(model)) if node != found.previous]
    assert drops[idle].abs().max() < 1e-3


def test_back_ups_share_the_edges(tmp_path):
    """Two heads per role: single paths are weak, and all of them are found."""
    save_wired(tmp_path, ((0, 0), (0, 1)), ((1, 0), (1, 2)), heads=3)
    model = load(tmp_path)
    found = pair.find_induction_circuit(model, copying(model))
    keys = {(u, v) for u in (head(0, 0), head(0, 1)) for v in (Node("k", 1, 0), Node("k", 1, 2))}
    assert set(found.edges) == keys
    assert found.matchers == [head(1, 0), head(1, 2)]
    assert found.drop.mean() < 0.5


def test_a_model_that_cannot_see_the_earlier_copy_is_refused(tmp_path):
    """Its prefix scores are all 0; so would be the layer of the best head."""
    save_grouped(tmp_path, kind="mistral", sliding_window=4)
    model = load(tmp_path)
    with pytest.raises(IclError, match=r"Head 1\.0 never attends .* a sliding window, use shorter"):
        pair.find_induction_circuit(model, copying(model))
