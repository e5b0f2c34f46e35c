"""Small models that the tests of this chapter share; none of them changes one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import load, save_gptj
from wired import save_wired

from iclutils.models import TransformerBridge


@pytest.fixture(params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def wired(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    """Head 0.0 writes the previous token, 1.0 is an induction head, the others are idle."""
    folder = tmp_path_factory.mktemp("wired")
    save_wired(folder)
    return load(folder)


@pytest.fixture
def gptj(tmp_path: Path) -> TransformerBridge:
    """A model whose attention can be read, but not edited."""
    save_gptj(tmp_path / "gptj")
    return load(tmp_path / "gptj")
