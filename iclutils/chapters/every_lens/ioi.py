"""The indirect object: "When Mary and John went to the park, John gave a book to" Mary.

The classes of heads are those of Wang et al. 2022 (section 3), ranked by what their edges carry,
estimated: name movers write the answer to the logits, S-inhibition heads change the queries of
these, duplicate-token and induction heads the values of S-inhibition heads, previous-token heads
the keys of induction heads. Faithfulness, completeness and minimality are those of section 4; the
heads outside a circuit write their mean over sentences with three names (their p_ABC). Ours: heads
are in the circuit at all positions, and the parts of a circuit are random, not searched for.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, permutations
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ...errors import IclError
from ...interp import removal
from ...interp.attribution import edge_attribution
from ...interp.clean_corrupt import Margin
from ...interp.graph import Node, all_heads, model_graph
from ...interp.head_scores import attention_patterns
from ...interp.hooks import Head
from ...interp.removal import Replacement
from ...interp.statistics import mean_se, pseudo_values
from ...models import TransformerBridge

TEMPLATES = (
    "When {0} and {1} went to the {place}, {2} gave a {thing} to",
    "While {0} and {1} waited at the {place}, {2} handed a {thing} to",
    "After {0} and {1} met in the {place}, {2} offered a {thing} to",
    "Then {0} and {1} left the {place}, and {2} brought a {thing} to",
)
NAMES = (
    *("Mary", "John", "Tom", "James", "Dan", "Sarah", "Paul", "Kate", "Anna"),
    *("Peter", "Mark", "Alice", "David", "Laura", "Simon", "Emma", "Jack", "Lucy"),
)
PLACES = ("park", "store", "school", "garden", "office", "station")
THINGS = ("book", "ring", "letter", "drink", "basket", "key")
CLASSES = ("name mover", "S-inhibition", "duplicate token", "induction", "previous token")
MATTERS = 0.01  # of the whole lead: the bar of minimality
SIZES = {"name mover": 5, "S-inhibition": 5, "at S2": 6, "previous token": 4}  # near the paper's 26


class Sentences(NamedTuple):
    """Sentences of all templates; in the corrupt ones stand three other names."""

    task: Margin
    place: Mapping[str, Int[Tensor, "batch"]]  # where S1, IO, S2 and the end stand
    template: Int[Tensor, "batch"]  # its number


def sentences(reader: PreTrainedTokenizerBase, pairs: int, generator: Generator) -> Sentences:
    """Draw pairs of names, each in all templates; the indirect object is the first name in every
    other pair. Rows of a pair stand together. A name that is no single token raises."""

    def ids(text: str) -> list[int]:
        return reader(text, add_special_tokens=False)["input_ids"]

    words = [f" {x}" for x in (*NAMES, *PLACES, *THINGS)]
    if wrong := [x for x in words if len(ids(x)) != 1]:
        raise IclError(f"These words are no single tokens of the model: {', '.join(wrong)}.")
    clean, corrupt, choices, places = [], [], [], []
    every = [*permutations(NAMES, 2)]
    for pair, drawn in enumerate(torch.randperm(len(every), generator=generator)[:pairs].tolist()):
        io, s = every[drawn]
        rest = [name for name in NAMES if name not in (io, s)]
        for text in TEMPLATES:
            pick = [int(torch.randint(6, (), generator=generator)) for _ in range(2)]
            fill = {"place": PLACES[pick[0]], "thing": THINGS[pick[1]]}
            other = torch.randperm(len(rest), generator=generator)[:3].tolist()
            order = (io, s) if pair % 2 else (s, io)
            clean.append(ids(text.format(*order, s, **fill)))
            corrupt.append(ids(text.format(*(rest[i] for i in other), **fill)))
            [first], [second] = ids(f" {io}"), ids(f" {s}")
            choices.append([first, second])
            at = [i for i, token in enumerate(clean[-1]) if token == second]
            places.append([at[0], clean[-1].index(first), at[1], len(clean[-1]) - 1])
    longest = max(map(len, clean))  # what stands after the end is not seen by it
    whole, swapped = (
        torch.tensor([x + [0] * (longest - len(x)) for x in y]) for y in (clean, corrupt)
    )
    both, where = torch.tensor(choices), torch.tensor(places)
    task = Margin(whole, swapped, where[:, 3:], both[:, :1], choices=both)
    names = dict(zip(("S1", "IO", "S2", "end"), where.T, strict=True))
    return Sentences(task, names, torch.arange(len(TEMPLATES)).repeat(pairs))


def three_names(model: TransformerBridge, texts: Sentences) -> Replacement:
    """Return a head's mean over corrupt sentences of the same template, at the same place."""
    own = removal.outputs_on(model, texts.task.corrupt, "").by_layer
    same = (texts.template[:, None] == texts.template).float()  # (row, row)
    same = same / same.sum(1, keepdim=True)
    mean = {layer: torch.einsum("rs,sphd->rphd", same, z) for layer, z in own.items()}
    return Replacement("its mean, at the same place, over sentences with three names", mean)


