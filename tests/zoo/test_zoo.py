"""The shipped models: whole and light; how good they are the chapters judge."""

import json
import shutil

import pytest

from iclutils import IclError, models, zoo
from iclutils.files import check_sums


@pytest.mark.parametrize("name", zoo.names())
def test_files_cards_and_logs_are_whole(name):
    folder = zoo.ROOT / name
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS"]
    check_sums(folder, [p.relative_to(folder).as_posix() for p in files], "")
    card = zoo.read_card(name)
    assert all(f"**{k}**" in card for k in ("Data", "Training", "Rebuild", "Limits", "Licence"))
    rows = [json.loads(line) for line in zoo.log(name).read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["step"] == zoo.steps(name)[-1]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert zoo.steps(name) == sorted(zoo.steps(name))


def test_the_zoo_is_light():
    assert sum(p.stat().st_size for p in zoo.ROOT.rglob("*") if p.is_file()) < 40e6


def test_missing_and_damaged_checkpoints_are_refused(tmp_path, monkeypatch):
    shutil.copytree(zoo.ROOT / "induction-0", tmp_path / "induction-0")
    monkeypatch.setattr(zoo, "ROOT", tmp_path)
    weights = zoo.folder("induction-0") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    cure = "python -m training induction-0"
    with pytest.raises(IclError, match=f"damaged.*{cure}"):
        models.load("induction-0")
    weights.unlink()
    with pytest.raises(IclError, match=f"is missing.*{cure}"):
        models.load("induction-0")
