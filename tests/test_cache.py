"""Stored measurements: read again for equal code and arguments, measured again for others."""

from types import ModuleType

import pytest
import torch
from random_layers import seeded

from iclutils import IclError, cache, models
from iclutils.models import get_act_name

COUNT = ModuleType("count")  # what a function takes from a module is no part of the key


def note():
    COUNT.calls += 1


def draw(generator, size=2):
    note()
    return {"drawn": torch.rand(size, generator=generator)}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """The functions of this file stand for those of the package."""
    monkeypatch.setenv("ICLUTILS_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_is_ours", lambda function: function is not note)
    COUNT.calls = 0


def test_a_second_call_reads_and_leaves_the_generator_as_the_first_did(capsys):
    one, two = seeded(), seeded()
    first = cache.cached(draw, one)
    assert not capsys.readouterr().err
    second = cache.cached(draw, two)
    assert capsys.readouterr().err == "draw: read; an earlier run took 0.0 s\n"
    assert COUNT.calls == 1
    assert first["drawn"].equal(second["drawn"])
    assert one.get_state().equal(two.get_state())
    assert not two.get_state().equal(seeded().get_state())
    for other in (seeded(1), two):  # another seed; the same, further on
        cache.cached(draw, other)
    cache.cached(draw, seeded(), size=3)
    assert COUNT.calls == 4


def test_models_count_by_their_weights_and_hooks_are_refused():
    def largest(model):
        note()
        return float(model.W_E.max())

    nets = [models.load("induction-0") for _ in range(2)]
    assert len({cache.cached(largest, net) for net in nets}) == 1
    assert COUNT.calls == 1
    with torch.no_grad():
        nets[1].blocks[0].attn.W_O[0, 0, 0] += 1
    cache.cached(largest, nets[1])
    cache.cached(largest, models.load("induction-3"))
    assert COUNT.calls == 3
    nets[0].add_hook(get_act_name("z", 0), lambda z, hook: z)
    with pytest.raises(IclError, match="A model with hooks is not cached"):
        cache.cached(largest, nets[0])


def test_functions_that_are_not_the_package_s_are_computed_and_refused_as_arguments():
    cache.cached(note)
    cache.cached(note)
    assert COUNT.calls == 2
    with pytest.raises(IclError, match="code of note is not known"):
        cache.cached(draw, note)


def test_another_package_or_library_measures_again(monkeypatch):
    cache.cached(draw, seeded())
    monkeypatch.setattr(cache, "_versions", lambda: "other")
    cache.cached(draw, seeded())
    assert COUNT.calls == 2
