"""The doctor: each fault, faked, is found and has a cure; and the machine, as it says it is."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel

from book._tools import doctor as tools
from book._tools import machine
from iclutils import doctor, room, zoo
from iclutils.doctor import Finding

Patch = pytest.MonkeyPatch


def test_this_machine_is_healthy_and_the_folder_is_left_alone(tmp_path):
    findings = doctor.examine(tmp_path / "deep" / "_build")
    assert doctor.healthy(findings), doctor.report(findings)
    assert list(tmp_path.iterdir()) == []
    assert doctor.report(findings).endswith("The mini tier can run.")


@pytest.mark.parametrize(
    ("faked", "states", "what", "cure"),
    [
        ({"torch": "2.13.0+cu130"}, "ok ok ok ok ok ok", "all", ""),
        ({"einops": None}, "missing ok ok ok ok ok", "einops is not", 'pip install "einops'),
        ({"dask": None}, "ok ok note ok ok ok", "cluster): dask is not", '"iclutils[cluster]"'),
    ],
)
def test_versions(monkeypatch, faked, states, what, cure):
    ((name, fake),) = faked.items()
    real = metadata.version

    def version(asked):
        if asked == name and fake is None:
            raise metadata.PackageNotFoundError(name)
        return str(fake) if asked == name else real(asked)

    monkeypatch.setattr(metadata, "version", version)
    findings = list(doctor.packages())
    assert " ".join(finding.state for finding in findings) == states
    wrong = [finding for finding in findings if finding.state != "ok"] or findings
    assert what in wrong[0].what
    assert cure in wrong[0].cure


def test_memory_and_the_folder_of_outputs(monkeypatch, tmp_path):
    for gib, state in ((0, "note"), (1, "missing"), (4, "ok"), (512, "ok")):
        monkeypatch.setattr(doctor, "memory_gib", lambda gib=gib: gib)
        found = next(doctor.room(tmp_path))
        assert (found.state, bool(found.cure)) == (state, state == "missing")
    full = mock.Mock(free=2**28)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    refused = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    _, space, written = doctor.room(tmp_path / "_build")
    assert (space.state, written.state) == ("missing", "missing")
    assert "0.2 GiB, the mini tier needs 1" in space.what
    assert "cannot be written: Permission denied" in written.what


def test_shipped_models(monkeypatch, tmp_path):
    for name in ("lsa-1", "lsa-2"):
        shutil.copytree(zoo.ROOT / name, tmp_path / name)
    monkeypatch.setattr(zoo, "ROOT", tmp_path)
    assert next(doctor.models()) == Finding("ok", "shipped models: all 2 whole")
    weights = next((tmp_path / "lsa-2").glob("step-*/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    found = next(doctor.models())
    assert found.state == "missing"
    assert "does not match its recorded SHA-256" in found.what
    assert "python -m training lsa-2" in found.cure
    for folder in list(tmp_path.iterdir()):
        shutil.rmtree(folder)
    assert "no shipped model" in next(doctor.models()).what


def test_the_command_starts_where_nothing_else_can(tmp_path):
    code = """
import sys
gone = ("torch", "numpy", "transformers", "transformer_lens", "packaging")
sys.modules |= dict.fromkeys((*gone, "packaging.requirements"))  # an import of them fails
from iclutils.__main__ import main
sys.exit(main(["doctor"]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    for what in ("torch does not start", "packaging cannot be"):
        assert f"missing  {what}" in done.stdout


def test_the_machine_agrees_with_the_system(monkeypatch):
    said = machine.describe()
    assert str(said["cpu"]).split("\n") == [said["cpu"]] != [""]
    assert 1 <= int(said["cores"]) <= (os.cpu_count() or 1)
    assert bool(said["gpu"]) == torch.cuda.is_available()
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        kib = int(meminfo.read_text().split()[1])  # the first line is MemTotal
        assert said["memory_gib"] == pytest.approx(kib / 2**20, abs=0.5)
    monkeypatch.setattr(os, "sysconf", lambda _: (_ for _ in ()).throw(ValueError))
    assert room.memory_gib() == 0


@pytest.mark.parametrize(
    ("program", "state"),
    [("python", "ok"), (sys.executable, "ok"), ("/nowhere/bin/python", "missing"), ("", "missing")],
)
def test_the_kernel(monkeypatch, program, state):
    def get(_, name):
        if not program:
            raise NoSuchKernel(name)
        return KernelSpec(argv=[program, "-m", "ipykernel_launcher"])

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", get)
    found = next(tools.kernel())
    assert found.state == state
    assert (f"{sys.executable} -m ipykernel install" in found.cure) == (state == "missing")
