"""Formulas as MathML."""

import pytest

from book._ext.equations import mathml


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (r"\bigl(\sum_i x_i\bigr)^2", 'fence="true"'),
        (r"\mathcal L, \mathbb E, \mathbb R", "ℒ"),
        (r"\begin{aligned} a &= b \\ &= c \end{aligned}", "<mtable"),
        (r"\arg\min_w f(w)", "arg"),
        (r"\sum_{\text{all } j} x", "<mtext>all"),
    ],
)
def test_a_formula_is_mathml(text, part):
    made = mathml(text, "block")
    assert part in made
    assert "&amp;" not in made


def test_an_unknown_command_is_an_error():
    with pytest.raises(ValueError, match="unknown command"):
        mathml(r"\nonsense{1}", "inline")
