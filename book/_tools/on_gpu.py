"""Train the regressions of the paper's size in minutes: a step as one CUDA graph.

Data, network, rates and loss are those of ``regression-paper-*``; products are in bfloat16, sums,
norms and the loss in float32. ``python -m book._tools.on_gpu FOLDER`` trained those of chapter 03.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from iclutils.files import write_sums, write_text
from iclutils.models.regressors import as_tokens
from iclutils.zoo.recipes import regression
from iclutils.zoo.recipes.muon import orthogonal


class Captured:
    """The training of one network, of which ``step`` takes the next step."""

    def __init__(self, plan: regression.RegressionRecipe) -> None:
        self.plan, cuda = plan, plan.device == "cuda"
        self.kind = torch.bfloat16 if cuda else torch.float32  # of products
        self.network = plan.network().to(plan.device).train()
        self.weights = list(self.network.parameters())
        muon, usual = plan.optimizers(self.network)
        blocks = sorted(muon.param_groups[0]["params"], key=_shape)
        self.alike = [list(group) for _, group in groupby(blocks, key=_shape)]
        self.momentum = muon.defaults["momentum"]
        self.past = [[torch.zeros_like(p) for p in group] for group in self.alike]
        self.rate = torch.zeros((), device=plan.device)
        self.adam = torch.optim.AdamW(
            usual.param_groups[0]["params"],
            lr=self.rate if cuda else 0.0,
            betas=usual.defaults["betas"],
            weight_decay=usual.defaults["weight_decay"],
            fused=True,
            capturable=cuda,
        )
        self.xs, self.ys = (part.clone() for part in plan.batch_of(0))
        self.loss = torch.zeros((), device=plan.device)
        self.replay = self._capture() if cuda else self._take

    def step(self, step: int) -> Tensor:
        """Take that step; the loss stays on the device."""
        self.rate.fill_(self.plan.rate(step))
        if self.plan.device != "cuda":
            self.adam.param_groups[0]["lr"] = self.plan.rate(step)
        for mine, fresh in zip((self.xs, self.ys), self.plan.batch_of(step), strict=True):
            mine.copy_(fresh)
        self.replay()
        return self.loss

    def _capture(self) -> Any:
        """The graph of a step, from three steps at the rate 0 whose traces are removed."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._take()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self._take()
        traces = [v for state in self.adam.state.values() for v in state.values()]
        for trace in (*traces, *(p for group in self.past for p in group)):
            trace.zero_()
        return graph.replay

    def _take(self) -> None:
        loss = (answers(self.network, self.xs, self.ys, self.kind) - self.ys).square().mean()
        for weight in self.weights:
            weight.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.plan.clip, foreach=True)
        self.adam.step()
        with torch.no_grad():
            for weights, past in zip(self.alike, self.past, strict=True):
                gradients: Any = [w.grad for w in weights]
                torch._foreach_lerp_(past, gradients, 1 - self.momentum)
                stack = torch.stack(torch._foreach_lerp(gradients, past, self.momentum))
                update = orthogonal(stack.to(self.kind)).float()
                n_in, n_out = weights[0].shape[-2:]
                update *= self.rate * self.plan.scale * max(1.0, n_out / n_in) ** 0.5
                torch._foreach_sub_(list[Tensor](weights), list[Tensor](update.unbind(0)))
        self.loss.copy_(loss.detach())


def _shape(weight: Tensor) -> tuple[int, ...]:
    return tuple(weight.shape)


def answers(net: Any, xs: Tensor, ys: Tensor, kind: torch.dtype) -> Tensor:
    """What a standard network with two tokens a pair answers: (1, batch, n)."""

    def linear(x: Tensor, at: Any, kind: torch.dtype = torch.float32) -> Tensor:
        weight, bias = at["weight"].squeeze(0).to(kind), at["bias"].squeeze((0, 1)).to(kind)
        return torch.addmm(bias, x.to(kind), weight)

    def norm(x: Tensor, at: Any) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], at["weight"][0, 0], at["bias"][0, 0])

    tokens = as_tokens(xs[0], ys[0], "two")
    batch, places, _ = tokens.shape
    x = linear(tokens.flatten(0, 1), net.read_in).view(batch, places, -1)
    x = (x + net.positions.squeeze(0)[:places]).flatten(0, 1)
    for block in net.blocks:
        qkv = linear(norm(x, block["norm_1"]), block["qkv"], kind)
        query, key, value = qkv.view(batch, places, 3, net.shape.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(batch * places, -1), block["out"], kind)
        hidden = linear(norm(x, block["norm_2"]), block["up"], kind)
        x = x + linear(functional.gelu(hidden, approximate="tanh"), block["down"], kind)
    of_x = x.view(batch, places, -1)[:, ::2].flatten(0, 1)
    return linear(norm(of_x, net.norm), net.read_out).view(1, batch, -1)


def train(plan: regression.RegressionRecipe, work: Path) -> None:
    """Train one network into a folder as the recipes leave it."""
    training, rows, recent = Captured(plan), [], list[Tensor]()
    began = time.perf_counter()
    for step in range(1, plan.steps + 1):
        recent.append(training.step(step).clone())
        if step % plan.log_every == 0 or step == plan.steps:
            row = {"step": step, "loss": torch.stack(recent).mean().item()}
            row |= plan.held_out(training.network)
            rows.append(row | {"seconds": round(time.perf_counter() - began, 1)})
            recent = []
            print(plan.name, rows[-1], flush=True)
    folder = work / f"step-{plan.steps:05d}"
    folder.mkdir(parents=True)
    training.network.save(folder)
    write_text(work / "training.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_text(work / "README.md", plan.card)
    write_sums(work)


if __name__ == "__main__":
    for name in regression.PAPER:
        train(regression.recipe(name, "cuda"), Path(sys.argv[1]) / name)