def classes(model: TransformerBridge, texts: Sentences) -> dict[str, list[Head]]:
    """Return the heads of each of ``CLASSES``, strongest first; none stands in two."""
    graph = model_graph(model)
    carried = edge_attribution(model, texts.task).mean(-1)  # nats, (writer, reader)
    looks = attention_from(model, texts)
    by_class: dict[str, list[Head]] = {}

    def strongest(readers: Iterable[Node], many: int) -> list[Head]:
        columns = [graph.readers.index(node) for node in readers]
        by_writer = carried[:, columns].sum(1)
        taken = {head for heads in by_class.values() for head in heads}
        order = (graph.writers[i] for i in by_writer.argsort(descending=True).tolist())
        heads = [n[1:] for n in order if n.kind == "head" and n[1:] not in taken]
        return heads[:many]

    movers = by_class["name mover"] = strongest([Node("logits")], SIZES["name mover"])
    queries = [Node("q", *head) for head in movers]
    inhibit = by_class["S-inhibition"] = strongest(queries, SIZES["S-inhibition"])
    second = strongest([Node("v", *head) for head in inhibit], SIZES["at S2"])
    to = {head: looks["S2 to S1"][head] > looks["S2 to S1+1"][head] for head in second}
    by_class["duplicate token"] = [head for head in second if to[head]]
    match = by_class["induction"] = [head for head in second if not to[head]]
    keys = [Node("k", *head) for head in match]
    by_class["previous token"] = strongest(keys, SIZES["previous token"]) if keys else []
    return {name: by_class[name] for name in CLASSES}


def attention_from(
    model: TransformerBridge, texts: Sentences
) -> dict[str, Float[Tensor, "layer head"]]:
    """Return the mean attention of every head along the edges by which the classes are told."""
    weights = torch.stack(attention_patterns(model, texts.task.clean), 1)  # (b, layer, head, to, _)
    row, at = torch.arange(len(texts.task)), texts.place
    edges = {
        "end to IO": (at["end"], at["IO"]),
        "end to S2": (at["end"], at["S2"]),
        "S2 to S1": (at["S2"], at["S1"]),
        "S2 to S1+1": (at["S2"], at["S1"] + 1),
        "S1+1 to S1": (at["S1"] + 1, at["S1"]),
    }
    return {name: weights[row, :, :, to, of_].mean(0) for name, (to, of_) in edges.items()}


class Assessment(NamedTuple):
    """Leads of the indirect object over the subject, in nats, each by prompt."""

    circuit: Float[Tensor, "batch"]  # all heads outside the circuit at their mean
    complete: Float[Tensor, "part side batch"]  # without the part K: the circuit, the model
    minimal: Float[Tensor, "head side batch"]  # circuit without the rest of the class; and the head


