"""The models that most lenses of this chapter are tested on."""

from __future__ import annotations

import pytest

from iclutils.models import TransformerBridge


@pytest.fixture(params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return request.getfixturevalue(request.param)
