"""The door: what a folder holds is read as it stands, or refused in one sentence."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, save_bert, save_gpt2, save_grouped

from iclutils import IclError, models
from iclutils.files import write_sums
from iclutils.models import checkpoint, language
from tools.architectures import save as save_case

MLP = "transformer.h.1.mlp.c_fc.weight"


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


def case(name):
    """Puts a network of another architecture, or with another option, in the place of GPT-2."""
    return lambda folder: save_case(name, folder)


def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def changed(folder):
    write_sums(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4] + b"\0\1\2\3")


def without_a_shard(folder):
    save_gpt2(folder).save_pretrained(folder, max_shard_size="20kB")
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-*")).unlink()


def without_shards(folder):
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def without_a_map(folder):
    without_shards(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')


ADAPTER = write("adapter_config.json", '{"base_model_name_or_path": "a/b", "peft_type": "LORA"}')


def without_its_base(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    ADAPTER(folder)


STATES = {
    "empty": (lambda f: shutil.rmtree(f) or f.mkdir(), "has no config.json"),
    "a tensor less": (weights(lambda w: w.pop(MLP)), f"lacking: {MLP}. Mend config"),
    "a tensor more": (weights(lambda w: w.update(x=w[MLP] + 0)), "left over: x. Mend"),
    "too many layers": (config(n_layer=5), r"lacking: .*h\.3\.\S+ and 21 more"),
    "too few layers": (config(n_layer=2), r"left over: .*h\.2\.\S+ and 8 more"),
    "another width": (config(n_inner=64), r"another shape: \S+ \(48,\) for \(64,\)"),
    "not finite": (weights(lambda w: w[MLP].fill_(torch.nan)), f"not finite: {MLP}"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors. Copy it"),
    "a shard less": (without_a_shard, r"no model-00002-of-\d+.safetensors. Copy it whole"),
    "an index of nothing": (without_shards, "no model.safetensors. Copy it whole"),
    "an index that is none": (without_a_map, "no model.safetensors. Copy it whole"),
    "no settings": (write("config.json", "[]"), r"config.json is not valid .* no object\). Mend"),
    "half a file": (cut, "could not be loaded"),
    "changed": (changed, "does not match its recorded SHA-256"),
    "a pointer": (write("model.safetensors", "version https://git-lfs"), "could not be loaded"),
    "an adapter": (ADAPTER, r"adapter of 'a/b'.*Merge it first.*merge_and_unload\(\)"),
    "an adapter alone": (without_its_base, r"adapter of 'a/b'.*Merge it first"),
    "broken words": (write("tokenizer.json", "{broken"), "The tokenizer .* cannot be read"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), r"are quantised \(gptq\)"),
    "quantised somehow": (config(quantization_config="4 bits"), r"are quantised \(4 bits\): save"),
    "quantised at loading": (config(quantization_config={"load_in_4bit": True}), "quantised .None"),
    "another kind": (config(model_type="t5"), "type 't5', which is no causal language model"),
    "an encoder": (config(model_type="bart", is_encoder_decoder=True), "has an encoder beside"),
    "both directions": (save_bert, "reads in both directions, as BERT does"),
    "no attention": (case("Mamba"), "does not expose attention patterns"),
    "an option ignored": (case("GPT-2, unscaled attention"), r"another network.* [\d.]+ nats away"),
    "an encoder's output": (case("GPT-2, cross-attention"), "cannot run with these options"),
    "norms afterwards": (case("OPT, post-norm"), "cannot run with these options"),
    "heads by layer": (case("Laguna, heads by layer"), "layers of '.*' have 2 or 4 heads"),
    "keys in one matrix": (case("Phi-3, grouped"), "4 heads share keys and values .2 in all."),
    "a kind unknown": (case("Helium"), r"architecture \(helium\), or .* from config\)\.$"),
    "a cache lost": (case("Bamba, full"), "do not fit here. .* have them, use another"),
    "an option unknown": (case("GPT-BigCode, many keys"), "TransformerLens does not support this"),
}  # fmt: skip


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
    weights(lambda w: w.update(old))(tmp_path)
    read = checkpoint.read(tmp_path, kind).state_dict()
    assert all(torch.equal(read[n], held[n]) for n in held if n in read)  # or renamed
    assert models.load(tmp_path).cfg.n_heads == 4


def test_what_is_not_read_is_neither_counted_nor_a_reason_to_refuse(tmp_path):
    save_grouped(tmp_path).save_pretrained(tmp_path, max_shard_size="20kB")
    (tmp_path / "model.safetensors").unlink()
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    (tmp_path / "consolidated.safetensors").write_bytes(b"broken")
    assert checkpoint.weights(tmp_path) == shards
    assert models.load(tmp_path).cfg.n_layers == 3


def test_a_name_is_a_name_and_a_folder_a_path(tmp_path, monkeypatch):
    """A folder called gpt2 is no GPT-2, neither its weights nor its verdicts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("gpt2", "smollm2", "induction-0", "mine"):
        save_gpt2(tmp_path / name)
        own = name == "mine"
        assert models.local_folder(name) == (Path(name) if own else None)
        assert models.local_folder(f"./{name}") == Path(name)
        assert models.local_folder(f"~/{name}") == tmp_path / name
    assert models.load("./gpt2").cfg.d_vocab == models.load("~/gpt2").cfg.d_vocab == 60
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


@pytest.mark.parametrize(
    ("vocab", "named", "token"), [(200, 50256, None), (200, 7, 7), (60, None, None)]
)
def test_a_first_token_is_one_that_the_model_has(tmp_path, vocab, named, token):
    """GPT2Config(vocab_size=200) still names 50256."""
    sizes = {"vocab_size": vocab, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    network = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=named))
    network.save_pretrained(tmp_path)
    model = models.load(tmp_path)
    if token is None:
        with pytest.raises(IclError, match="names no BOS token among its tokens"):
            models.bos(model)
    else:
        assert models.bos(model) == token
