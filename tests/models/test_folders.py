"""The door: what a folder holds is read as it stands, or refused in one sentence."""

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, save_bert, save_gpt2, save_grouped

from iclutils import IclError, models
from iclutils.models import checkpoint, language
from tools.architectures import save as save_case

MLP = "transformer.h.1.mlp.c_fc.weight"


def change_weights(change):
    """Changes the tensors of a folder."""

    def act(folder):
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})

    return act


def config(**changes):
    path = "config.json"
    return lambda f: (f / path).write_text(json.dumps(json.loads((f / path).read_text()) | changes))


def case(name):
    """Puts a network of another architecture, or with another option, in the place of GPT-2."""
    return partial(save_case, name)


STATES = {
    "empty": (lambda f: shutil.rmtree(f) or f.mkdir(), "could not be loaded: .* whole folder"),
    "a tensor less": (change_weights(lambda w: w.pop(MLP)), f"1 lacking, {MLP} first. Mend config"),
    "a tensor more": (change_weights(lambda w: w.update(x=w[MLP] + 0)), "1 left over, x first"),
    "another width": (config(n_inner=64), r"9 of another shape, \S+h.0.mlp.c_fc.bias first"),
    "not finite": (change_weights(lambda w: w[MLP].fill_(torch.nan)), "predicts NaN or infinite"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "loaded: .* safetensors"),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter.* Merge it"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "loaded: .*not quantised"),
    "broken words": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer .* cannot be"),
    "sentencepiece": (lambda f: (f / "tokenizer.model").touch(), "Write a tokenizer.json with"),
    "another kind": (config(model_type="t5"), "could not be loaded: .*T5"),
    "both directions": (save_bert, "reads in both directions, as BERT does"),
    "no attention": (case("Mamba"), "does not show in every layer to what each"),
    "heads by layer": (case("Laguna, heads by layer"), "does not show in every layer to what each"),
    "an option ignored": (case("GPT-2, unscaled attention"), r"another network.* [\d.]+ nats away"),
    "an encoder's output": (case("GPT-2, cross-attention"), "does not support this"),
    "keys in one matrix": (case("Phi-3, grouped"), "4 heads share keys and values .2 in all."),
    "a kind unknown": (case("Helium"), r"architecture \(helium\), or .* from config\)\.$"),
    "a cache lost": (case("Bamba, full"), "if you have them, use another"),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_of_a_folder_and_its_sentence(what, tmp_path):
    spoil, message = STATES[what]
    save_gpt2(tmp_path)
    spoil(tmp_path)
    with pytest.raises(IclError, match=message) as caught:
        models.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_that_sees_is_refused_and_nothing_is_installed(tmp_path, monkeypatch):
    """TransformerLens calls pip for torchvision, which can bring another torch."""
    called = []
    monkeypatch.setattr(subprocess, "check_call", called.append)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48}
    words = sizes | {"vocab_size": 60, "num_key_value_heads": 2, "head_dim": 8}
    images = sizes | {"image_size": 32, "patch_size": 16}
    both = {"text_config": words, "vision_config": images}
    settings = hf.Gemma3Config(**both, mm_tokens_per_image=4, image_token_index=59)
    hf.Gemma3ForConditionalGeneration(settings).save_pretrained(tmp_path)
    with pytest.raises(IclError, match=r"\(gemma3\) reads more than text"):
        models.load(tmp_path)
    assert not called


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_is_whole_is_read_as_hugging_face_reads_it(kind, tmp_path):
    """Tied weights are not lacking, and buffers of old files are not left over."""
    ARCHITECTURES[kind](tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    old = {name: torch.ones(1) for name in ("h.0.attn.bias", "h.0.rotary_emb.inv_freq")}
    change_weights(lambda w: w.update(old))(tmp_path)
    read = checkpoint.read(tmp_path, kind).state_dict()
    assert all(torch.equal(read[n], held[n]) for n in held if n in read)  # or renamed
    assert models.load(tmp_path).cfg.n_heads == 4


def test_of_shards_all_are_read_or_none(tmp_path):
    save_grouped(tmp_path).save_pretrained(tmp_path, max_shard_size="20kB")
    (tmp_path / "model.safetensors").unlink()
    assert models.load(tmp_path).cfg.n_layers == 3
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(IclError, match="could not be loaded"):
        models.load(tmp_path)


def test_a_name_is_a_name_and_a_folder_a_path(tmp_path, monkeypatch):
    """A folder called gpt2 is no GPT-2, neither its weights nor its verdicts."""
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "induction-0", "mine"):
        save_gpt2(tmp_path / name)
        assert models.local_folder(name) == (Path(name) if name == "mine" else None)
        assert models.local_folder(f"./{name}") == Path(name)
    assert models.load("./gpt2").cfg.d_vocab == 60
    assert models.load("induction-0").cfg.d_vocab == 512
    monkeypatch.setattr(language, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(IclError, match=r"Could not fetch .* \(./gpt2, not gpt2\)"):
        models.load("gpt2")


def test_a_file_from_the_hub_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    save_gpt2(tmp_path)
    pinned = language.HubModel("openai-community/gpt2", "6" * 40, {"config.json": "0" * 64})
    monkeypatch.setitem(models.HUB, "gpt2", pinned)
    monkeypatch.setattr(language, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(IclError, match=r"config.json .*pinned SHA-256.*Delete that file"):
        models.load("gpt2")


@pytest.mark.parametrize(("named", "token"), [(50256, None), (7, 7), (None, None)])
def test_a_first_token_is_one_that_the_model_has(tmp_path, named, token):
    """GPT2Config(vocab_size=200) still names 50256."""
    save_gpt2(tmp_path, bos_token_id=named)
    model = models.load(tmp_path)
    if token is None:
        with pytest.raises(IclError, match="names no BOS token among its tokens"):
            models.bos(model)
    else:
        assert models.bos(model) == token