def assess(
    model: TransformerBridge,
    texts: Sentences,
    parts: Sequence[Sequence[Sequence[Head]]],
    new: Replacement,
    halves: int,
    generator: Generator,
) -> Assessment:
    """Test a circuit as section 4 of Wang et al. does: heads outside it write ``new``. ``parts``:
    its classes, each with its heads for every row (``in_layers``); as the parts K of completeness
    serve these, and so many random ``halves``."""
    rows, every = len(texts.task), [node[1:] for node in all_heads(model)]
    whole = [[head for part in parts for head in part[row]] for row in range(rows)]
    size = len(whole[0])

    def outside(gone: Sequence[Iterable[Head]]) -> list[list[Head]]:
        """Return all heads but those of the circuit, and these: the circuit without them."""
        inside = [{*whole[row]} - {*gone[row]} for row in range(rows)]
        return [[head for head in every if head not in inside[row]] for row in range(rows)]

    picks = [torch.randperm(size, generator=generator)[: size // 2] for _ in range(halves)]
    some = [[[whole[r][i] for i in pick.tolist()] for r in range(rows)] for pick in picks]
    missing = [*parts, *some]
    one = [(part, i) for part in parts for i in range(len(part[0]))]
    rest = [[[*part[r][:i], *part[r][i + 1 :]] for r in range(rows)] for part, i in one]
    no_head: list[list[Head]] = [[]] * rows
    sets = [outside(k) for k in (no_head, *missing, *parts, *rest)] + missing
    leads = removal.without(model, texts.task, sets, new).margin
    sizes = [1, len(missing), len(parts), len(rest), len(missing)]
    circuit, complete, without_class, minimal, of_model = leads.split(sizes)
    heads = torch.tensor([len(part[0]) for part in parts])
    of_class = without_class.repeat_interleave(heads.to(leads.device), 0)
    both = torch.stack([complete, of_model], 1), torch.stack([minimal, of_class], 1)
    return Assessment(circuit[0], *both)


def in_layers(
    parts: Mapping[str, Sequence[Head]], width: int, rows: int, generator: Generator
) -> list[list[list[Head]]]:
    """Return a circuit of other heads for each row, as many in each layer and each class."""
    every = [head for heads in parts.values() for head in heads]
    drawn = [iter(each) for each in removal.controls_by_row(every, width, rows, generator)]
    return [[[*islice(row, len(heads))] for row in drawn] for heads in parts.values()]


def summary(
    tests: Assessment, whole: Float[Tensor, "batch"]
) -> dict[str, tuple[float, float, int]]:
    """Return faithfulness, incompleteness (of the worst part K) and minimality
    (a share of heads; error by the jackknife) as means with standard errors over pairs of names,
    whose prompts stand together; ``whole``: leads of the whole model, in nats."""
    scale = whole.mean()

    def by_pair(leads: Float[Tensor, "*item batch"]) -> Float[Tensor, "*item pair"]:
        return (leads / scale).unflatten(-1, (-1, len(TEMPLATES))).mean(-1).double()

    def needed(pairs: Sequence[float]) -> float:
        some = effects[:, [int(pair) for pair in pairs]]
        return float((some.mean(1).abs() > MATTERS).double().sum() / max(1, len(some)))

    gaps = by_pair(tests.complete[:, 0] - tests.complete[:, 1])  # (part, pair)
    worst = gaps[gaps.mean(1).abs().argmax()]
    effects = by_pair(tests.minimal[:, 0] - tests.minimal[:, 1])  # (head, pair)
    pairs = [float(pair) for pair in range(effects.shape[1])]
    jackknife = pseudo_values(needed, pairs) if len(pairs) > 1 else [0.0]
    return {
        "faithful": (*mean_se(by_pair(tests.circuit)), len(pairs)),
        "complete": (*mean_se(worst * worst.mean().sign()), len(pairs)),
        "minimal": (needed(pairs), mean_se(torch.tensor(jackknife))[1], len(pairs)),
    }
