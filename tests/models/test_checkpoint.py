"""A folder that holds no whole, plain weights of a causal model is refused, with cause and cure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, save_bert, save_gpt2

from iclutils import IclError, models
from iclutils.models import checkpoint

MLP = "transformer.h.1.mlp.c_fc.weight"
Break = Callable[[Path], object]


def weights(change):
    """Changes the tensors of a folder."""

    def act(folder):
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})

    return act


def config(**changes):
    path = "config.json"
    return lambda f: (f / path).write_text(json.dumps(json.loads((f / path).read_text()) | changes))


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


BREAKS = {
    "a tensor less": (weights(lambda w: w.pop(MLP)), f"lacking: {MLP}. Mend config"),
    "a tensor more": (weights(lambda w: w.update(x=w[MLP] + 0)), "left over: x. Mend"),
    "too many layers": (config(n_layer=5), r"lacking: .*h\.3\.\S+ and 21 more"),
    "too few layers": (config(n_layer=2), r"left over: .*h\.2\.\S+ and 8 more"),
    "another width": (config(n_inner=64), r"another shape: \S+ \(48,\) for \(64,\)"),
    "not finite": (weights(lambda w: w[MLP].fill_(torch.nan)), f"not finite: {MLP}"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights.*Copy it whole"),
    "a pointer": (write("model.safetensors", "version https://git-lfs"), "could not be loaded"),
    "broken words": (write("tokenizer.json", "{broken"), "The tokenizer .* cannot be read"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), r"are quantised \(gptq\)"),
    "another kind": (config(model_type="t5"), "type 't5', which is no causal language model"),
    "both directions": (save_bert, "reads in both directions, as BERT does"),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_not_whole_is_refused(what, tmp_path):
    spoil, message = BREAKS[what]
    save_gpt2(tmp_path)
    spoil(tmp_path)
    with pytest.raises(IclError, match=message) as caught:
        models.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_is_whole_is_read_as_hugging_face_reads_it(kind, tmp_path):
    """Tied weights are not lacking, and buffers of old files are not left over."""
    ARCHITECTURES[kind](tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    old = {name: torch.ones(1) for name in ("h.0.attn.bias", "h.0.rotary_emb.inv_freq")}
    weights(lambda w: w.update(old))(tmp_path)
    read = checkpoint.read(tmp_path, kind).state_dict()
    assert all(torch.equal(read[n], held[n]) for n in held if n in read)  # or renamed
    assert models.load(tmp_path).cfg.n_heads == 4
