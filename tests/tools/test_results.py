"""Results beside the committed ones: what differs in one table, what is stored, what is stale."""

import re
from itertools import product
from pathlib import Path

import pytest
from ledger import RECORD, ran

from book._ext import pages
from book._tools import __main__ as tools
from book._tools import dependencies, results, run
from iclutils import presets, science
from iclutils.errors import IclError
from iclutils.files import read_json, write_json
from iclutils.interp import head_scores

ROOT = Path(__file__).parents[2]


def stored(root, *runs):
    return [path.relative_to(root).as_posix() for path in results.store(runs)]


def test_what_is_stored_are_outputs_results_and_the_record(root):
    done = ran(root, 2.0)
    name, kept = "book/results/mini/90.first.json", "book/runs/mini/90_demo.json"
    assert stored(root, done) == [
        "notebooks/90_demo.ipynb",
        kept,
        name,
        "book/results/mini/90.second.json",
    ]
    notebook = read_json(done.source)
    assert [cell["metadata"] for cell in notebook["cells"]] == [{"tags": ["parameters"]}, {}]
    assert [cell["execution_count"] for cell in notebook["cells"]] == [1, 2]
    assert stored(root, done) == []
    # What differs in date, commit and seconds alone stays; other code, or a clean commit, does not.
    result = read_json(root / name)
    write_json(root / name, result | {"date": "2020-01-01", "commit": "0" * 40})
    assert stored(root, ran(root, 2.0, seconds=9.0, commit="2" * 40)) == []
    assert stored(root, ran(root, 2.0, science={"measure": "2"})) == [kept]
    write_json(root / name, result | {"commit": "0" * 40 + "+"})
    assert stored(root, ran(root, 2.0, science={"measure": "2"})) == [name]
    gone = ["book/results/mini/90.renamed.json", "book/runs/mini/91_gone.json"]
    for path in gone:
        write_json(root / path, result | {"id": "90.renamed"})
    (found,) = results.compare(done)[1]
    assert (found.name, found.now, found.is_wrong) == ("90.renamed", results.GONE, True)
    assert stored(root, ran(root, 2.0, science={"measure": "2"})) == gone


def test_a_notebook_that_was_edited_since_is_not_stored(root):
    done = ran(root, 2.0)
    done.source.write_text(done.source.read_text().replace("1 + 1", "1 + 2"))
    with pytest.raises(IclError, match=r"was edited since its last run. Run: make book"):
        results.store([done])
    done.notebook.unlink()
    with pytest.raises(IclError, match=r"has not been run. Run: make book"):
        results.store([done])


def test_which_verdicts_another_seed_moves(root, capsys):
    results.store([ran(root, 2.0)])
    compare = ["compare", "--seed", "1"]
    assert tools.LINE.main(compare) == 0
    assert capsys.readouterr().out == "0 of 0 verdicts differ\n", "no run has that seed"
    ran(root, 0.5)
    (root / "_build").rename(root / "seed-1")
    (root / "_build").mkdir()
    (root / "seed-1").rename(root / "_build/seed-1")
    assert tools.LINE.main(compare) == 0
    said = capsys.readouterr().out
    assert re.search(r"90\.first +mini +2\.00 +0\.500 +holds -> holds in a weaker form\n", said)
    assert "2 of 2 verdicts differ" in said


def test_a_run_ends_with_one_table_and_another_verdict_is_status_1(root, capsys):
    compare = ["compare", "90"]
    ran(root, 2.0)
    assert tools.LINE.main([*compare, "--accept"]) == 0, "nothing was committed"
    ran(root, 2.0 + 1e-5)
    capsys.readouterr()
    assert tools.LINE.main(compare) == 0
    assert capsys.readouterr().out == "nothing differs (2 values compared)\n"
    ran(root, 2.1)
    assert tools.LINE.main(compare) == 0, "the same verdicts"
    assert "2 of 2 values differ" in capsys.readouterr().out
    ran(root, 0.5)
    assert tools.LINE.main(compare) == 1
    said = capsys.readouterr().out
    assert re.search(r"90\.first +mini +2\.00 +0\.500 +holds -> holds in a weaker form\n", said)
    assert re.search(r"90\.second +mini +2\.00 +0\.500 +holds -> does not hold\n", said)
    assert tools.LINE.main([*compare, "--accept"]) == 0
    assert tools.LINE.main(compare) == 0
    # Words of older runs count for nothing: both sides are judged by the criteria of today.
    path = root / "book/results/mini/90.first.json"
    write_json(path, read_json(path) | {"verdict": "holds partly"})
    assert tools.LINE.main(compare) == 0


