"""The doctor: each fault, faked, is found and has a cure; a sound machine passes."""

from __future__ import annotations

import builtins
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib import request

import pytest

from iclutils import __main__, zoo
from iclutils.bookkit import doctor
from iclutils.bookkit.doctor import Finding

ROOT = Path(__file__).parents[1]
Usage = namedtuple("Usage", "total used free")


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``without("torch")`` makes the import of that module fail."""

    def hide(name: str) -> None:
        real = builtins.__import__

        def fail(wanted: str, *rest: Any, **more: Any) -> Any:
            if wanted.split(".")[0] == name:
                raise ImportError(f"No module named {name!r}")
            return real(wanted, *rest, **more)

        monkeypatch.setattr(builtins, "__import__", fail)

    return hide


def test_this_machine_is_healthy_and_the_folder_is_left_alone(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path / "deep" / "_build")
    assert doctor.healthy(findings), doctor.report(findings)
    assert list(tmp_path.iterdir()) == []
    assert doctor.report(findings).endswith("The mini tier can run.")


def test_the_network_is_not_asked_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(request, "urlopen", refuse)
    doctor.examine(tmp_path)
    with pytest.raises(AssertionError, match="asked"):
        doctor.hub(network=True)


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 7))
    monkeypatch.setattr(sys, "version", "3.9.7 (somewhere)")
    found = only(doctor.python())
    assert found.state == "missing"
    assert found.what == "Python 3.9.7, needed >=3.11"
    assert "make setup PYTHON=" in found.cure


def fake_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        faked = versions.get(name.replace("-", "_"), "real")
        if faked is None:
            raise metadata.PackageNotFoundError(name)
        return real(name) if faked == "real" else faked

    monkeypatch.setattr(metadata, "version", version)


def test_a_missing_package_and_a_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, einops=None, transformer_lens="3.2.0")
    first, *extras = doctor.packages()
    assert first.state == "missing"
    assert "einops is not installed" in first.what
    assert "transformer-lens 3.2.0, needed <5,>=4.3" in first.what
    assert first.cure == 'pip install "einops>=0.8" "transformer-lens<5,>=4.3"'
    assert {finding.state for finding in extras} == {"ok"}


def test_a_build_of_torch_is_inside_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, torch="2.13.0+cu130")
    assert doctor.packages()[0].state == "ok"
    fake_versions(monkeypatch, torch="2.14.1")
    assert "torch 2.14.1, needed <2.14,>=2.6" in doctor.packages()[0].what


def test_what_is_optional_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, dask=None, otter_grader="6.0")
    findings = doctor.packages()
    assert doctor.healthy(findings)
    notes = [finding for finding in findings if finding.state == "note"]
    assert len(notes) == 2
    assert "(extra cluster): dask is not installed" in notes[0].what
    assert "otter-grader 6.0, needed <8,>=7" in notes[1].what
    assert 'pip install "iclutils[cluster]"' in notes[0].cure


def test_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == set(doctor.EXTRAS)
    assert project["requires-python"] == metadata.metadata("iclutils")["Requires-Python"]
    counts = [len(project["dependencies"]), *map(len, project["optional-dependencies"].values())]
    for finding, count in zip(doctor.packages(), counts, strict=True):
        assert f"all {count} within" in finding.what


def test_a_torch_that_does_not_start(without: Callable[[str], None]) -> None:
    without("torch")
    found = only(doctor.device())
    assert found.state == "missing"
    assert "torch does not start: No module named 'torch'" in found.what


def test_apple_is_told_that_its_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    first, second = doctor.device()
    assert first.state == "ok"
    assert second.state == "note"
    assert "wrong attention" in second.what


@pytest.mark.parametrize(
    ("gib", "state"), [(0, "note"), (1, "missing"), (doctor.MEMORY_GIB["mini"], "ok"), (512, "ok")]
)
def test_memory(monkeypatch: pytest.MonkeyPatch, gib: int, state: str) -> None:
    from iclutils.bookkit import machine

    monkeypatch.setattr(machine, "memory_gib", lambda: gib)
    found = only(doctor.memory())
    assert found.state == state
    assert bool(found.cure) == (state == "missing")


def test_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    little = Usage(2**40, 2**40, 2**28)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
    found = only(doctor.disk(tmp_path / "_build"))
    assert found.state == "missing"
    assert "0.2 GiB, the mini tier needs 1" in found.what


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    _, found = doctor.disk(tmp_path)
    assert found.state == "missing"
    assert "cannot be written: Permission denied" in found.what


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of two shipped models, in the place of all."""
    for name in ("lsa-1", "lsa-2"):
        shutil.copytree(zoo.ROOT / name, tmp_path / name)
    monkeypatch.setattr(zoo, "ROOT", tmp_path)
    return tmp_path


