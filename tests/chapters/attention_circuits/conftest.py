"""The models that most lenses of this chapter are tested on."""

import pytest


@pytest.fixture(params=["gpt2", "neox"])
def model(request):
    return request.getfixturevalue(request.param)
