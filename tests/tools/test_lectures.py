"""Lectures: a small chapter with two sections and an exercise, counted by hand."""

import json

import pytest

from book._tools import lectures, run
from iclutils.files import write_json, write_text

pytest.importorskip("bs4")
LINK = "<td><a href='../notebooks/01_demo.html#{}'>x</a></td>"
ROW = f"<tr><td>{{}}</td>{LINK}<td>{{}}</td><td>{{}}</td></tr>"
HEAD = "<tr><th>Lecture</th></tr>"
PAGE = """<html data-content_root="../"><head><title>Demo</title>
<link href="../_static/a.css"></head><body>
<a href="#solutions">Solutions</a><a href="#solutions">Again</a><a href="02_other.html#there">on</a>
<h1>Demo</h1><article><section id="demo"><h1>Demo#</h1><p>A question?</p>
<figure id="fig-one"><img src="../_images/one.png">
<figcaption><span class="caption-text">One head. Then more.</span></figcaption></figure>
<section id="first-heading"><span id="first"></span><h2>Which one?#</h2><p>Told.</p>
<details class="hide"><div class="cell_output">said</div></details>
<figure id="fig-two"><img src="../_images/two.png">
<figcaption><span class="caption-text">Two heads.</span></figcaption></figure>
<div class="live-figure docutils container" id="live-points"><a href="#second">See two.</a></div>
</section>
<section id="second-heading"><span id="second"></span><h2>And then?#</h2></section>
<section id="exercises"><h2>Exercises#</h2>
<div class="exercise admonition" id="01-ex-a"><p class="admonition-title">Exercise (Even)</p>
<section><p><em>Easy, 5 minutes.</em> What is it?</p></section></div>
<div class="cell">stub</div><div class="cell">test</div>
<div class="exercise admonition" id="01-ex-open"><p class="admonition-title">Exercise (Open)</p>
<section><p>Open.</p></section></div><div class="cell">start</div></section>
<section id="takeaways"><h2>Takeaways#</h2><ol><li>One.</li></ol></section>
<section id="what-to-believe-and-what-is-open"><h2>What to believe#</h2><p>This.</p></section>
<section id="solutions"><h2>Solutions#</h2>
<div class="solution dropdown admonition"><p class="admonition-title">Solution</p></div></section>
</section></article></body></html>"""


def cell(kind, name, source, **metadata):
    return {"cell_type": kind, "id": name, "source": source, "metadata": metadata}


CELLS = [
    cell("markdown", "title", "# Demo"),
    cell("markdown", "one", "(01-first)=\n## Which one?\n" + "word " * 98),
    cell("code", "seen", "a = 1\n\nb = 2"),
    cell("code", "drawn", "c = 3", tags=["hide-input"], mystnb={"figure": {"name": "fig-two"}}),
    cell("markdown", "two", "told here\n\n(01-second)=\n## And then?\n\n$$\nx\n$$"),
    cell("markdown", "ex", "````{exercise} Even\n````", tags=["exercise"]),
    cell("code", "ex-stub", "x\n" * 50, tags=["exercise"]),
    cell("markdown", "ex-solution", "````{solution} 01-ex-a\n````", tags=["solution"]),
]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A build folder that holds the pages of a book with one chapter."""
    html, notebooks = tmp_path / "html", tmp_path / "notebooks"
    rows = [ROW.format(1, "first", "Why?", "So."), ROW.format(1, "01-ex-a", "", "")]
    rows.append(ROW.format(2, "second", "How?", "Thus."))
    table = f"<table>{HEAD}{''.join(rows)}</table>"
    write_text(html / "book/lectures.html", table)
    wrong = "<tr><td>Never.</td><td><a href='../notebooks/01_demo.html#second'>x</a></td>"
    table = f"<table>{HEAD}{wrong}<td>Really?</td></tr></table>"
    write_text(html / "book/instructor.html", f"<section id='misconceptions'>{table}</section>")
    write_text(html / "notebooks/01_demo.html", PAGE)
    write_text(html / "_static/slides.css", "")
    for name in ("points.js", "live.css"):
        write_text(html / f"_static/live/{name}", name)
    for name in ("one", "two"):
        write_text(html / f"_images/{name}.png", name)
    write_text(notebooks / "01_demo.ipynb", json.dumps({"cells": CELLS}))
    write_json(tmp_path / "runs/mini/01_demo.json", {"cells": {"seen": 30.0, "drawn": 90.0}})
    monkeypatch.setattr(run, "NOTEBOOKS", notebooks)
    return tmp_path


def test_a_section_is_counted_by_words_code_formulas_figures_and_cells(build):
    (chapter,) = lectures.read(build / "html", [], build)
    first, exercise, second = chapter.parts
    # "Demo", the heading's two words, 98 more and the next cell's two; two lines of code; a figure;
    # the question; two minutes of cells.
    assert first.minutes == pytest.approx(103 / 100 + 2 / 6 + 2 + 3 + 2)
    assert (exercise.minutes, exercise.title) == (5, "Even")
    assert second.minutes == pytest.approx((2 + 1) / 100 + 2 + 3)  # two words, x, and a formula
    assert [title.title for title in (first, second)] == ["Which one?", "And then?"]
    assert second.wrong == ["Never. <em>Really?</em>"]
    assert [number for number, *_ in chapter.lectures()] == [1, 2]


def test_the_tutor_sees_outputs_solutions_beside_exercises_and_what_to_ask(build):
    (path,) = lectures.tutor(build, [])
    page = path.read_text(encoding="utf-8")
    order = ["Lecture 1, 8 minutes", "Why?", "So.", "fig-two", "Never.", 'id="01-ex-a"', "stub"]
    order += ["test", '<div class="solution admonition">', 'id="01-ex-open"']
    places = [page.index(what) for what in order]
    assert places == sorted(places)
    assert '<details class="hide" open="">' in page
    assert "solutions" not in page
    assert page.index("together; 77 of 90") < page.index("A question?")
    assert 'href="#first-heading"' in page
    links = ["../html/_static/a.css", "../html/_images/one.png", "../html/notebooks/02_other.html"]
    assert all(link in page for link in links)


def test_slides_ask_show_and_answer_without_a_network(build):
    pytest.importorskip("sphinx_revealjs")
    one, two = lectures.slides(build, ["01_demo"])
    first, second = (path.read_text(encoding="utf-8") for path in (one, two))
    order = ["Lecture 1:", "One head.", "Which one?", "Why?", "two.png", "So.", "Try it: Which"]
    order += ['id="live-points">See two.', "Exercise: Even", "/live/live.js", "/live/points.js"]
    places = [first.index(what) for what in order]
    assert places == sorted(places)
    assert "Then more." not in first
    assert all(
        what in second
        for what in ("So far", "Why?", "Thus.", "Takeaways", "Some say: Never. Really?")
    )
    assert not any('src="http' in page or '<link href="http' in page for page in (first, second))
    assert "live" not in second
    assert (one.parent / "_images/one.png").is_file()
    for name in ("live/points.js", "revealjs/dist/reveal.js", "slides.css"):
        assert (one.parent / "_static" / name).is_file()
