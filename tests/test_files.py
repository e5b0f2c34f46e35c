"""Files are whole or not there; checksums notice every kind of damage."""

import contextlib
import shutil
import subprocess

import pytest

from iclutils.errors import IclError
from iclutils.files import check_sums, read_json, replacing, write_sums

CURE = "Copy it again."


def test_a_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "deep" / "text.txt"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == path.parent, "a rename is atomic only within a file system"
    with contextlib.suppress(OSError), replacing(path) as temporary:
        temporary.write_text("half of the new")
        raise OSError("disk full")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o044, "others may read it"


def test_broken_json_says_which_file_and_what_to_do(tmp_path):
    (tmp_path / "half.json").write_text('{"value": 1')
    with pytest.raises(IclError, match=r"half.json is not valid JSON.*Delete it"):
        read_json(tmp_path / "half.json")


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    (place / "sub").mkdir(parents=True)
    (place / "weights").write_bytes(b"\x00\x01")
    (place / "sub" / "log").write_text("loss 1\n")
    write_sums(place)
    return place


def test_whole_files_pass_as_they_do_for_sha256sum(folder):
    check_sums(folder, ["weights", "sub/log"], CURE)
    if shutil.which("sha256sum"):
        done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "weights").write_bytes(b"\x00\x02"),
        lambda f: (f / "weights").unlink(),
        lambda f: (f / "SHA256SUMS").write_text(""),
        lambda f: (f / "SHA256SUMS").unlink(),
    ],
)
def test_damage_is_named_with_its_cure(folder, damage):
    damage(folder)
    with pytest.raises(IclError, match=f"weights is missing, or damaged.*{CURE}"):
        check_sums(folder, ["weights"], CURE)
