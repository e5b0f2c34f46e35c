"""Recipes of seconds: the real loop on very small models."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import GPT2Config

from iclutils.files import sha256
from iclutils.models import lsa as lsa_models
from iclutils.models import regressors
from iclutils.tasks.functions import Problem
from iclutils.tasks.regression import Task
from iclutils.zoo.recipes import language, lsa, regression
from iclutils.zoo.recipes.loop import Recipe


def gpt2(steps: int = 12) -> language.LanguageRecipe:
    def sample(step: int) -> language.Batch:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 20, (4, 9), generator=generator)
        return language.Batch(tokens, torch.arange(8).expand(4, 8))

    config = GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=19
    )
    return language.LanguageRecipe(
        name="small",
        seed=0,
        config=config,
        batch=sample,
        measure=lambda network: {"bias": network.transformer.ln_f.bias.sum().item()},
        steps=steps,
        checkpoints=(0, steps // 2, steps),
        card="# small\n",
        sinusoidal=False,
        warmup=2,
        log_every=4,
    )


def regressor(name: str = "plain", steps: int = 12, members: slice = slice(2)) -> Recipe:
    """By its name deeper, noisier or wider than the plain one."""
    width, layers = 16 if name == "wide" else 8, 2 if name == "deep" else 1
    shape = regressors.Shape(2, 5, "one", layers, width, 2)
    tasks = [(0, Task(2)), (5, Task(2, noise=2.0 if name == "noisy" else 0.0))][members]
    made = regression.RegressionRecipe.of(name, "cpu", shape, tasks, steps=steps, warmup=1)
    return replace(made, clip=0.05)


def linear(name: str = "linear", steps: int = 12, members: slice = slice(2)) -> Recipe:
    tasks = [(0, Problem(Task(2))), (5, Problem(Task(2, noise=2.0)))][members]
    made = lsa.LsaRecipe.of(
        name, "cpu", lsa_models.Shape(2, 3), tasks, steps=steps, extra=(0,), batch=32
    )
    return replace(made, log_every=4)


def digests(folder: Path) -> dict[str, str]:
    """Checksums of all weights under a folder."""
    return {
        p.relative_to(folder).as_posix(): sha256(p) for p in sorted(folder.rglob("*.safetensors"))
    }
