"""No line of a chapter answers a question of the homework."""

import json

import checks
import pytest
from pasting import NOTEBOOKS, pasted

pytestmark = pytest.mark.filterwarnings("ignore")  # of lines on inputs that they are not made for
CHAPTERS = sorted(NOTEBOOKS.glob("0*.ipynb"))
MASTERS = [path.stem[:4] for path in sorted(NOTEBOOKS.glob("assignments/hw*.ipynb"))]


@pytest.mark.nightly
@pytest.mark.parametrize("homework", MASTERS)
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_no_line_of_a_chapter_answers_a_homework(chapter, homework):
    assert pasted(homework, chapter) == []


@pytest.mark.nightly
@pytest.mark.parametrize("homework", MASTERS)
def test_a_solution_that_stands_in_a_chapter_is_seen(homework):
    """With the solved master in the place of the chapter, every function is found."""
    (master,) = NOTEBOOKS.glob(f"assignments/{homework}_*.ipynb")
    asked = [part for parts in checks.questions(homework).values() for part in parts]
    found = {each.partition(":")[0] for each in pasted(homework, master)}
    assert found == {part.name for part in asked if part.inputs}


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
