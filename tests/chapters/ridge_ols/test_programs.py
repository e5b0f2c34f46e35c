"""Programs: blocks in Hugging Face's GPT-2, results against NumPy, what they cost."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2Model

from iclutils.chapters.ridge_ols.layout import Numerics
from iclutils.chapters.ridge_ols.programs import gradient_program, ridge_program

DOUBLE, SINGLE = torch.float64, torch.float32
SHORT = Numerics(2, 0.1, 1e6, balanced=True)
PROGRAMS = {
    "gradient": lambda d, n, numerics: gradient_program(d, n, 0.05, 0.3, numerics),
    "inverse": lambda d, n, numerics: ridge_program(d, n, 0.5, "inverse", numerics),
    "gain": lambda d, n, numerics: ridge_program(d, n, 0.5, "gain", numerics),
}
every_program = pytest.mark.parametrize("name", PROGRAMS)


def contexts(dim, pairs, count=8, seed=0):
    source = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, pairs, dim, generator=source, dtype=DOUBLE)
    return xs, torch.randn(count, pairs, generator=source, dtype=DOUBLE)


def truth(name, xs, ys):
    """Row n: w after n steps w - 2α (x (xᵀw) - x y + λ w), or (λI + XᵀX)⁻¹ Xᵀy of n pairs."""
    out = np.zeros(xs.shape)
    for b, n in np.ndindex(len(xs), xs.shape[1] - 1):
        x, y, w = xs[b, n], ys[b, n], out[b, n]
        out[b, n + 1] = w - 2 * 0.05 * (np.outer(x, x) @ w - x * y + 0.3 * w)
        if name != "gradient":
            x, y = xs[b, : n + 1], ys[b, : n + 1]
            out[b, n + 1] = np.linalg.solve(x.T @ x + 0.5 * np.eye(x.shape[1]), x.T @ y)
    return out


def worst(program, name, xs, ys):
    expected = (truth(name, xs.numpy(), ys.numpy()) * xs.numpy()).sum(-1)
    return float(np.abs(program(xs, ys).double().numpy() - expected).max())


def neurons(block):
    return block.weights["mlp.c_fc.weight"].shape[1]


def gpt2(blocks, pos):
    """Hugging Face's GPT-2 with these blocks; neurons that are missing get weights of 0."""
    width, inner = len(blocks[0].weights["ln_1.bias"]), max(map(neurons, blocks))
    sizes = {"vocab_size": 2, "n_positions": pos, "n_embd": width, "n_inner": inner, "n_head": 1}
    config = GPT2Config(**sizes, n_layer=len(blocks), activation_function=blocks[0].gelu)
    model = GPT2Model(config).double().eval()
    state = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    for layer, block in enumerate(blocks):
        for key, weight in block.weights.items():
            state[f"h.{layer}.{key}"][tuple(map(slice, weight.shape))] = weight
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("gelu", ["gelu", "gelu_new"])
@every_program
def test_gpt2_runs_the_program(name, gelu):
    xs, ys = contexts(2, 4)
    program = PROGRAMS[name](2, 3, replace(SHORT, gelu=gelu))
    streams = program.stream(xs, ys)
    model = gpt2(list(program.blocks), streams[0].shape[1])
    with torch.no_grad():
        found = model(inputs_embeds=streams[0], output_hidden_states=True).hidden_states
    assert len(found) == len(streams) == len(program.blocks) + 1
    unit = program.layout.field_unit
    for theirs, ours in zip(found[:-1], streams[:-1], strict=True):  # the last one has a norm more
        torch.testing.assert_close(theirs / unit, ours / unit, atol=1e-7, rtol=1e-9)


# The tolerances below: the long stencils are at their best scale, where rounding decides; they are
# five times the worst of twenty seeds, rounded up.
@pytest.mark.parametrize(
    ("name", "dim", "examples", "double", "single"),
    [
        ("gradient", 1, 1, 2e-13, 2e-5),
        ("gradient", 4, 1, 1e-12, 5e-5),
        ("gradient", 3, 6, 1e-12, 5e-5),
        ("inverse", 2, 1, 5e-10, 1e-3),
        ("inverse", 3, 4, 5e-10, 1e-3),
        ("gain", 1, 3, 5e-11, 1e-4),
        ("gain", 3, 4, 2e-10, 1e-4),
        ("gain", 4, 8, 5e-10, 2e-4),
        ("gain", 8, 16, 1e-9, 1e-3),
    ],
)
def test_programs_predict_as_the_formula(name, dim, examples, double, single):
    xs, ys = contexts(dim, examples + 1)
    for dtype, bound in ((DOUBLE, double), (SINGLE, single)):
        program = PROGRAMS[name](dim, examples, Numerics.improved(dtype)).to(dtype)
        assert program(xs, ys).dtype == dtype
        for pairs in {1, examples, examples + 1}:  # shorter contexts, too
            assert worst(program, name, xs[:, :pairs], ys[:, :pairs]) < bound
        one, all_ = program(xs[0], ys[0]), program(xs, ys)
        torch.testing.assert_close(one, all_[0], atol=2 * bound, rtol=0)  # no batch
