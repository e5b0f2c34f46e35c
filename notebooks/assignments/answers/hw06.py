"""Homework 6, on chapter 06: influence, chance, circuits, path patching, similarity, synergy."""

from functools import partial
from itertools import combinations

import torch
from iclutils.interp import clean_corrupt
from iclutils.interp.hooks import ablate_heads
from iclutils.models import load
from torch import Tensor

from checks import Mistake, Part, generator, normal


def _logits(seed):
    draw, draws, vocab = generator(seed), 5 + seed, 7 + seed
    clean = 2 * normal(draw, vocab) + 3
    shift = [normal(draw, n, vocab) + 4 * normal(draw, n, 1) for n in (draws, draws + 3)]
    return clean, clean + 1.5 * shift[0], clean + shift[1]


def _effects(seed):
    """Quarters, so that sums are exact and ties are ties; the first draw is what was seen."""
    draw, samples = generator(seed), 6 + seed
    whole = torch.randint(-2, 4, (samples,), generator=draw)
    whole[0] = 4
    signs = torch.randint(0, 2, (39 + 10 * seed, samples), generator=draw) * 2 - 1
    signs[0] = 1
    return (-whole if seed % 2 else whole).double() / 4, signs.double()


def _circuit(seed):
    """A score with interactions of two and of three heads; some heads stand in for others."""
    draw, heads = generator(seed + 20), 5 + seed % 2
    alone, pairs = normal(draw, heads), 2 * normal(draw, heads, heads).triu(1)
    triples = normal(draw, heads)

    def score(some):
        on = torch.zeros(heads, dtype=torch.float64)
        on[[int(i) for i in some]] = 1.0
        three = on * on.roll(1) * on.roll(2)
        return (on @ alone + on @ pairs @ on + three @ triples).item()

    circuit = torch.randperm(heads, generator=draw)[: 3 + seed % 2].tolist()
    return score, circuit, list(range(heads))


def _without_model(seed):
    return _circuit(seed + 10)[:2]


def _sets(seed):
    """Heads of some layers, in no order; the last layer has no heads to spare."""
    heads = [(1, 0), (4, 2), (1, 3), (2 + seed, 1), (1, 5), (2 + seed, 4), (2 + seed, 0)]
    return [*heads, *((9, h) for h in range(6))], 8, generator(seed + 50)


def _is_control(drawn, heads, per_layer):
    """Whether the sets are heads that could have been chosen instead."""

    seen = []
    for each in drawn:
        if not isinstance(each, Tensor) or each.numel() % 2:
            raise Mistake("`other_heads` returns a list of pairs (layer, head).")
        seen.append([(int(layer), int(head)) for layer, head in each.reshape(-1, 2)])
    for found in seen:
        if any(not 0 <= head < per_layer for _, head in found):
            raise Mistake(f"There is no such head: a layer has the heads 0 to {per_layer - 1}.")
        if len({*found}) < len(found):
            raise Mistake("A head stands in the control twice.")
    if any({*found} & {*heads} for found in seen):
        raise Mistake("Heads of the set itself are in the control: then it cannot differ from it.")
    layers = sorted({layer for layer, _ in heads})
    taken = [sum(la == layer for la, _ in heads) for layer in layers]
    wanted = {la: min(n, per_layer - n) for la, n in zip(layers, taken, strict=True)}
    for found in seen:
        if {la for la, _ in found} - {*layers}:
            raise Mistake("The control has heads of other layers, which can do other things.")
        if any(sum(la == layer for la, _ in found) != n for layer, n in wanted.items()):
            raise Mistake("Each layer needs as many heads as in the set (if it has them).")
    free = {(la, h) for la in layers for h in range(per_layer)} - {*heads}
    if {head for found in seen for head in found} != free:
        raise Mistake("Some heads never come up: draw from all that are free.")


def _all_edges(function, nodes, clean, corrupt):
    """The output for every edge."""
    last = len(nodes)
    edges = [(writer, reader) for writer in range(last) for reader in range(writer + 1, last + 1)]
    return [function(list(nodes), clean, corrupt, *edge) for edge in edges]


def _network(seed):
    draw, d = generator(seed), 4
    clean, corrupt = normal(draw, 3, d), normal(draw, 3, d)
    maps = [0.5 * normal(draw, d, d) for _ in range(5 + seed % 2)]
    return [lambda x, w=each: torch.tanh(x @ w + 0.3) for each in maps], clean, corrupt


def _samples(seed):
    draw, count, a = generator(seed), 12 + 3 * seed, 3 + seed
    x = normal(draw, count, a) + 1.5
    y = torch.cat([x[:, :2], normal(draw, count, 3)], 1) @ normal(draw, 5, 5) + 2
    return x @ x.T, y @ y.T


def _groups(seed):
    draw, batch, groups = generator(seed), 6 + seed, 2 + seed % 3
    rand = partial(torch.rand, generator=draw, dtype=torch.float64)
    clean = -rand(batch)
    return clean, clean - 2 * rand(groups, batch), clean - 5 * rand(batch)


