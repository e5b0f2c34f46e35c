"""Recipes of seconds: the real loop on very small models."""

from dataclasses import replace

import torch
from transformers import GPT2Config

from iclutils.files import sha256
from iclutils.models import lsa as lsa_models
from iclutils.models import regressors
from iclutils.tasks.functions import Problem
from iclutils.tasks.regression import Task
from training import language, lsa, regression


def gpt2(steps=12):
    def sample(step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 20, (4, 9), generator=generator)
        return language.Batch(tokens, torch.arange(8).expand(4, 8))

    def measure(network):
        return {"bias": network.transformer.ln_f.bias.sum().item()}

    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    about = {"config": GPT2Config(**sizes, bos_token_id=19), "batch": sample, "measure": measure}
    about |= {"steps": steps, "checkpoints": (0, steps // 2, steps), "warmup": 2, "log_every": 4}
    return language.LanguageRecipe(name="small", seed=0, sinusoidal=False, **about)


def regressor(name="plain", steps=12, members=slice(2)):
    """By its name deeper, noisier or wider than the plain one."""
    width, layers = 16 if name == "wide" else 8, 2 if name == "deep" else 1
    shape = regressors.Shape(2, 5, "one", layers, width, 2)
    tasks = [(0, Task(2)), (5, Task(2, noise=2.0 if name == "noisy" else 0.0))][members]
    made = regression.RegressionRecipe.of(name, "cpu", shape, tasks, steps=steps, warmup=1)
    return replace(made, clip=0.05)


def linear(name="linear", steps=12, members=slice(2)):
    tasks = [(0, Problem(Task(2))), (5, Problem(Task(2, noise=2.0)))][members]
    shape, more = lsa_models.Shape(2, 3), {"steps": steps, "extra": (0,), "batch": 32}
    made = lsa.LsaRecipe.of(name, "cpu", shape, tasks, **more)
    return replace(made, log_every=4)


def digests(folder):
    found = sorted(folder.rglob("*.safetensors"))
    return {path.relative_to(folder).as_posix(): sha256(path) for path in found}
