"""The five lenses side by side: the heads that each marks, what is left of the answer without
these, and what a vector does that is added at the target of a prompt without examples.

Sources: Yin and Steinhardt 2025 (sets that leave out another's); Hendel et al. 2023 (the state of a
layer as a vector); Todd et al. 2024 (what heads write as a vector)."""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from ...interp import removal
from ...interp.at_query import read
from ...interp.head_scores import same_layers
from ...interp.hooks import Head, head_masks, logits_at, logits_under, put_heads
from ...interp.removal import Outcome, Replacement
from ...models import TransformerBridge, get_act_name
from ..attention_circuits.stability import top
from .lens_scores import LENSES, LensScores
from .question import Question

Heads = frozenset[int]  # numbers of heads in order of depth
Controls = Mapping[str, Sequence[Sequence[Head]]]  # for each set, other heads for each prompt
BOTH, EITHER = "match and read", "match or read"
GROUPS = (BOTH, "match only", "read only")  # they share no head; together they are ``EITHER``
OTHERS, RIVAL, ZERO = "other functions", "rival's prompt", "zero"
OWN, ONE = "own function", "one of the two"  # match or read, and not both
# At the target alone: what they write there without examples, on the rival's prompt, their mean
LAST, RIVAL_LAST = "last arrow, no examples", "last arrow, rival's prompt"
OWN_LAST = "last arrow, own function"


def head_scores(
    marked: LensScores,
    prefix: Float[Tensor, "sequence layer head"],
) -> dict[str, Float[Tensor, "layer head"]]:
    """Return every head's score by each lens, the mean of all prompts or sequences."""
    of_lens = {k: prefix.cpu() if k == "induction" else getattr(marked, k) for k in LENSES}
    return {k: scores.mean(0) for k, scores in of_lens.items()}


def strongest(scores: Mapping[str, Float[Tensor, "layer head"]], many: int) -> dict[str, Heads]:
    """Return the heads that each lens marks: those that it scores highest, so many."""
    return {k: frozenset(top(x.flatten(), many)) for k, x in scores.items()}


def sets_to_remove(top: Mapping[str, Set[int]]) -> dict[str, Heads]:
    """Return the heads that each lens marks, and what matching prefixes, reading answers and
    writing the vector share or have alone."""
    match, read, write = (frozenset(top[k]) for k in ("induction", "anchors", "vector"))
    return {k: frozenset(v) for k, v in top.items()} | {
        BOTH: match & read,
        "match only": match - read,
        "read only": read - match,
        "match, not vector": match - write,
        "vector, not match": write - match,
        EITHER: match | read,
    }


def redraw(
    heads: Heads, width: int, draws: int, generator: Generator, again: bool = False
) -> list[Heads]:
    """Draw as many other heads of the same layers, ``width`` in a layer, or with ``again`` of all:
    ``head_scores.same_layers`` of heads by their numbers."""
    drawn = same_layers((divmod(i, width) for i in heads), width, draws, generator, again)
    return [frozenset(layer * width + head for layer, head in some) for some in drawn]


def accuracy(model: TransformerBridge, question: Question) -> float:
    """Return the share of prompts whose answer is the likeliest of all tokens."""
    logits = logits_at(model, question.task.clean, question.task.at)
    return question.outcome(logits[:, 0]).right.mean().item()


def outcomes(model: TransformerBridge, question: Question, wrong: Question) -> dict[str, Outcome]:
    """Return the answers after the examples, with these permuted (``wrong``), after the rival's
    examples likewise, and without any."""
    bare, end = question.bare
    read = {
        "examples": (question.task.clean, question.task.at),
        "wrong pairs": (wrong.task.clean, question.task.at),
        "rival": (question.task.corrupt, question.task.at),
        "rival, wrong pairs": (wrong.task.corrupt, question.task.at),
        "none": (bare, end[:, None]),
    }
    return {k: question.outcome(logits_at(model, *side)[:, 0]) for k, side in read.items()}


