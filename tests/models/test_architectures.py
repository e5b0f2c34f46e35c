"""The table *Architectures*: every measure equals transformers alone, or is refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from tiny import save_gpt2
from transformer_lens.model_bridge import TransformerBridge

from iclutils import IclError, models
from iclutils.interp import invariants
from tools import architectures
from tools.architectures import CASES, MEASURES

STORED = json.loads((architectures.PAGES / "table.json").read_text())["rows"]
TOKENS = torch.arange(1, 9)[None]
OFTEN = {"GPT-2", "Llama-3", "Gemma-2", "BLOOM", "GPT-OSS", "Granite", "Phi", "Falcon, ALiBi"}
OFTEN |= {"GPT-1", "OPT, post-norm"}  # a part that others have is lacking


def test_the_table_is_whole_and_every_number_in_it_is_rounding():
    assert list(STORED) == list(CASES)
    for name, row in STORED.items():
        assert list(row) == list(MEASURES), name
        assert all(map(architectures.is_exact, row.values())), name
    assert (architectures.PAGES / "table.md").read_text() == architectures.table(STORED)


def refusals(row):
    """The sentences, without what rounding may change in them."""
    told = {what: x for what, x in row.items() if isinstance(x, str)}
    return {what: re.sub(r"[\d.e-]+ nats|by [\d.e-]+ of", "", x) for what, x in told.items()}


# Would catch what a head writes read before a norm or a factor, a norm whose scale is frozen where
# it is computed anew, a reader whose hook never fires (its edges are exactly 0), a restart above a
# layer that the architecture ignores, an option that TransformerLens ignores.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly) for name in CASES],
)
def test_a_row_is_made_again(name):
    """As large a difference, up to rounding, or the very sentence."""
    row = architectures.measure(name)
    assert {k: x for k, x in row.items() if not architectures.is_exact(x)} == {}
    assert refusals(row) == refusals(STORED[name])


# Folding moves what values add by their bias out of the heads; these have none.
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Llama, grouped", "Granite", "Gemma-3", "Cohere"])
def test_direct_effects_after_folding(name, tmp_path):
    case = architectures.Case.of(name, tmp_path)
    folded = replace(case, model=models.load(tmp_path, fold=True))
    assert architectures.direct_effects(folded) <= architectures.EXACT


def test_a_model_that_fits_no_known_way_is_refused(tmp_path, monkeypatch):
    case = architectures.Case.of("Phi", tmp_path)
    monkeypatch.setattr(case.model.cfg, "parallel_attn_mlp", False)
    with pytest.raises(IclError, match=r"\(phi\).* what the MLP reads is no norm .* off by \d"):
        architectures.edges(case, "qkv")


def dead(block):
    mlp = block.mlp
    return lambda x: (mlp.hook_in(x), mlp.hook_out(mlp.original_component(x)))[1]


def never(block):
    return lambda x: block.mlp.hook_out(block.mlp.original_component(x))


def twice(block):
    mlp = block.mlp
    return lambda x: mlp.hook_out(mlp.original_component(mlp.hook_in(mlp.hook_in(x))))


def gate(block):
    mlp, passed = block.mlp, []
    block.attn.q.register_forward_pre_hook(lambda part, args: passed.append(args[0]))
    return lambda x: mlp.hook_out(mlp.original_component(mlp.hook_in(x)) + 0 * passed[-1])


def beside(block):
    mlp, passed = block.mlp, []
    block.ln1.register_forward_pre_hook(lambda part, args: passed.append(args[0]))
    return lambda x: mlp.hook_out(mlp.original_component(mlp.hook_in(x)) + 0 * passed[-1])


FAULTS = {
    dead: r"a change at blocks\.1\.mlp\.hook_in does not reach what follows",
    never: r"not where others have them \('blocks\.1\.mlp\.hook_in'\)",
    twice: r"a run passes blocks\.1\.mlp\.hook_in twice",
    gate: r"in layer 1 heads read more of the stream than queries, keys and values do \(a gate",
    beside: "in layer 1 something beside the MLP reads the stream .experts",
}


# No number of these runs is another, so that sums of parts cannot tell.
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_change_that_would_come_to_nothing_or_to_more_is_refused(fault, tmp_path):
    save_gpt2(tmp_path)
    model = models.load(tmp_path)
    block = model.blocks[1]
    clean = models.logits(model, TOKENS)
    block.mlp.__dict__["forward"] = fault(block)
    torch.testing.assert_close(models.logits(model, TOKENS), clean)
    with pytest.raises(IclError, match=FAULTS[fault]):
        invariants.blocks(model)


def test_weights_that_are_changed_after_loading_are_no_reason_to_refuse(tmp_path):
    save_gpt2(tmp_path)
    model = models.load(tmp_path)
    for weight in model.parameters():
        weight.mul_(1.5)
    invariants.check_channels(model)


def test_a_model_that_transformer_lens_alone_has_loaded_is_asked_then(tmp_path):
    save_gpt2(tmp_path)
    model = TransformerBridge.boot_transformers(str(tmp_path))
    assert len(invariants.blocks(model)) == model.cfg.n_layers
    invariants.check_editable(model)
