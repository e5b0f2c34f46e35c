"""Homework 1, on chapter 01: repeated tokens, head scores, copying, ablation."""

import torch
from iclutils.interp import head_scores
from iclutils.interp.hooks import ablate_heads, run_with_hooks
from iclutils.models import bos, get_act_name, load
from iclutils.tasks.repeated import repeated_tokens
from torch.nn.functional import pad

from checks import Mistake, Part, generator, shaped

MODELS = ("induction-3", "induction-0")  # of the public check, of the first hidden one


def _copies(seed):
    draw, count, length = generator(seed), 5 + seed, 4 + seed
    rows = [torch.randperm(90, generator=draw)[:length] + 8 for _ in range(count)]
    return torch.stack(rows), 7, generator(seed + 50)


def _is_control(drawn, copy, bos):
    """Whether the second halves repeat tokens and no pair of them, in orders drawn at random."""
    length, halves = copy.shape[1], []
    for each in drawn:
        found = shaped(each, len(copy), 2 * length + 1)
        if (found[:, 0] != bos).any():
            raise Mistake("BOS comes first, once.")
        if (found[:, 1 : length + 1] != copy).any():
            raise Mistake("The first half is the copy as it is given.")
        halves.append(found[:, length + 1 :])
        if (halves[-1].sort(1).values != copy.sort(1).values).any():
            raise Mistake("The second half has other tokens: then it is news which tokens occur.")
    for half in halves:
        pairs = torch.stack([half[:, :-1], half[:, 1:]], 2)[:, :, None]
        before = torch.stack([copy[:, :-1], copy[:, 1:]], 2)[:, None]
        if (pairs == before).all(-1).any():
            raise Mistake("A token follows the token that it followed in the first half.")
    order = torch.stack([(half[:, :, None] == copy[:, None]).float().argmax(-1) for half in halves])
    if (order == order[:, :1]).all():
        raise Mistake("All sequences have one order: draw it anew for each.")
    if min(len(order[:, :, i].unique()) for i in range(length)) < length:
        raise Mistake("Some tokens never come first, or last: the order is not drawn at random.")


def _logits(seed):
    draw, count, length = generator(seed), 3 + seed, 4 + seed
    copy = torch.randint(1, 11, (count, length), generator=draw)
    tokens = torch.cat([torch.zeros_like(copy[:, :1]), copy, copy], 1)
    return torch.randn(count, 2 * length + 1, 11, generator=draw), tokens


def _built_heads(seed):
    """Heads that look a known distance back, with noise; in the first copy all look 2 back."""
    length = 6 + seed
    size, built = 2 * length + 1, [length - 1, length, 1, 0, length + 1]
    pattern = torch.rand(2, len(built), size, size, generator=generator(seed)) * 0.05
    for head, distance in enumerate(built):
        for query in range(size):
            back = distance if query > length else 2
            pattern[:, head, query, max(query - back, 0)] += 0.15 if query > length else 3.0
    pattern = pattern.tril()
    return (pattern / pattern.sum(-1, keepdim=True),)


def _recurring(seed):
    draw, size = generator(seed), 12 + 2 * seed
    tokens = torch.randint(1, 6, (2, size), generator=draw)
    tokens[:, 0] = tokens[:, -3] = 0  # BOS once more: no occurrence to be matched
    pattern = torch.rand(2, 3, size, size, generator=draw).tril()
    return pattern / pattern.sum(-1, keepdim=True), tokens


def _weights(seed):
    """A circuit with chosen eigenvalues: 2, -1 - seed / 10, exp(i angle), exp(-i angle)."""
    draw, vocab, width, rank = generator(seed), 24 + 4 * seed, 12, 4
    angle = torch.rand((), generator=draw) + 0.5
    turn = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
    core = torch.block_diag(torch.tensor([[2.0]]), torch.tensor([[-1 - seed / 10]]), turn)
    change = torch.eye(rank) + 0.3 * torch.randn(rank, rank, generator=draw)
    reads = torch.randn(vocab, width, generator=draw)
    values = torch.randn(width, rank, generator=draw)
    output = torch.randn(rank, width, generator=draw)
    right, back = (torch.linalg.pinv(m.double()).float() for m in (reads @ values, output))
    return reads, values, output, back @ change @ core @ torch.linalg.inv(change) @ right