def test_a_part_that_gives_the_same_renews_the_whole(root, capsys):
    whole, values = ran(root, 2.0, "real"), {"90.first": 2.0}
    part = ran(root, 2.0, presets.PART.column, values=values)
    assert part.kind == "real-part"
    assert results.conclude([whole, part], accept=True) == 0
    now = {"measure": "2", "sizes": "7"}
    again = {"values": {"90.first": 2.0 + 1e-5}, "science": now, "date": "2026-02-02"}
    part = ran(root, 2.0, presets.PART.column, **again)
    capsys.readouterr()
    assert results.conclude([part]) == 0
    assert capsys.readouterr().out.startswith("nothing differs (1 values compared)\nupdated ")
    record = read_json(whole.committed)
    assert record["science"] == now | {"sizes": "1"}, "sizes are those of the whole"
    assert record["equal"] == {"in": "a part", "date": "2026-02-02", "commit": "1" * 40}
    assert record["date"] == "2026-01-01"
    part = ran(root, 2.0, presets.PART.column, values={"90.first": 2.1}, science=RECORD["science"])
    assert results.conclude([part]) == 1, "another value"
    assert read_json(whole.committed) == record
    # Values of a part that are not those of the code of the whole say nothing about it.
    write_json(whole.committed, record | {"science": {"measure": "3", "sizes": "1"}})
    part = ran(root, 2.0, presets.PART.column, **again)
    with pytest.raises(IclError, match=r"was measured by other code than the whole"):
        results.conclude([part])


def test_what_is_stale_is_named_with_what_changed(root, monkeypatch):
    done = ran(root, 2.0, "real")
    assert results.stale(done) == "", "nothing is committed"
    results.store([done])
    results.store([ran(root, 2.0, presets.PART.column, values={})])
    monkeypatch.setattr(run.Run, "code", lambda _: {"measure": "2", "new": "3", "sizes": "1"})
    assert results.stale(done) == (
        "90_demo (real): changed since it was measured: measure, new. Run: python -m iclutils run "
        "90_demo --tier real-part; if that differs: python -m iclutils run 90_demo --tier real "
        "--accept"
    )
    done.committed.unlink()
    assert "results without a record" in results.stale(done)


def test_a_number_deep_in_the_science_is_named_for_the_chapters_that_it_reaches(monkeypatch):
    path = Path(head_scores.__file__)
    changed = science.sources()[path].replace(b"length, length - 1)", b"length, length - 2)", 1)
    assert changed != science.sources()[path]
    named = "01_gpt2_induction", "04_gradient_step", "07_every_lens"
    runs = [run.Run(name, {"tier": "mini"}, ROOT / "_build") for name in named]
    before = {each.chapter: each.code() for each in runs}
    code = science.sources() | {path: changed}
    caches = dependencies.of_notebook, science._module, science._definition, science._session
    with monkeypatch.context() as patch:
        patch.setattr(science, "sources", lambda: code)
        for cache in caches:
            cache.cache_clear()
        after = {each.chapter: each.code() for each in runs}
    for cache in caches:
        cache.cache_clear()
    for name, found in before.items():
        differ = {each for each in found if after[name][each] != found[each]}
        assert differ == (set() if name == "04_gradient_step" else {"prefix_matching"})


def committed_runs():
    """All runs with committed results; those that ``book/runs/owed.txt`` names are known to be of
    other code, until they are measured again."""
    late = pages.owed(ROOT / "book/runs")
    mark = pytest.mark.xfail(reason="its code has changed since; to be measured", strict=True)
    for tier, weights in product(presets.TIERS, ("trained", "random")):
        given = {"tier": tier, "model": "", "weights": weights}
        for each in (run.Run(name, given, ROOT / "_build") for name in run.chapters()):
            known = f"{each.kind} {each.chapter}"
            yield pytest.param(each, id=known, marks=[mark] if known in late else [])


@pytest.mark.parametrize("each", committed_runs())
def test_the_committed_results_are_those_of_the_code_of_today(each):
    assert not results.stale(each)
