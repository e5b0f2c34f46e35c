"""Files are whole or not there; checksums notice every kind of damage."""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from iclutils.errors import IclError
from iclutils.files import check_sums, read_json, replacing, write_json, write_sums

CURE = "Copy it again."
FILES = Path(sys.modules["iclutils.files"].__file__ or "")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), {1, 2}])
def test_what_json_cannot_hold_leaves_the_old_file(tmp_path, bad):
    path = tmp_path / "value.json"
    write_json(path, {"old": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, {"new": bad})
    assert [read_json(path) for path in tmp_path.iterdir()] == [{"old": 1}]


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


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"old": 1})
    # The module is run by its path: no need to import the whole package in the process.
    program = f"""
import os, pathlib, signal, sys, types
sys.modules["pkg"] = types.ModuleType("pkg"); sys.modules["pkg"].__path__ = [{str(FILES.parent)!r}]
from pkg.files import replacing
with replacing(pathlib.Path({str(path)!r})) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert read_json(path) == {"old": 1}
    write_json(path, {"new": 2})  # what the killed process left behind is not in the way
    assert read_json(path) == {"new": 2}


def test_broken_json_says_which_file_and_what_to_do(tmp_path):
    for name, cure in (("half.json", "Delete it"), ("config.json", "Mend it, or copy")):
        (tmp_path / name).write_text('{"value": 1')
        with pytest.raises(IclError, match=f"{name} is not valid JSON.*{cure}"):
            read_json(tmp_path / name)


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
    ("damage", "message"),
    [
        (lambda f: (f / "weights").write_bytes(b"\x00\x02"), "does not match"),
        (lambda f: (f / "weights").unlink(), "is missing"),
        (lambda f: (f / "SHA256SUMS").write_text(""), "is not listed"),
        (lambda f: (f / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
    ],
)
def test_damage_is_named_with_its_cure(folder, damage, message):
    damage(folder)
    with pytest.raises(IclError, match=f"{message}.*{CURE}"):
        check_sums(folder, ["weights"], CURE)
