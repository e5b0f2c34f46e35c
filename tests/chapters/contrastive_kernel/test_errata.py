"""What the study note got wrong about softmax attention, each slip alone and all else right:
``book/errata/05.md``."""

import math

import pytest
import torch
from random_layers import TIGHT, some
from torch.nn.functional import scaled_dot_product_attention

from iclutils.chapters.contrastive_kernel import dual
from iclutils.interp.at_query import scores

DIM, COUNT = 4, 16
DEMOS = torch.arange(COUNT) < COUNT - 1  # the last token is the query's own
queries, keys, values = some(0, *3 * [(8, COUNT, DIM)])  # as many queries as keys
exponent = scores(queries, keys)
D = exponent.exp().sum(-1)  # of each query, (batch, query)
mixed = scaled_dot_product_attention(queries, keys, values)
start, step = dual.dual_form(queries, keys, values, DEMOS)
lengths = keys.square().sum(-1)[..., None, :] / math.sqrt(DIM)  # of keys over d^(1/4)


def relative(found):
    return ((found - mixed).norm(dim=-1) / mixed.norm(dim=-1)).median()


SLIPS = {  # of each formula the nearest reading that has a size
    "gaussian": (exponent - lengths / 2).softmax(-1) @ values,
    "mapped twice": (exponent.exp() / math.sqrt(DIM)).softmax(-1) @ values,
    "start not mapped": (exponent / D[..., None] * ~DEMOS) @ values + step,
    "averaged": start + step / DEMOS.sum(),
    "similarity minimised": start - step,
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_changes_what_a_head_says(slip):
    torch.testing.assert_close(start + step, mixed, **TIGHT)
    assert relative(SLIPS[slip]) > 0.01


def test_a_gaussian_kernel_serves_keys_of_one_length():
    unit = keys / keys.norm(dim=-1, keepdim=True)
    distance = torch.cdist(queries, unit).square() / math.sqrt(DIM)
    gaussian = (-distance / 2).softmax(-1) @ values
    torch.testing.assert_close(
        gaussian, scaled_dot_product_attention(queries, unit, values), **TIGHT
    )


def test_the_normaliser_belongs_to_the_query():
    """Between values and keys it would divide by the D of the query at the key's own place."""
    right = exponent.exp() / D[..., None] @ values
    torch.testing.assert_close(right, mixed, **TIGHT)
    assert relative(exponent.exp() / D[..., None, :] @ values) > 0.01


def test_each_query_has_a_dual_model_of_its_own():
    unlike = (D[..., :, None] / D[..., None, :] - 1).abs()
    assert unlike[:, ~torch.eye(COUNT, dtype=torch.bool)].median() > 0.01


def test_linear_maps_augment_nothing():
    """They go over to the queries and the outputs."""
    a, b = some(1, (DIM, DIM), (DIM, DIM))
    augmented = scaled_dot_product_attention(queries, keys @ a, values @ b)
    absorbed = scaled_dot_product_attention(queries @ a.mT, keys, values) @ b
    torch.testing.assert_close(augmented, absorbed, **TIGHT)
