"""What the benchmarks share: the shape of GPT-2 small, options, and ways that take turns."""

import tempfile
import time
from argparse import ArgumentParser
from typing import TypeVar

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from iclutils.models import load

T = TypeVar("T")


def gpt2_small(layers=12):
    """GPT-2 small with random weights, through a folder, as a reader's model would come."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(GPT2Config(n_layer=layers)).save_pretrained(folder)
        return load(folder)


def options(about, **defaults):
    """The command line: ``name=(default, help)``, and the number of threads of torch."""
    parser = ArgumentParser(description=about)
    for name, (default, what) in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=what)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return given


def in_turns(ways, repeats):
    """Seconds of each way in every turn."""
    seconds = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def timed(call):
    """What a call gives, and its CPU seconds of all threads."""
    began = time.process_time()
    return call(), time.process_time() - began
