"""A handful of the committed numbers of the real language model, measured again on few prompts.

A committed mean has a spread over its repetitions; a new one over fewer must lie as near as that
spread lets expect. The model is fetched where the installer can; where not, these are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import language_model
from torch import Tensor

from iclutils import claims, models, presets
from iclutils.chapters.contrastive_kernel import heads
from iclutils.chapters.label_anchors import saliency
from iclutils.chapters.ridge_ols import text
from iclutils.interp import at_query, clean_corrupt, head_scores, readout
from iclutils.models import TransformerBridge
from iclutils.tasks import generator, numbers
from iclutils.tasks.repeated import RepeatedTokens, repeated_tokens
from iclutils.tasks.sources import open_source

COMMITTED = Path(__file__).parents[2] / "book" / "results"
ERRORS = 4  # standard errors of the difference
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def model() -> TransformerBridge:
    language_model()
    return models.load("smollm2")


def few(model: TransformerBridge) -> RepeatedTokens:
    return repeated_tokens(model, 2, 50, generator("doubled"))


def second_copy(model: TransformerBridge) -> Tensor:
    batch = few(model)
    _, right = readout.predictions(model, batch.tokens)
    return right[:, batch.second_half].double().mean(1)


def best_head(score: str) -> Callable[[TransformerBridge], Tensor]:
    def measure(model: TransformerBridge) -> Tensor:
        found = head_scores.score_heads(model, few(model).tokens, 50)
        layer, head = head_scores.strongest(found["prefix"].mean(0))
        if score == "previous":
            layer, head = head_scores.strongest(found["previous"].mean(0)[:layer])
        return found[score][:, layer, head]

    return measure


def gathers(model: TransformerBridge) -> Tensor:
    """Lead of S_wp in the first layer: mean over the sets of one fifth of the prompts."""
    leads = []
    for task in presets.REAL.label_words.tasks:
        asked = open_source(task, model, generator).varied(5)
        share = saliency.measure(model, asked).relative[0]
        leads.append(share[0] - share[1:].max())
    return torch.stack(leads).mean()[None]


def reads_numbers(model: TransformerBridge) -> Tensor:
    digits = numbers.of_text(models.words(model), "0")
    drawn = numbers.contexts(digits, 4, 13, generator("told"))
    _, sure = text.predict_numbers(model, digits, drawn.xs, drawn.ys)
    return sure[:, 1:13].mean(1)


def adds_up(model: TransformerBridge) -> Tensor:
    batch = few(model)
    found = heads.dual_heads(at_query.read(model, batch.tokens), heads.first_copy(batch))
    gap = found.query_term + found.demonstration_update - found.z
    return (gap.abs().max() / found.z.abs().max())[None]


def copies(model: TransformerBridge) -> Tensor:
    length = presets.REAL.circuits.length
    task = clean_corrupt.copying(model, 4, length, generator("sequences"), narrow=True)
    clean, corrupt = clean_corrupt.baselines(model, task)
    return clean - corrupt


MEASURES: dict[str, Callable[[TransformerBridge], Tensor]] = {
    "01.second_half_accuracy": second_copy,
    "01.prefix_best": best_head("prefix"),
    "01.previous_best": best_head("previous"),
    "02.swp_shallow": gathers,
    "03.text_number": reads_numbers,
    "05.head_identity": adds_up,
    "06.behaviour_gap": copies,
}


SLOWEST = "02.swp_shallow"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.nightly if n == SLOWEST else ()) for n in MEASURES],
)
def test_a_committed_number_is_measured_again(name: str, request: pytest.FixtureRequest) -> None:
    results = claims.read_results(COMMITTED, name=name)
    if ("real", name) not in results:
        pytest.skip(f"{name} has no committed result at the tier real")
    committed = results["real", name]
    assert committed.value is not None
    model = request.getfixturevalue("model")
    mean, error, count = claims.summary(MEASURES[name](model).cpu())
    each = committed.spread * math.sqrt(committed.count)  # of one repetition
    apart = each * math.sqrt(1 / count + 1 / committed.count)
    assert abs(mean - committed.value) <= ERRORS * max(apart, error) + ROUNDING