def test_whole_models(models: Path) -> None:
    assert only(doctor.zoo()) == Finding("ok", "shipped models: all 2 whole")


def test_a_damaged_model(models: Path) -> None:
    weights = next((models / "lsa-2").glob("step-*/model.safetensors"))
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    found = only(doctor.zoo())
    assert found.state == "missing"
    assert "does not match its recorded SHA-256" in found.what
    assert "python -m iclutils train lsa-2" in found.cure


def test_models_that_are_gone(models: Path) -> None:
    next((models / "lsa-1").glob("step-*/config.json")).unlink()
    assert "is missing" in only(doctor.zoo()).what
    for folder in list(models.iterdir()):
        shutil.rmtree(folder)
    assert "no shipped model" in only(doctor.zoo()).what


@pytest.mark.parametrize(
    ("program", "state"),
    [("python", "ok"), (sys.executable, "ok"), ("/nowhere/bin/python", "missing")],
)
def test_the_kernel(monkeypatch: pytest.MonkeyPatch, program: str, state: str) -> None:
    from jupyter_client import kernelspec

    spec = kernelspec.KernelSpec(argv=[program, "-m", "ipykernel_launcher"])
    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", lambda self, name: spec)
    found = only(doctor.kernel())
    assert found.state == state
    assert (f"{sys.executable} -m ipykernel install" in found.cure) == (state == "missing")


def test_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_client import kernelspec

    def none(self: object, name: str) -> None:
        raise kernelspec.NoSuchKernel(name)

    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", none)
    assert only(doctor.kernel()).what == "no Jupyter kernel named python3"


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "switched off by HF_HUB_OFFLINE" in only(doctor.hub(network=True)).what
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert "was not asked" in only(doctor.hub(network=False)).what
    monkeypatch.setattr(doctor, "HUB", "http://127.0.0.1:9")  # nobody listens there
    found = only(doctor.hub(network=True))
    assert found.state == "note"
    assert "http://127.0.0.1:9, does not answer" in found.what


def test_the_folder_of_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ICLUTILS_DATA", str(tmp_path))
    assert only(doctor.data()).state == "ok"
    monkeypatch.setenv("ICLUTILS_DATA", str(tmp_path / "gone"))
    assert only(doctor.data()).state == "note"


def test_programs_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    findings = doctor.programs()
    assert [finding.state for finding in findings] == ["note"] * 3
    assert doctor.healthy(findings)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    fault = Finding("missing", "a thing", "get one")
    monkeypatch.setattr(doctor, "examine", lambda build, network: [Finding("ok", "rest"), fault])
    assert __main__.main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok       rest\nmissing  a thing\n         -> get one\n\n"
        "The mini tier cannot run yet: 1 missing.\n"
    )
    monkeypatch.setattr(doctor, "examine", lambda build, network: [Finding("ok", "rest")])
    assert __main__.main(["doctor"]) == 0


def test_the_command_starts_where_nothing_else_can(tmp_path: Path) -> None:
    """Without torch, transformers and numpy the doctor still answers, and names them."""
    code = """
import sys
for name in ("torch", "numpy", "transformers", "transformer_lens"):
    sys.modules[name] = None  # an import of it fails
from iclutils.__main__ import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "missing  torch does not start" in done.stdout
    assert done.stderr == ""
