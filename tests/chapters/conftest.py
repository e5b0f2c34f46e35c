"""Small models that the tests of several chapters share; none of them changes one."""

from functools import partial

import pytest
from tiny import load, save_gptj, save_grouped
from wired import save_wired


def made(save):
    @pytest.fixture(scope="session")
    def model(tmp_path_factory):
        folder = tmp_path_factory.mktemp("model")
        save(folder)
        return load(folder)

    return model


gptj = made(save_gptj)  # its attention can be read, but not edited
llama = made(save_grouped)  # heads that share keys and values, gated layers
qwen2 = made(partial(save_grouped, kind="qwen2"))  # and biases of queries, keys and values
wired = made(save_wired)  # 0.0 writes the previous token, 1.0 is an induction head; 0.1, 1.1 idle