def _models(seed):
    if seed >= len(MODELS):
        return None
    model = load(MODELS[seed])
    tokens, other = (
        repeated_tokens(model, 4, 10 + seed, generator(seed + i)).tokens for i in (0, 50)
    )
    return model, (1, 0), tokens, other


q1 = (Part("scrambled", _copies, draws=30, verdict=_is_control),)
q2 = (Part("repetition_gain", inputs=_logits),)
q3 = (Part("looks_back", inputs=_built_heads),)
q4 = (Part("prefix_score", inputs=_recurring),)
q5 = (Part("copying_score", inputs=_weights, tolerance=0.002),)
q6 = (
    Part("shares_kept", inputs=_models, tolerance=0.001),
    Part(
        "reason",
        choices=(
            "The induction head of induction-0 scores higher before the cut.",
            "No head of layer 0 looks at the previous token in induction-0: what costs most in "
            "induction-3 has no counterpart there.",
            "Several heads of layer 0 look at the previous token in induction-0, and replace each "
            "other.",
            "Replacing a head by its mean leaves in place what the head says about its position.",
        ),
    ),
    Part("pair"),
    Part("left", tolerance=1e-3),
)

# Students get what stands above this line, and nothing below it.


def scrambled(copy, bos, generator):
    rows = []
    for row in copy:
        order = torch.randperm(len(row), generator=generator)
        while (order[1:] == order[:-1] + 1).any():
            order = torch.randperm(len(row), generator=generator)
        rows.append(row[order])
    return torch.cat([_begun(copy, bos), torch.stack(rows)], 1)


def _begun(copy, bos):
    return torch.cat([torch.full((len(copy), 1), bos), copy], 1)


SCRAMBLED = {
    "A token follows the token": "(order[1:] == order[:-1] + 1).any() -> False",
    "has other tokens": "torch.stack(rows)] -> torch.randint(8, 98, copy.shape)]",
    "The first half is the copy": "_begun(copy, -> _begun(copy.flip(1),",
    "have one order": "rows.append(row[order]) -> rows = [each[order] for each in copy]",
    "Some tokens never come first": ".any(): -> .any() or order[0] == 0:",
    "BOS comes first": "(rows)], 1) -> (rows)], 1).roll(-1, 1)",
    "Take random numbers from": "generator=generator -> generator=None",
}


def repetition_gain(logits, tokens):
    length = tokens.shape[1] // 2
    right = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return right[:, length + 1 :].mean(1) - right[:, :length].mean(1)


REPETITION_GAIN = {
    "Nothing announces what entry L asks for: start at entry L + 1.": "length + 1 -> length",
    "Entry i is about token i + 1.": "tokens[:, 1:, None] -> tokens[:, :-1, None]",
    "The sign is turned around: second copy minus first.": ".mean(1) - -> .mean(1) * -1 +",
    "Those are raw logits: take the log-softmax first.": ".log_softmax(-1) -> ",
}


