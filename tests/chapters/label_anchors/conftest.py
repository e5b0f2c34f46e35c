"""The models that most measurements of this chapter are tested on."""

from __future__ import annotations

import pytest
from tiny import tiny_gpt2

from iclutils.models import TransformerBridge


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    """Learned positions, and a context long enough for every random prompt."""
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"), n_positions=128)


@pytest.fixture(params=["gpt2", "neox", "llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    """Each whose attention can be edited."""
    return request.getfixturevalue(request.param)
