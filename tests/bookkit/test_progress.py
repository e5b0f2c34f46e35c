"""What takes long shows how far it is; what is to be quiet shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tokens

from iclutils import progress
from iclutils.chapters.circuits import depth
from iclutils.interp import clean_corrupt, graph, patching


def task(model: Any) -> clean_corrupt.CleanCorrupt:
    return clean_corrupt.copying(model, 6, 2, torch.Generator().manual_seed(0))


LONG: dict[str, Callable[[Any], object]] = {
    "layers": lambda m: patching.head_ablation_sweep(m, tokens(1, 8), torch.arange(3, 6)),
    "sets": lambda m: patching.ablate(m, task(m), [[graph.head(0, 0)], [graph.head(0, 1)]]),
    "depths": lambda m: depth.lens(m, task(m)),
}


@pytest.mark.parametrize("what", LONG)
def test_a_lens_shows_how_far_it_is(
    what: str, gpt2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.delenv("ICLUTILS_QUIET")
    LONG[what](gpt2)
    assert f"{what}:" in capsys.readouterr().err


def test_a_bar_appears_where_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert list(progress.bar([1, 2], "things")) == [1, 2]
    assert capsys.readouterr().err == "", "all is quiet here"
    monkeypatch.delenv("ICLUTILS_QUIET")
    assert list(progress.bar([1, 2], "things")) == [1, 2]
    assert "things" in capsys.readouterr().err
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    assert list(progress.bar([1, 2], "things")) == [1, 2]
    assert capsys.readouterr().err == "", "short work shows none"
