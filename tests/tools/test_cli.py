"""The command line: each mistake is one line on stderr and status 2."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from book._tools import __main__ as tools
from book._tools import results, run
from iclutils import __main__

ROOT = Path(__file__).parents[2]
LINES = (__main__.LINE, tools.LINE)
Out = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Nothing here may write into the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "results"))


def main(words):
    """The command line that has this command."""
    return (__main__.main if words[0] in __main__.LINE.commands else tools.LINE.main)(words)


def test_every_example_is_one_that_is_understood():
    for line in LINES:
        words = [f"{name} {x}" for name, it in line.commands.items() for x in it.examples]
        for text in [*line.examples, *words]:
            known = tools.LINE if text.startswith("run") else line
            if text != "run --help":
                assert callable(known.parser().parse_args(shlex.split(text)).act)


def test_chapters_are_run_by_the_checkout(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(__main__, "CHECKOUT", tmp_path)
    assert __main__.main(["run", "01", "--model", "x"]) == 2
    assert "in a checkout of the book" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "01", "-p", "seed"], "-p takes NAME=VALUE; got 'seed'"),
        (["run", "01", "--seed", "-3"], "seed must be a natural number; got -3"),
        (["run", "01", "--model", "./nowhere"], "There is no folder './nowhere'"),
        (["show", "01", "--out", "figure.pdf"], "written as .png or .svg; got 'figure.pdf'"),
        (["train", "induction-9"], "Unknown recipe 'induction-9'. Did you mean 'induction-"),
        (["train", "lsa-1", "--jobs", "2"], "--jobs and --cluster are for several recipes"),
        (["show", "02", "--demonstration", "no label"], "--demonstration takes TEXT=LABEL"),
        (["book"], "Run this in the checkout"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_what_is_asked_becomes_parameters_of_their_type(monkeypatch, tmp_path, capsys):
    ran = mock.Mock(side_effect=lambda names, given, build, force: [
        run.Run(name, {}, tmp_path, fresh=not force) for name in names
    ])  # fmt: skip
    monkeypatch.setattr(run, "run_chapters", ran)
    monkeypatch.setattr(run, "chapters", lambda: ["90_demo", "91_other"])
    monkeypatch.setattr(results, "conclude", lambda runs, accept: 0)
    options = ["--tier", "paper", "--seed", "3", "-p", "weight=0.5", "-p", "name=a b", "--force"]
    assert main(["run", "90", *options]) == main(["run"]) == 0
    values = {"tier": "paper", "seed": 3, "weight": 0.5, "name": "a b"}
    every, build = ["90_demo", "91_other"], tools.BUILD
    assert ran.mock_calls == [
        mock.call(["90"], values, build, force=True), mock.call(every, {}, build, force=False)
    ]  # fmt: skip
    assert re.findall(r"^(.*): ", capsys.readouterr().out, re.M) == ["up to date", "ran", "ran"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; .*run again to continue"),
        (
            OSError(errno.ENOSPC, "Full", "x.json"),
            2,
            r"error: x\.json: Full\. Make room on the disk",
        ),
    ],
)
def test_an_interruption_or_a_full_disk_is_one_line(error, status, said, monkeypatch, capsys):
    monkeypatch.setattr(run, "run_chapters", mock.Mock(side_effect=error))
    assert main(["run", "01"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(said, line)


def test_quiet_silences_the_bars_of_libraries_too():
    code = "import iclutils, tqdm\nfor _ in tqdm.tqdm(range(3)): pass"
    for quiet, shown in (("1", False), ("", True)):
        asked = os.environ | {"ICLUTILS_QUIET": quiet, "TQDM_DISABLE": ""}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=asked)
        assert bool(done.stderr) == shown
