"""No line of a chapter answers a question of the homework."""

import json

import checks
import pytest
from pasting import NOTEBOOKS, pasted

CHAPTERS = sorted(NOTEBOOKS.glob("0*.ipynb"))


@pytest.mark.nightly
@pytest.mark.parametrize("homework", checks.homeworks())
def test_no_line_of_its_chapter_answers_a_homework(homework):
    for chapter in NOTEBOOKS.glob(f"{homework[2:]}_*.ipynb"):
        assert pasted(homework, chapter) == []


@pytest.mark.nightly
@pytest.mark.parametrize("homework", checks.homeworks())
def test_no_line_of_any_chapter_answers_a_homework(homework):
    others = [each for each in CHAPTERS if not each.name.startswith(homework[2:])]
    assert {each.stem: found for each in others if (found := pasted(homework, each))} == {}


@pytest.mark.parametrize(
    ("homework", "cell", "answer"),
    [
        ("hw06", "import torch\ndata, flips = load()\nmeans = (flips * data).mean(-1).abs()\n"
         "more = (means >= data.mean().abs()).sum().item()\n"
         "print((1 + more) / (1 + len(flips)))", "sign_flip_p"),
        ("hw04", "def layer(x, Q, K, V, P):\n    left = x @ K.T\n"
         "    return x + left @ (x[:-1] @ Q.T).T @ (x[:-1] @ V.T) @ P.T", "attend"),
        ("hw01", "for q in range(3):\n    length = a.shape[-1] // 2\n    back = range(length + 2)\n"
         "    rows = [a[:, :, length + 1:].diagonal(length + 1 - d, -2, -1) for d in back]\n"
         "    best = torch.stack([x.mean((0, 2)) for x in rows], -1).argmax(-1)", "looks_back"),
        ("hw05", "def phi(omega, x, ways=(1, -1)):\n"
         "    half = x.square().sum(1, keepdim=True) / 2\n"
         "    both = [(x @ omega.T * w - half).exp() for w in ways]\n"
         "    return torch.cat(both, 1) / (2 * len(omega)) ** 0.5", "features"),
    ],
)  # fmt: skip
def test_a_line_that_answers_one_is_seen_under_any_names(tmp_path, homework, cell, answer):
    about = {"cell_type": "code", "metadata": {}}
    cells = [{**about, "source": "import torch"}, {**about, "source": cell}]
    (tmp_path / "01_x.ipynb").write_text(json.dumps({"cells": cells}))
    found = pasted(homework, tmp_path / "01_x.ipynb")
    assert found
    assert all(each.startswith(answer) for each in found)
