"""The models that most measurements of this chapter are tested on."""

import pytest
from tiny import tiny_gpt2


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"), n_positions=128)


@pytest.fixture(params=["gpt2", "neox", "llama", "qwen2"])
def model(request):
    return request.getfixturevalue(request.param)
