"""Formulas that a narrow page can break."""

from __future__ import annotations

import pytest

from book._ext.equations import _hold, breakable, mathml


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"a = b", ["a = b"]),
        (r"a = b = c", ["a = b ", "= c"]),
        (r"a = b, \qquad c = d", ["a = b, ", " c = d"]),
        (r"a \quad b \quad c", ["a ", " b ", " c"]),
        (r"f(x = y) = \left[ p = q \right] = 0", [r"f(x = y) = \left[ p = q \right] ", "= 0"]),
        (r"\sum_{i = 1}^{n = 2} a = b", [r"\sum_{i = 1}^{n = 2} a = b"]),
        (r"A = \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}, \quad B",
         [r"A = \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}, ", " B"]),
        (r"a &= b = c \\ &= d, \quad e", [r"a &= b = c \\ &= d, \quad e"]),
    ],
)  # fmt: skip
def test_a_formula_breaks_at_blanks_and_second_equalities(text, parts):
    assert [part for part, _ in breakable(text)] == parts
    assert all(mathml(part, block=True).startswith("<math") for part in parts)


def test_blanks_keep_their_width():
    assert [blank for _, blank in breakable(r"a \quad b \qquad c = d = e")] == [
        "\u2003",
        "\u2003" * 2,
        "",
        "",
    ]


def test_words_of_a_formula_keep_their_blanks():
    assert "<mtext>all\u00a0</mtext>" in mathml(r"\sum_{\text{all } j} x", block=True)


@pytest.mark.parametrize("around", ["({}", "{},", "({}).", "a {}?", "{{}} of {},"])
def test_no_line_ends_between_a_formula_and_what_touches_it(around):
    formula = '<span class="math notranslate nohighlight"><math></math></span>'
    context = {"body": around.replace("{{}}", formula).format(formula)}
    _hold(None, "", "", context, None)
    said = around.removeprefix("a ").removeprefix("{{}} of ").format(formula)
    assert f'<span class="held">{said}</span>' in context["body"]
