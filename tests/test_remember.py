"""What is measured once is kept, by all that it depends on, and whatever happens to the disk."""

import errno
import gzip
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import iclutils
from iclutils import models, remember, science
from iclutils.errors import IclError
from iclutils.interp import head_scores
from iclutils.tasks import generator, repeated

Remember = Callable[..., Any]
DRAW = repeated.RepeatedTokens.draw


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """``remember`` with a cache of its own, which speaks."""
    monkeypatch.setenv("ICLUTILS_CACHE", str(tmp_path))
    monkeypatch.delenv("ICLUTILS_QUIET", raising=False)
    return remember.remember


def entries():
    return sorted(remember.folder().glob("*.gz"))


def draw(seed=0):
    return 3, 5, 100, 0, generator("test", 0, seed)


def refuse(*_, **__):
    raise AssertionError("measured again")


def test_a_second_time_is_not_measured_and_leaves_the_generator_where_the_first_did(
    kept, monkeypatch
):
    first, again = draw(), draw()
    found = kept(DRAW, *first)
    monkeypatch.setattr(torch, "randint", refuse)
    monkeypatch.setattr(torch, "randperm", refuse)
    assert torch.equal(kept(DRAW, *again).tokens, found.tokens)
    assert torch.equal(first[-1].get_state(), again[-1].get_state())
    assert len(entries()) == 1


def test_another_argument_model_or_code_is_another_measurement(kept, monkeypatch):
    tokens = torch.tensor([[0, *range(1, 11), *range(1, 11)]])
    for name in ("induction-0", "induction-0", "induction-3"):
        kept(head_scores.score_heads, models.load(name), tokens, 10)
    assert len(entries()) == 2, "a model is its weights"
    model = models.load("induction-0")
    kept(head_scores.score_heads, model, tokens + 1, 10)
    kept(head_scores.score_heads, model, tokens.T.contiguous().T, 10)  # other strides
    assert len(entries()) == 3
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    kept(head_scores.score_heads, model, tokens, 10)
    assert len(entries()) == 4
    monkeypatch.setattr(science, "of_definition", lambda *_: {"score_heads": "another"})
    kept(head_scores.score_heads, model, tokens, 10)
    assert len(entries()) == 5


def test_a_function_of_a_notebook_is_its_source_and_the_values_that_it_takes(kept, tmp_path):
    def run(source, **around):
        path = tmp_path / f"cell_{len(list(tmp_path.iterdir()))}.py"  # as IPython keeps its cells
        path.write_text(source)
        space = {"__name__": "__main__", "head_scores": head_scores, **around}
        exec(compile(source, path, "exec"), space)
        return kept(space["scaled"], 2), len(entries())

    cell = "def scaled(x):\n    return [weight * x + shift() for _ in 'a']\n"
    shift = "def shift():\n    return 1\n"
    assert run(shift + cell, weight=3) == ([7], 1)
    assert run(shift + cell.replace("x", "y"), weight=3) == ([7], 2)  # callers may name arguments
    assert run(f"# Said.\n{shift}{cell}", weight=3) == ([7], 2)
    assert run(shift + cell, weight=4) == ([9], 3)
    assert run(shift.replace("1", "2") + cell, weight=3) == ([8], 4)
    seeded = "def scaled(x):\n    return book.seed * x\n"
    for seed in (1, 2):
        assert run(seeded, book=iclutils.begin(seed=seed)) == (2 * seed, 4 + seed)
    with pytest.raises(IclError, match="scaled draws from weight, so that would be left as it is"):
        run(shift + cell, weight=torch.Generator())


@pytest.mark.parametrize(
    "harm",
    [
        lambda whole: b"no gzip",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[: (k := len(whole) // 2)] + bytes([whole[k] ^ 1]) + whole[k + 1 :],
    ],
)
def test_a_damaged_entry_is_measured_again_and_said(kept, capsys, harm):
    found = kept(DRAW, *draw())
    (path,) = entries()
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(harm(path.read_bytes()))
    assert torch.equal(kept(DRAW, *draw()).tokens, found.tokens)
    assert "is damaged; measuring again" in capsys.readouterr().out
    assert gzip.decompress(path.read_bytes()) == whole


def test_a_full_disk_keeps_nothing_and_goes_on(kept, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(remember.gzip, "open", full)
    assert kept(DRAW, *draw()).tokens.shape == (3, 11)
    assert "No space left on device); going on without" in capsys.readouterr().out
    assert not list(remember.folder().iterdir())


def test_what_cannot_be_known_is_refused(kept):
    model = models.load("induction-0")
    with pytest.raises(IclError, match=r"The code of .* cannot be read, .* write it as a function"):
        kept(eval("lambda: 1"))
    with pytest.raises(IclError, match=r"The code of len cannot be read"):
        kept(len, "abc")
    hooks = [("blocks.0.attn.hook_pattern", lambda value, hook: value)]
    with model.hooks(fwd_hooks=hooks), pytest.raises(IclError, match="A model with hooks"):
        kept(head_scores.score_heads, model, torch.ones(1, 21, dtype=torch.long), 10)


def test_the_mini_tier_just_calls(kept):
    assert iclutils.begin().remember(len, "abc") == 3
    with pytest.raises(IclError, match="cannot be read"):
        iclutils.begin("real", device="cpu").remember(len, "abc")
    assert not remember.folder().exists()