q1 = (Part("more_influence", inputs=_logits, tolerance=1e-06),)
q2 = (Part("sign_flip_p", inputs=_effects, tolerance=1e-09),)
q3 = (
    Part("incompleteness", inputs=_circuit, tolerance=1e-06),
    Part("minimality", inputs=_without_model, tolerance=1e-06),
)
q4 = (Part("patched", inputs=_network, tolerance=1e-06, outcome=_all_edges),)
q5 = (Part("cka", inputs=_samples, tolerance=1e-06),)
q6 = (Part("other_heads", _sets, draws=150, verdict=_is_control),)
q7 = (
    Part("synergy", inputs=_groups, tolerance=1e-06),
    Part("stand_in", tolerance=1e-3),
    Part("pipeline", tolerance=1e-3),
    Part(
        "reason",
        choices=(
            "It is wrong: the heads of layer 1 replace each other, and are needed as a group.",
            "It is right: what a removal costs is what a head does.",
            "It is wrong: a mean in the place of a head's output takes nothing away from heads of "
            "layer 1, so the bars say nothing.",
            "It is wrong: heads of layer 1 work against each other, so that removing several "
            "cancels.",
        ),
    ),
)

# Students get what stands above this line, and nothing below it.


def more_influence(clean, first, second):
    p = clean.log_softmax(-1)
    kl = [(p.exp() * (p - each.log_softmax(-1))).sum(-1) for each in (first, second)]
    errors = [each.std() / len(each) ** 0.5 for each in kl]
    return torch.stack([kl[0].mean() - kl[1].mean(), torch.hypot(*errors)])


MORE_INFLUENCE = {
    "KL(clean || altered) weighs by the clean probabilities.": (
        "p.exp() * (p - each.log_softmax(-1)) -> each.softmax(-1) * (each.log_softmax(-1) - p)"
    ),
    "The sign is turned around: the first token's influence, less the second's.": (
        "kl[0].mean() - kl[1].mean() -> kl[1].mean() - kl[0].mean()"
    ),
    "Standard errors of independent draws add in squares.": "torch.hypot(*errors) -> sum(errors)",
    "The second influence has an error, too.": "torch.hypot(*errors) -> errors[0]",
}


def sign_flip_p(effects, signs):
    flipped, seen = (signs * effects).mean(-1).abs(), effects.mean().abs()
    extreme = int((flipped >= seen).sum())
    return (1 + extreme) / (1 + len(signs))


SIGN_FLIP_P = {
    "The observation is a draw, so that no p is 0.": "(1 + extreme) / (1 + -> extreme / (",
    "The observation counts above the line as well.": "(1 + extreme) -> extreme",
    "The test is two-sided: compare absolute values.": ".abs() -> ",
    "As extreme means at least as large: ties count.": ">= -> >",
}


def _subsets(heads):
    return [set(some) for n in range(len(heads) + 1) for some in combinations(heads, n)]


def incompleteness(score, circuit, model):
    C, M = set(circuit), set(model)
    return max(abs(score(C - K) - score(M - K)) for K in _subsets(C))


INCOMPLETENESS = {
    "That is the empty K alone: try every subset of the circuit.": "_subsets(C) -> [set()]",
    "K has one head in your subsets: try every size.": "_subsets(C) -> [{head} for head in C]",
    "The size of the difference counts, not its sign.": "abs( -> float(",
    "K is a subset of the circuit, not of the model.": "_subsets(C) -> _subsets(M)",
}


def minimality(score, circuit):
    C = set(circuit)
    each = ([abs(score(C - K - {v}) - score(C - K)) for K in _subsets(C - {v})] for v in circuit)
    return torch.tensor([max(differences) for differences in each], dtype=torch.float64)


MINIMALITY = {
    "That is K empty alone: others may stand in for a head then.": "_subsets(C - {v}) -> [set()]",
    "Some K is enough: take the largest difference, not the smallest.": "max( -> min(",
    "K has one head in your subsets: try every size, and none.": (
        "_subsets(C - {v}) -> [{head} for head in C - {v}]"
    ),
    "One number for each head, in the order of the circuit.": (
        "for v in circuit) -> for v in sorted(circuit, reverse=circuit == sorted(circuit)))"
    ),
}


def patched(nodes, clean, corrupt, writer, reader):
    return _changed(nodes, clean, _change(nodes, clean, corrupt, writer), reader)


def _streams(nodes, x):
    """What each node reads, and the output."""
    streams = [x]
    for node in nodes:
        streams.append(streams[-1] + node(streams[-1]))
    return streams


def _change(nodes, clean, corrupt, writer):
    """What a node writes in the corrupt run, minus what it writes in the clean one."""
    read = [_streams(nodes, each)[writer] for each in (corrupt, clean)]
    return nodes[writer](read[0]) - nodes[writer](read[1])


def _changed(nodes, x, change, reader, stays=False):
    """The run in which one node reads a changed stream; the stream may stay changed."""
    for i, node in enumerate(nodes):
        read = x + change if i == reader else x
        x = (read if stays else x) + node(read)
    return x + change if reader == len(nodes) else x


