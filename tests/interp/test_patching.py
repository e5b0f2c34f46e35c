"""Patches against hooked passes; see also ``test_invariants`` and ``test_architectures``."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokens

from iclutils.errors import IclError
from iclutils.interp import patching
from iclutils.interp.graph import head
from iclutils.interp.hooks import activations, run_with_hooks
from iclutils.interp.readout import log_prob
from iclutils.models import get_act_name


def close(got, expected, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


def loop(model, x, scored, edits):
    """Loss of log p by one hooked full pass for each (name, where, value)."""

    def log_p(*hooks):
        return log_prob(run_with_hooks(model, x, hooks)[0], x)[0, scored]

    def edit(name, where, value):
        def change(out, hook):
            out = out.clone()
            out[where] = value
            return out

        return name, change

    return log_p() - torch.stack([log_p(edit(*each)) for each in edits])


# Would catch patches of one batch that mix, and entries before a patch that change.
@settings(max_examples=10)
@given(data=st.data(), length=st.integers(4, 30), rows=st.integers(1, 150))
def test_the_position_sweep_equals_the_loop(gpt2, neox, data, length, rows):
    model = data.draw(st.sampled_from([gpt2, gpt2, neox]))
    place = st.integers(0, length - 1)
    positions, sources = (
        torch.tensor(data.draw(st.lists(place, min_size=3, max_size=7)))[:3] for _ in range(2)
    )
    scored = torch.tensor(sorted(data.draw(st.sets(st.integers(0, length - 2), min_size=1))))
    x = tokens(1, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patching, "ROWS", rows)
        got = patching.mlp_position_sweep(model, x, positions, sources, scored)
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    cache = activations(model, x, names)
    pairs = list(zip(positions.tolist(), sources.tolist(), strict=True))
    edits = [(name, (0, to), cache[name][0, frm]) for name in names for to, frm in pairs]
    close(got, loop(model, x, scored, edits).view_as(got), 3e-5, 1e-4)
    if model is gpt2:
        reached = scored == positions[:, None]  # after the last layer, one entry
        assert got[:, scored < positions[:, None]].abs().sum() < 1e-4, "no patch reaches back"
        assert got[-1][~reached].abs().sum() < 1e-4


@pytest.mark.parametrize(
    ("positions", "sources"), [([-1], [2]), ([5], [2]), ([1], [-2]), ([1, 2], [3])]
)
def test_a_sweep_of_places_that_no_sequence_has_is_refused(gpt2, positions, sources):
    places = torch.tensor(positions), torch.tensor(sources)
    with pytest.raises(IclError, match="one source per position"):
        patching.mlp_position_sweep(gpt2, tokens(1, 5), *places, torch.tensor([3]))


# By transformers alone. Would catch norms that divide anew, and a hook that some norm lacks.
def test_with_frozen_norms_a_removal_leaves_every_divisor_as_it_was(case):
    network, task, model = case.alone.network, case.task, case.model
    norms = [m for m in network.modules() if type(m).__name__.endswith("Norm")]
    divisors, outputs = {}, []

    def divide(norm, inputs, out):
        x = inputs[0]
        if bias := getattr(norm, "bias", None) is not None:
            x = x - x.mean(-1, keepdim=True)
        eps = norm.eps if bias else norm.variance_epsilon
        own = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return x / divisors.setdefault(norm, own) * norm.weight + (norm.bias if bias else 0)

    out_of = [m for n, m in network.named_modules() if n.endswith(("attn.c_proj", "o_proj"))][1]
    size = model.cfg.d_head

    def keep(module, inputs):
        outputs.append(inputs[0])

    def remove(module, inputs):  # head 1.0
        return torch.cat([outputs[0][..., :size], inputs[0][..., size:]], -1)

    hook = out_of.register_forward_pre_hook(keep)
    network(task.corrupt)
    hook.remove()
    hooks = [norm.register_forward_hook(divide) for norm in norms]
    clean = network(task.clean).logits
    hooks.append(out_of.register_forward_pre_hook(remove))
    left = network(task.clean).logits
    for each in hooks:
        each.remove()
    at = torch.arange(len(task))[:, None], task.at
    frozen = [name for name in model.hook_dict if name.endswith("hook_scale")]
    lost = patching.ablate(model, task, [[head(1, 0)]], frozen=frozen)[0]
    close(lost, task.score(clean[at]) - task.score(left[at]), 1e-5, 1e-4)
    assert not torch.allclose(lost, patching.ablate(model, task, [[head(1, 0)]])[0], rtol=1e-3)