OTHER_HEADS = (  # how a caption names ``controls``
    "as many heads that neither match nor read (where a set has to do with the vector, neither "
    "match nor write), of the same layers or, where a layer has too few of them, of the nearest"
)


def controls(
    sets: Mapping[str, Heads], model: TransformerBridge, rows: int, generator: Generator
) -> Controls:
    """Return for each of ``sets_to_remove`` what ``removal.controls_by_row`` draws for so many
    prompts: heads that stand in none of the lists that the page compares. These neither match nor
    read; for the sets that write the vector or do not, they neither match nor write."""
    width, layers = model.cfg.n_heads, model.cfg.n_layers

    def heads(*names: str) -> list[Head]:
        return [divmod(i, width) for i in sorted(frozenset[int]().union(*(sets[k] for k in names)))]

    def others(name: str) -> list[Sequence[Head]]:
        lists = heads("induction", "vector" if "vector" in name else "anchors")
        return removal.controls_by_row(
            heads(name), width, rows, generator, outside=lists, layers=layers
        )

    return {name: others(name) for name in sets}


def removals(
    model: TransformerBridge,
    question: Question,
    sets: Mapping[str, Heads],
    others: Controls,
    constants: Mapping[str, Replacement],
) -> dict[str, Outcome]:
    """Return by way what is left without each of the sets in ``COMPARED[way]``, or without its
    controls: (set or control, set, batch). ``constants``: what outputs become in the ways other
    than ``RIVAL`` and ``ZERO``. At the target alone: ``without_at_target``."""
    task, width = question.task, model.cfg.n_heads
    heads = {k: [divmod(i, width) for i in sorted(some)] for k, some in sets.items()}
    new = {ZERO: removal.zeros(model), **constants}
    new[RIVAL] = removal.outputs_on(model, task.corrupt, RIVALS)
    groups: dict[str, list[Any]] = {}
    for way, some in COMPARED.items():
        drawn = [others[k][: len(task)] for k in some if way in CONTROLLED]
        groups[way] = [heads[k] for k in some] + drawn
    ways = [new[way] for way, some in groups.items() for _ in some]
    flat = removal.without(model, task, [*chain(*groups.values())], ways)
    parts = zip(*(x.cpu().split([*map(len, groups.values())]) for x in flat), strict=True)
    return {
        way: Outcome(*(x.unflatten(0, (-1, len(COMPARED[way]))) for x in part))
        for way, part in zip(groups, parts, strict=True)
    }


RIVALS = "the same prompt with the rival's answers"
CONTROLLED = (OTHERS, RIVAL)
COMPARED: dict[str, tuple[str, ...]] = {  # the sets of each way
    OTHERS: (*GROUPS, "match, not vector", "vector, not match", EITHER),
    **dict.fromkeys((OWN, RIVAL, ZERO), (BOTH,)),
}
LIVE = {"resampled": RIVAL_LAST, "bare": LAST}  # the ways of live figure 7


def without_at_target(
    model: TransformerBridge, question: Question, sets: Sequence[Heads], new: Replacement
) -> Outcome:
    """Return what is left without each set of heads when these lose their output at the target
    alone, (set, batch): the target is read again, on the keys and values of the whole run. At every
    position: ``removals``."""
    query, width = read(model, question.task.clean, question.at), model.cfg.n_heads
    heads = ([divmod(i, width) for i in sorted(some)] for some in sets)
    hooks = (put_heads(head_masks(model, x, len(question)), new.by_layer) for x in heads)
    return question.outcome(torch.stack([query.reread(x) for x in hooks]))


def means_at_target(
    model: TransformerBridge, question: Question
) -> Float[Tensor, "layer head d_head"]:
    """Return the mean output of every head at the target, over the prompts. Over all positions:
    ``removal.head_means``."""
    query = read(model, question.task.clean, question.at)
    names = [get_act_name("z", layer) for layer in range(model.cfg.n_layers)]
    return torch.stack([query.activations[name][:, 0].mean(0) for name in names])


