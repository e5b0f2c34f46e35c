"""Recipes ``phase-VARIANT-SEED``: what makes induction possible, or not, during training.

Arguments 2 and 3 of {cite}`olsson2022`, on the data and settings of ``induction-N``. Smeared keys
let a head read the token before with no head below it; a cut path takes what the attention of
layer 0 found from one input of layer 1, from the first step on. The curves alone are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from iclutils import zoo
from iclutils.files import write_text
from iclutils.interp.head_scores import prefix_matching, previous_token

from . import induction
from .language import LanguageRecipe, small_gpt2

INPUTS = ("queries", "keys", "values")  # in the order in which GPT-2 projects them
STORED = zoo.ROOT / "phase_change.jsonl"
LOG_EVERY = 50
MEASURES = ("step", "loss", "log_p", "accuracy", "prefix", "previous")


def smear_keys(network: GPT2LMHeadModel) -> None:
    """Mix, in every head, each key with the one before: s k_t + (1 - s) k_(t-1), s = sigmoid(a).

    a is a new parameter ``smear`` of each head, 0 at first ({cite}`olsson2022`, argument 2).
    """
    for block in network.transformer.h:
        attention: Any = block.attn
        attention.smear = nn.Parameter(torch.zeros(attention.num_heads))
        attention.c_attn.register_forward_hook(partial(_smeared, attention))


def _smeared(attention: Any, _: nn.Module, inputs: tuple[Tensor], projected: Tensor) -> Tensor:
    query, key, value = projected.chunk(3, -1)
    share = attention.smear.sigmoid().repeat_interleave(attention.head_dim)
    before = torch.cat([key[:, :1], key[:, :-1]], 1)
    return torch.cat([query, share * key + (1 - share) * before, value], -1)


def cut_path(network: GPT2LMHeadModel, part: str) -> None:
    """Give the queries, keys or values of layer 1 a stream that layer 0's attention never wrote to.

    The MLP of layer 0 is asked again, so that it hands nothing on either. All other paths stay.
    """
    blocks: Any = network.transformer.h
    first, second = blocks
    entered: list[Tensor] = []

    def severed(module: Any, inputs: tuple[Tensor], projected: Tensor) -> Tensor:
        stream = entered.pop()
        alone = module.forward(second.ln_1(stream + first.mlp(first.ln_2(stream))))
        parts, at = list(projected.chunk(3, -1)), INPUTS.index(part)
        parts[at] = alone.chunk(3, -1)[at]
        return torch.cat(parts, -1)

    first.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    second.attn.c_attn.register_forward_hook(severed)


VARIANTS: dict[str, tuple[int, Callable[[GPT2LMHeadModel], None] | None]] = {
    "one-layer": (1, None),
    "one-layer-smeared": (1, smear_keys),
    "two-layers": (2, None),
    "two-layers-smeared": (2, smear_keys),
    **{f"no-{part}": (2, partial(cut_path, part=part)) for part in INPUTS},
}


@dataclass(frozen=True, kw_only=True)
class ChangedRecipe(LanguageRecipe):
    """A language model that is changed before it is trained. Its weights are not saved."""

    change: Callable[[GPT2LMHeadModel], None] | None

    def network(self) -> GPT2LMHeadModel:
        """Draw the network as without the change, then change it."""
        network = super().network()
        if self.change:
            self.change(network)
        return network


def recipe(name: str) -> ChangedRecipe:
    """Make the recipe of a name such as ``phase-two-layers-smeared-3``; its log is the curve."""
    variant, _, seed = name.removeprefix("phase-").rpartition("-")
    (layers, change), plain = VARIANTS[variant], induction.recipe(int(seed))
    return ChangedRecipe(
        name=name,
        seed=plain.seed,
        change=change,
        config=small_gpt2(induction.VOCAB, plain.config.n_positions, layers),
        batch=plain.batch,
        measure=measure,
        steps=plain.steps,
        checkpoints=(),
        log_every=LOG_EVERY,
    )


def names() -> list[str]:
    """List all variants of a seed, then those of the next."""
    return [f"phase-{variant}-{seed}" for seed in zoo.HELD_OUT for variant in VARIANTS]


def measure(network: GPT2LMHeadModel) -> dict[str, float]:
    """Measure as ``induction-N``, the best head's prefix matching, and attention one token back."""
    sequences = induction.held_out()
    usual = network.config._attn_implementation
    network.set_attn_implementation("eager")  # the other one keeps no patterns
    patterns = torch.cat(network(sequences.tokens, output_attentions=True).attentions, 1).mean(0)
    network.set_attn_implementation(usual)
    prefix, previous = prefix_matching(patterns, sequences.length), previous_token(patterns)
    scores = {"prefix": prefix.max().item(), "previous": previous.max().item()}
    return induction.measure(network) | scores


def collect(trained: Path) -> None:
    """Write the curves of all finished trainings in a folder into the file that ships."""
    lines = []
    for name in [n for n in names() if (trained / n / "SHA256SUMS").is_file()]:
        log = (trained / name / "training.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in log.splitlines()]
        columns = {key: [round(row[key], 3) for row in rows] for key in MEASURES}
        lines.append(json.dumps({"name": name} | columns, separators=(",", ":")) + "\n")
    write_text(STORED, "".join(lines))


def curves() -> dict[str, dict[int, dict[str, list[Any]]]]:
    """Read the stored curves by variant and seed, as columns: ``step`` and the measures."""
    rows = map(json.loads, STORED.read_text(encoding="utf-8").splitlines())
    stored = {row.pop("name"): row for row in rows}
    return {v: {n: stored[f"phase-{v}-{n}"] for n in zoo.HELD_OUT} for v in VARIANTS}