def _held(nodes, clean, corrupt, writer, reader):
    change, streams = _change(nodes, clean, corrupt, writer), _streams(nodes, clean)
    if reader == len(nodes):
        return streams[-1] + change
    read = streams[reader]
    return streams[-1] - nodes[reader](read) + nodes[reader](read + change)


PATCHED = {
    "Every later node reads the patched write: patch what *one* reader reads.": (
        lambda f, x, y, a, b: _changed(f, x, _change(f, x, y, a), a + 1, stays=True)
    ),
    "The patch stays in the stream: give it to the reader alone.": "), reader) -> ), reader, True)",
    "The nodes after the reader are held: let them run, on what it now writes.": _held,
    "The reader reads the corrupt stream: patch what this one writer has put there.": (
        lambda f, x, y, a, b: _changed(f, x, _streams(f, y)[b] - _streams(f, x)[b], b)
    ),
}


def cka(XX, YY):
    K, L = (x - x.mean(0) - x.mean(1, keepdim=True) + x.mean() for x in (XX, YY))
    return ((K * L).sum() / (K.norm() * L.norm())).item()


CKA = {
    "The samples are not centred.": "x - x.mean(0) - x.mean(1, keepdim=True) + x.mean() -> x",
    "Means are taken out of rows and of columns.": " - x.mean(1, keepdim=True) + x.mean() -> ",
    "The mean of all is one number: take out those of rows and of columns.": (
        "- x.mean(0) - x.mean(1, keepdim=True) + x.mean() -> - x.mean()"
    ),
    "Rows and columns are taken out, and with them the mean twice: add it once.": " + x.mean() -> ",
}


def other_heads(heads, per_layer, generator):
    control = []
    for layer in sorted({layer for layer, _ in heads}):
        taken = {head for la, head in heads if la == layer}
        free = [head for head in range(per_layer) if head not in taken]
        order = torch.randperm(len(free), generator=generator)[: len(taken)].tolist()
        control += [(layer, free[i]) for i in order]
    return control


def _anywhere(heads, per_layer, generator):
    last = max(layer for layer, _ in heads)
    free = [(la, h) for la in range(last + 1) for h in range(per_layer) if (la, h) not in heads]
    order = torch.randperm(len(free), generator=generator)[: len(heads)].tolist()
    return [free[i] for i in order]


OTHER_HEADS = {
    "Heads of the set itself are in the control": " if head not in taken -> ",
    "The control has heads of other layers": _anywhere,
    "Each layer needs as many heads": "[: len(taken)] -> [:1]",
    "Some heads never come up": (
        "torch.randperm(len(free), generator=generator) -> torch.arange(len(free))"
    ),
    "Take random numbers from": "generator=generator -> generator=None",
}


def synergy(clean, alone, together):
    return ((clean - together).mean() - (clean - alone).mean(-1).sum()).item()


SYNERGY = {
    "The sign is turned around: D is a *loss*, clean minus what is left.": "return ( -> return -(",
    "Those are scores, not losses: subtract each from the clean score.": "clean - -> ",
    "Subtract what *each* removal costs: the sum of them.": ".mean(-1).sum() -> .mean()",
    "Subtract what each removal costs alone.": " - (clean - alone).mean(-1).sum() -> ",
}


def _own_model(own):
    """The scores and the gap of a student's model, and its scores without some heads."""
    net = load(f"anchors-{[0, 3, 4, 5, 6, 7][own % 6]}")
    task = clean_corrupt.copying(net, 16, 20, torch.Generator().manual_seed(own))
    clean, corrupt = (each.double() for each in clean_corrupt.baselines(net, task))

    def without(heads):
        hooks = ablate_heads(net, task.clean, heads, "mean", task.corrupt)
        return task.score(clean_corrupt.scored_logits(net, task, hooks)).double()

    return clean, (clean - corrupt).mean().item(), without


LAYERS = [[(layer, head) for head in range(4)] for layer in (0, 1)]


def stand_in(own):
    clean, gap, without = _own_model(own)
    alone = torch.stack([without([head]) for head in LAYERS[1]])
    return synergy(clean, alone, without(LAYERS[1])) / gap


def pipeline(own):
    clean, gap, without = _own_model(own)
    alone = torch.stack([without(layer) for layer in LAYERS])
    return synergy(clean, alone, without([*LAYERS[0], *LAYERS[1]])) / gap


STAND_IN = {
    "`stand_in` has the wrong sign: removing all costs *more* than the sum.": lambda x: -x,
    "`stand_in` is in nats: divide by the gap.": lambda x: 8 * x,
}


PIPELINE = {
    "`pipeline` has the wrong sign: removing all costs *less* than the sum.": lambda x: -x,
    "`pipeline` is in nats: divide by the gap.": lambda x: 8 * x,
}


reason = "a"
REASON = {
    "One removal at a time shows what the *others* cannot replace. What do all four cost?": "b",
    "Removed together, at the same means, the four cost most of the gap.": "c",
    "Then removing all four would cost little, too.": "d",
}
