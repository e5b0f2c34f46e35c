"""Small random models that the tests of this chapter share; none of them changes one."""

from __future__ import annotations

import pytest
from tiny import load, save_gptj, save_grouped, save_neox, tiny_gpt2

from iclutils.models import TransformerBridge


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    """Learned positions, and a context long enough for every random prompt."""
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"), n_positions=128)


@pytest.fixture(scope="session")
def neox(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    """Rotary positions."""
    folder = tmp_path_factory.mktemp("neox")
    save_neox(folder)
    return load(folder)


@pytest.fixture(scope="session")
def gptj(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    """A model whose attention can be read, but not edited."""
    folder = tmp_path_factory.mktemp("gptj")
    save_gptj(folder)
    return load(folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    """Heads that share keys and values, gated layers."""
    folder = tmp_path_factory.mktemp("llama")
    save_grouped(folder)
    return load(folder)


@pytest.fixture(params=["gpt2", "neox", "llama"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    """Each of those whose attention can be edited."""
    return request.getfixturevalue(request.param)