def vector_without(
    model: TransformerBridge, question: Question, heads: Heads, new: Replacement, layer: int
) -> Float[Tensor, "d_model"]:
    """Return what the examples add to the state at the target after a layer, the mean over the
    prompts, if some heads write ``new`` there in the run with examples."""
    name, seen = get_act_name("resid_post", layer), list[Tensor]()
    removed = [divmod(i, model.cfg.n_heads) for i in sorted(heads)]
    hooks: list[Any] = put_heads(head_masks(model, removed, len(question)), new.by_layer)
    hooks.append((name, lambda state, hook: seen.append(state)))
    read(model, question.task.clean, question.at).reread(hooks)
    bare = read(model, *question.bare).activations[name]
    return (seen[0] - bare)[:, 0].mean(0)


def as_large(heads: Heads, sizes: Float[Tensor, "head"], outside: Set[int]) -> Heads:
    """Return as many other heads of the same sizes, or as many as there are: for each head, the
    largest first, the one of the nearest size that is neither ``outside`` nor taken."""
    free, found = {*range(len(sizes))} - outside, set[int]()
    for each in sorted(heads, key=lambda i: -float(sizes[i]))[: len(free)]:
        nearest = min(free, key=lambda i: abs(float(sizes[i] - sizes[each])))
        free.remove(nearest)
        found.add(nearest)
    return frozenset(found)


def add_at_target(
    model: TransformerBridge,
    question: Question,
    vectors: Iterable[tuple[int, Float[Tensor, "d_model"]]],
) -> Outcome:
    """Return the answers without examples when a vector is added at the target after a layer,
    (pair, batch): for each pair of layer and vector."""
    tokens, target = question.bare
    rows = torch.arange(len(tokens), device=tokens.device)

    def added(value: Tensor, hook: object, vector: Tensor) -> Tensor:
        return value.index_put((rows, target), vector.to(value), accumulate=True)

    ways = [
        [(get_act_name("resid_post", layer), partial(added, vector=vector))]
        for layer, vector in vectors
    ]
    logits = [x[:, 0] for x in logits_under(model, tokens, ways, target[:, None])]
    return question.outcome(torch.stack(logits))


def random_like(vector: Float[Tensor, "*lead d_model"], generator: Generator) -> Tensor:
    """Draw a vector of the same length in a random direction: the control of ``add_at_target``."""
    drawn = torch.randn(vector.shape, generator=generator).to(vector)
    return drawn * vector.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)


def record(cases: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return what live figure 7 shows. Of each case: model, prompts, sets, answers and, by way of
    removal, answers without ``GROUPS`` and their controls: (set or control, set, batch); last, the
    heads of the controls, by group. Written are probabilities (thousandths) and margins (tenths of
    a nat) of three prompts a case."""

    def written(p: Tensor, margin: Tensor) -> str:
        pairs = zip(p.flatten().tolist(), margin.flatten().tolist(), strict=True)
        return " ".join(f"{1000 * x:.0f} {10 * y:.0f}" for x, y in pairs)

    def prompt(case: str, row: int) -> dict[str, Any]:
        model, here, _, whole, less, _ = cases[case]
        decode = model.tokenizer.decode
        text = {"case": case, "text": decode(here.task.clean[row]).strip("\n")}
        text["answers"] = [decode(i).strip() for i in here.task.choices[row]]
        text["whole"] = written(whole.p[row], whole.margin[row])
        for name, way in LIVE.items():
            left = (x[:, : len(GROUPS), row].T for x in (less[way].p, less[way].margin))
            text[name] = written(*left)
        return text

    def listed(sets: Mapping[str, Heads]) -> dict[str, str]:
        return {k: " ".join(map(str, sorted(some))) for k, some in sets.items()}

    return {
        "sets": {c: listed(sets) for c, (_, _, sets, *_) in cases.items()},
        "controls": {c: listed(others) for c, (*_, others) in cases.items()},
        "prompts": [prompt(c, row) for c, x in cases.items() for row in range(min(3, len(x[1])))],
    }