def looks_back(pattern):
    return head_scores.distance_profile(pattern, pattern.shape[-1] // 2).mean(0).argmax(-1)


def _everywhere(pattern):
    length = pattern.shape[-1] // 2
    mean = [pattern.diagonal(-d, -2, -1).sum((0, 2)) for d in range(length + 2)]
    return torch.stack(mean, -1).argmax(-1)


LOOKS_BACK = {
    "Keep the queries of the second copy alone, L + 1 to 2L.": _everywhere,
    "One too many: the distance from q to k is q - k.": ".argmax(-1) -> .argmax(-1) + 1",
    "One too few: the distance from q to k is q - k.": ".argmax(-1) -> .argmax(-1) - 1",
    "One number for each head: average over the sequences first.": ".mean(0).argmax -> .argmax",
}


def prefix_score(pattern, tokens):
    return head_scores.olsson_prefix_matching(pattern, tokens)


def _earlier(tokens):
    """The number of earlier occurrences of each token, BOS at position 0 aside."""
    return (tokens[:, :, None] == tokens[:, None, 1:]).tril(-2).sum(-1)


PREFIX_SCORE = {
    "That is the attention to the earlier *copies*: look at the position after each copy.": (
        "matching(pattern -> matching(pattern.roll(1, -1)"
    ),
    "BOS at position 0 is no earlier occurrence: leave it out.": lambda pattern, tokens: (
        prefix_score(pad(pattern, (1, 0, 1, 0)), pad(tokens, (1, 0), value=-1))
    ),
    "Average over the queries that have an earlier occurrence, not over all.": lambda a, tokens: (
        prefix_score(a, tokens) * (_earlier(tokens) > 0).float().mean(1, keepdim=True)
    ),
    "A query may have several matches: sum over them before you average.": lambda a, tokens: (
        prefix_score(a / _earlier(tokens).clamp(min=1)[:, None, :, None], tokens)
    ),
}


def copying_score(*weights):
    values = _eigenvalues(*weights)
    return (values.sum().real / values.abs().sum()).item()


def _eigenvalues(reads, values, output, unembed):
    return torch.linalg.eigvals(output @ unembed @ reads @ values)


def _symmetric(reads, values, output, unembed):
    circuit = (reads @ values @ output @ unembed).double()
    even = torch.linalg.eigvalsh(circuit + circuit.T)
    return (even.sum() / even.abs().sum()).item()


COPYING_SCORE = {
    "Singular values are never negative: take eigenvalues.": lambda *w: 1.0,
    "Divide by the sum of |eigenvalue|, not of singular values.": lambda a, b, c, d: (
        _eigenvalues(a, b, c, d).sum().real / torch.linalg.svdvals((a @ b @ c @ d).double()).sum()
    ),
    "The size of a complex eigenvalue is its absolute value: take .abs() before .real.": (
        "values.abs().sum() -> values.real.abs().sum()"
    ),
    "The matrix is not symmetric: eigvalsh gives other numbers than eigvals.": _symmetric,
}


def shares_kept(model, induction, tokens, other):
    head, length, name = induction[1], tokens.shape[1] // 2, get_act_name("pattern", induction[0])

    def score(hooks):
        _, seen = run_with_hooks(model, tokens, hooks, [name])
        return head_scores.attention_at_offset(seen[name][:, head], length, length - 1).mean()

    heads = range(model.cfg.n_heads)
    cut = [score(ablate_heads(model, tokens, [(0, h)], "mean", other)) for h in heads]
    return torch.stack(cut) / score([])


SHARES_KEPT = {
    "Those are the scores after the cut: divide by the score before it.": " / score([]) -> ",
    "That is what is lost: the share kept is after / before.": lambda *a: 1 - shares_kept(*a),
    'Those are the shares after zero ablation: ask for "mean".': '"mean" -> "zero"',
    "Prefix matching looks L - 1 back: L back is the same token.": "length - 1 -> length",
}


def _own(own):
    """A student's network and sequences, its two heads and the share that is left."""
    net = load(f"induction-{[0, 3, 4, 5, 6, 7][own % 6]}")
    draw, size = torch.Generator().manual_seed(own), (32, 20)
    copies = [torch.randint(0, net.cfg.d_vocab, size, generator=draw) for _ in range(2)]
    tokens, other = (torch.cat([_begun(copy, bos(net)), copy], 1) for copy in copies)
    pair = []
    for layer, back in ((0, 1), (1, 19)):
        name = get_act_name("pattern", layer)
        pattern = run_with_hooks(net, tokens, [], [name])[1][name]
        far_back = pattern[:, :, 21:].diagonal(21 - back, -2, -1).mean((0, 2))
        pair.append(int(far_back.argmax()))
    left = shares_kept(net, (1, pair[1]), tokens, other)[pair[0]]
    return torch.tensor(pair), left.item()


def pair(own):
    """Return the previous-token and the induction head of a student's network."""
    return _own(own)[0]


PAIR = {"`pair` names the head of layer 0 first, then that of layer 1.": lambda pair: pair.flip(0)}


def left(own):
    """Return the share of the matching that remains without the first of them."""
    return _own(own)[1]


LEFT = {
    "`left` is what is lost: the share that remains is after / before.": lambda left: 1 - left,
    "`left` is before / after: turn it around.": lambda left: 1 / left,
}


reason = "c"
REASON = {
    "The share is a ratio of two scores of the *same* head: how high they are says nothing.": "a",
    "Heads of layer 0 do look at the previous token there; how many?": "b",
    "Mean ablation removes the position too: the same cut leaves nothing in induction-3.": "d",
}
