"""Patterns: what a head looks at, as eight scores of one attention matrix.

All scores lie between 0 and 1 and are means over rows. Row 0, which can only look at itself, is
left out of all but ``first``. A score says nothing by itself: compare it with ``even_scores`` and
with the nulls of ``labels``. Looking is not contributing (Kobayashi et al. 2020).

``previous``, ``current``: attention to the token before, to the token itself. ``local``: to the
last four positions, the own one included. ``first``: to the first token (attention sink; Xiao et
al. 2024). ``even``: entropy of a row over the most it can have, ln(t + 1). ``hierarchical`` has no
definition in the literature; ours is the entropy of the mass in the distance bands {0}, {1},
{2, 3}, {4 .. 7}, .. over the log of the number of bands that a row has, for rows with at least
three: 1 if all scales get the same. ``duplicate``: to earlier occurrences of the current token.
``induction``: to what followed them (Olsson et al. 2022); these two are averaged over the rows
whose token occurred before, the first token never counts, and they are NaN where nothing repeats.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import patterns
    >>> net = models.load("induction-0")
    >>> tokens = torch.tensor([[models.bos(net), 5, 6, 7, 5, 6]])
    >>> even = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError
from ...interp.head_scores import first_token, previous_token, uniform_pattern
from ...interp.hooks import Hook, run_with_hooks
from ...models import TransformerBridge, cached, get_act_name

SCORES = (
    "previous",
    "current",
    "local",
    "first",
    "even",
    "hierarchical",
    "duplicate",
    "induction",
)
NEAR = 3  # positions back that still are local


def score(
    pattern: Float[Tensor, "batch head dest src"], tokens: Int[Tensor, "row length"]
) -> dict[str, Float[Tensor, "batch head"]]:
    """All scores of some heads, each sequence by itself.

    Example:
        >>> scores = patterns.score(torch.eye(6)[None, None], tokens)
        >>> scores["current"], scores["previous"]
        (tensor([[1.]]), tensor([[0.]]))
    """
    size = tokens.shape[1]
    if pattern.shape[0] != len(tokens) or pattern.shape[-2:] != (size, size):
        raise IclError(
            f"Need one pattern per sequence, {size} x {size}; got {tuple(pattern.shape)} for "
            f"{len(tokens)} sequences."
        )
    if not len(tokens) or size < 3:
        raise IclError("Patterns need at least one sequence of at least three tokens.")
    entropy = torch.special.entr(pattern).sum(-1)[..., 1:]
    most = torch.arange(2, size + 1, device=pattern.device).log()
    near = pattern * (_back(pattern) <= NEAR)
    same = repeats(tokens)
    return {
        "previous": previous_token(pattern),
        "current": pattern.diagonal(0, -2, -1)[..., 1:].mean(-1),
        "local": near.sum(-1)[..., 1:].mean(-1),
        "first": first_token(pattern),
        "even": (entropy / most).mean(-1),
        "hierarchical": hierarchical(pattern),
        "duplicate": _on(pattern, same),
        "induction": _on(pattern, same.roll(1, -1)),  # no row repeats the last position
    }


def every_score(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], scored_as: Tensor | None = None
) -> dict[str, Float[Tensor, "batch layer head"]]:
    """All scores of all heads: one forward pass, one layer's patterns held at a time.

    ``scored_as``: tokens that decide what repeats, where it is not those that the model reads.

    Example:
        >>> patterns.every_score(net, tokens)["previous"].shape
        torch.Size([1, 2, 4])
    """
    found: dict[int, dict[str, Tensor]] = {}

    def hook_for(layer: int) -> Hook:
        def look(pattern: Tensor, hook: object) -> Tensor:
            found[layer] = score(pattern, tokens if scored_as is None else scored_as)
            return pattern

        return get_act_name("pattern", layer), look

    layers = range(model.cfg.n_layers)
    run_with_hooks(model, tokens, [hook_for(layer) for layer in layers])
    return {name: torch.stack([found[layer][name] for layer in layers], 1) for name in SCORES}


def even_scores(tokens: Int[Tensor, "batch pos"]) -> dict[str, Float[Tensor, "batch"]]:
    """The same scores for a head that spreads its attention evenly.

    Example:
        >>> scored = patterns.score(even[None, None], tokens)["even"][0]
        >>> torch.allclose(patterns.even_scores(tokens)["even"], scored)
        True
    """
    even = uniform_pattern(tokens.shape[1]).to(tokens.device)
    scores = score(even.expand(len(tokens), 1, -1, -1), tokens)
    return {name: values[:, 0] for name, values in scores.items()}


def repeats(tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch dest src"]:
    """Which earlier positions hold the same token; the first position never counts.

    Example:
        >>> patterns.repeats(tokens)[0].nonzero()
        tensor([[4, 1],
                [5, 2]])
    """
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    same[:, :, 0] = False
    return same


def hierarchical(pattern: Float[Tensor, "*lead dest src"]) -> Float[Tensor, "*lead"]:
    """Entropy over dyadic distance bands, relative to equal mass in each (our definition).

    Example:
        >>> patterns.hierarchical(torch.eye(6)) < patterns.hierarchical(even)
        tensor(True)
    """
    # The exponent of a distance is its band: 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3, ..
    band = torch.frexp(_back(pattern).clamp_min(0).float()).exponent.long()
    member = torch.nn.functional.one_hot(band).to(pattern)
    mass = torch.einsum("...ts,tsk->...tk", pattern, member)
    most = (band[:, 0] + 1).log()  # a row's own bands: those up to its distance from the start
    return (torch.special.entr(mass).sum(-1) / most)[..., 2:].mean(-1)


def distance(pattern: Float[Tensor, "*lead dest src"]) -> Float[Tensor, "*lead"]:
    """Mean distance back, in positions, of all attention that does not go to the first token.

    Over all rows together, so that a row that gives the first token nearly all counts nearly
    nothing; NaN where the first token gets everything.

    Example:
        >>> patterns.distance(torch.eye(6))
        tensor(0.)
    """
    rest = pattern[..., 1:, 1:]
    return (rest * _back(rest)).sum((-2, -1)) / rest.sum((-2, -1))


def note_label(pattern: Float[Tensor, "dest src"]) -> str:
    """What the seed note's chain of if and elif (note 004, section 5.2) calls a pattern.

    Its scores are not defined there. Diagonal, "adjacent tokens": attention to the previous and
    the current token together. Uniform: one minus the total variation distance from even
    attention. Hierarchical: ours. There is no branch for the induction pattern of its table.
    """
    adjacent = pattern.diagonal(-1).mean() + pattern.diagonal()[1:].mean()
    apart = (pattern - uniform_pattern(len(pattern)).to(pattern)).abs().sum(-1) / 2
    if adjacent > 0.7:
        return "diagonal"
    if 1 - apart[1:].mean() > 0.5:
        return "uniform"
    return "hierarchical" if hierarchical(pattern) > 0.6 else "other"


def note_labels(model: TransformerBridge, tokens: Int[Tensor, "one pos"]) -> list[list[str]]:
    """The note's label of every head, ``[layer][head]``, from one sequence as in the note.

    Example:
        >>> len(patterns.note_labels(net, tokens)) == net.cfg.n_layers
        True
    """
    if len(tokens) != 1 or tokens.shape[1] < 3:
        raise IclError("The note's rules read one sequence, of at least three tokens.")
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    _, seen = run_with_hooks(model, tokens, [], names)
    return [[note_label(one) for one in seen[name][0]] for name in names]


def _back(pattern: Float[Tensor, "*lead dest src"]) -> Int[Tensor, "dest src"]:
    """Distance from each row back to each source."""
    place = torch.arange(pattern.shape[-1], device=pattern.device)
    return place[:, None] - place


def _on(
    pattern: Float[Tensor, "batch head dest src"], where: Bool[Tensor, "batch dest src"]
) -> Float[Tensor, "batch head"]:
    """Mass on marked sources, mean over the rows that have one; NaN if none has."""
    rows = where.any(-1)
    return (pattern * where[:, None]).sum((-2, -1)) / rows.sum(-1)[:, None]


def ahead(model: TransformerBridge, tokens: Int[Tensor, "batch pos"]) -> float:
    """Largest attention that any head gives to a later position.

    Example:
        >>> patterns.ahead(net, tokens)
        0.0
    """
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    return max(float(cache[name].triu(1).max()) for name in names)


def every_distance(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch layer head"]:
    """``distance`` of every head on every sequence.

    Example:
        >>> patterns.every_distance(net, tokens).shape
        torch.Size([1, 2, 4])
    """
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    return torch.stack([distance(cache[name]) for name in names], 1)
