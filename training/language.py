"""Recipes whose model is a small GPT-2 that predicts the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

from .loop import Recipe, sinusoids


class Batch(NamedTuple):
    """Token ids, the position each input token is embedded at, and what each prediction counts.

    ``weights[:, i]`` belongs to the prediction of token ``i + 1``; without them all count alike.
    """

    tokens: Int[Tensor, "batch pos"]
    positions: Int[Tensor, "batch next"]
    weights: Float[Tensor, "batch next"] | None = None


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Recipe):
    """``batch(step)`` gives the data of that step, ``measure(network)`` numbers for the log."""

    config: GPT2Config
    batch: Callable[[int], Batch]
    measure: Callable[[GPT2LMHeadModel], dict[str, float]]
    sinusoidal: bool = True  # position embeddings start as sinusoids
    weight_decay: float = 0.01

    def network(self) -> GPT2LMHeadModel:
        """Draw a GPT-2 of that configuration from the seed."""
        torch.manual_seed(self.seed)
        network = GPT2LMHeadModel(self.config)
        if self.sinusoidal:
            positions = network.transformer.wpe.weight
            positions.data.copy_(0.05 * sinusoids(*positions.shape))
        return network

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Return the next token's cross-entropy, in nats, over the predictions that count."""
        batch = self.batch(step)
        before, truth = batch.tokens[:, :-1], batch.tokens[:, 1:].flatten()
        scores = network(before, position_ids=batch.positions, use_cache=False).logits
        if batch.weights is None:
            return functional.cross_entropy(scores.flatten(0, 1), truth)
        each = functional.cross_entropy(scores.flatten(0, 1), truth, reduction="none")
        return (each * batch.weights.flatten()).sum() / batch.weights.sum()

    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Use AdamW, with weight decay on matrices alone."""
        parts = [[p for p in network.parameters() if (p.ndim > 1) == m] for m in (True, False)]
        decays = (self.weight_decay, 0.0)
        groups = [{"params": p, "weight_decay": d} for p, d in zip(parts, decays, strict=True)]
        return [torch.optim.AdamW(groups, lr=self.peak_rate, betas=(0.9, 0.98), fused=True)]

    def held_out(self, network: nn.Module) -> dict[str, float]:
        """Return the results of ``measure``."""
        with torch.no_grad():
            return self.measure(network)

    def save(self, network: nn.Module, folder: Path) -> None:
        """Write a Hugging Face folder, the weights in half precision."""
        state = network.state_dict()
        half = {n: t.half().contiguous() for n, t in state.items() if n != "lm_head.weight"}
        save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
        self.config.to_json_file(folder / "config.json")


def small_gpt2(vocab: int, positions: int, layers: int, heads: int = 4) -> GPT2Config:
    """Configure width 128, four heads of 32, MLPs of 256, no dropout; the last token id is BOS."""
    return GPT2Config(
        vocab_size=vocab,
        n_positions=positions,
        n_embd=128,
        n_layer=layers,
        n_head=heads,
        n_inner=256,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=vocab - 1,
        eos_token_id=vocab - 1,
        use_cache=False,
    )


def tile(
    segment: Int[Tensor, "batch longest"], period: Int[Tensor, "batch 1"], length: int, bos: int
) -> Int[Tensor, "batch pos"]:
    """Return BOS, then the first ``period`` tokens of each segment over and over, ``length`` in
    all."""
    repeat = segment.gather(1, torch.arange(length - 1)[None] % period)
    return torch.cat([torch.full((len(segment), 1), bos), repeat], 1)
