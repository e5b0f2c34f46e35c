"""Homework 7, on chapter 07: overlap beyond chance, task vectors, smoothers, order, controls."""

from functools import partial

import torch
from iclutils.chapters.every_lens import question
from iclutils.models import get_act_name, load
from iclutils.tasks import topics
from torch.nn.functional import one_hot

from checks import Mistake, Part, generator, normal, shaped


def _scores(seed):
    """Two lenses that see the same layers, and in part the same heads."""
    draw, layers, heads = generator(seed), 5 + seed, 7 + seed % 3
    depth, head = 2 * normal(draw, layers, 1), normal(draw, layers, heads)
    a, b = (depth + head + 0.7 * normal(draw, layers, heads) for _ in range(2))
    return a, b, 2 * layers + 1


def _all_layers(function, blocks, *given, layer_at=2):
    """What a function gives for every layer."""
    layers, before, after = range(len(blocks)), given[:layer_at], given[layer_at:]
    return [function(list(blocks), *before, layer, *after) for layer in layers]


def _network(seed):
    """A stack of layers, and prompts with and without examples: more of the one kind."""
    draw, d = generator(seed), 4 + seed % 2
    maps = [0.5 * normal(draw, d, d) for _ in range(4 + seed % 3)]
    shown, bare = normal(draw, 7 + seed, d) + 1, normal(draw, 5 + seed, d)
    return [lambda x, w=each: torch.tanh(x @ w + 0.3) for each in maps], shown, bare


def _to_steer(seed):
    blocks, _, bare = _network(seed)
    draw, d, choices = generator(seed + 100), bare.shape[1], 3 + seed % 2
    right = torch.randint(0, choices, (len(bare),), generator=draw)
    return blocks, normal(draw, d, choices), bare, 2 * normal(draw, d), right


def _examples(seed):
    draw, count, d, choices = generator(seed), 6 + seed, 3 + seed, 3 + seed % 2
    shows = torch.cat([torch.arange(choices), torch.randint(0, 2, (count,), generator=draw)])
    return normal(draw, d), normal(draw, len(shows), d), shows, choices


def _votes(seed):
    draw, prompts, choices = generator(seed), 8 + 2 * seed, 3 + seed % 2
    votes = normal(draw, prompts, choices).softmax(1)
    counts = torch.randint(1, 5, (prompts, choices), generator=draw)
    votes = votes + 0.2 * counts
    noise = 0.7 * normal(draw, prompts, choices) + 0.5 * counts
    return votes, counts, 4 * votes + noise + 2 * normal(draw, prompts, 1) + 3


def _vectors(seed):
    d = 4 + seed
    return normal(generator(seed), d) + 0.5, 1000, generator(seed + 50)


def _is_control(drawn, vector, count):
    """Whether the vectors are as long, at a right angle, and otherwise anywhere."""
    found = shaped(drawn[0], count, len(vector)).double()
    unit = vector / vector.norm()
    if (found.norm(dim=1) / vector.norm() - 1).abs().max() > 1e-4:
        raise Mistake("The vectors are not as long as the task vector.")
    if (found @ unit).abs().max() > 1e-4 * vector.norm():
        raise Mistake("There is something of the task vector in them: take it out first.")
    free = len(vector) - 1
    spread = found.T @ found / count / vector.norm() ** 2
    wanted = (torch.eye(len(vector)).double() - unit[:, None] * unit) / free
    if found.mean(0).norm() > 0.2 * vector.norm() or (spread - wanted).abs().max() > 0.12:
        raise Mistake("Not all directions that are left have the same chance.")


def _curve(seed):
    """A rise from chance that falls back once below half, and whose last value is not its best."""
    draw, count, start = generator(seed), 12 + seed, 0.25
    steps = torch.randint(1, 9, (count,), generator=draw).cumsum(0).double() * 50
    values = start + 0.6 * torch.linspace(-4, 4, count).double().sigmoid()
    values += 0.02 * torch.rand(count, generator=draw, dtype=torch.float64)
    values[0] = start - 0.06 - 0.02 * torch.rand((), generator=draw, dtype=torch.float64)
    values[count // 2] = start + 0.4
    values[count // 2 + 1] = start + 0.2
    values[-2] = start + 0.75
    return steps, values, start


def _seeds(seed):
    draw, count = generator(seed), 5 + seed
    own = 0.1 * normal(draw, count)  # what both signatures of a seed have in common
    return 0.2 + own, 0.5 + own + 0.02 * normal(draw, count)


def _changes(seed):
    draw, count, d = generator(seed), 5 + seed, 3 + seed
    length = 0.5 + 2 * torch.rand(count, 1, generator=draw, dtype=torch.float64)
    return (length * (normal(draw, d) + normal(draw, count, d)),)


q1 = (Part("beyond_chance", inputs=_scores, tolerance=1e-06),)
q2 = (
    Part("task_vector", inputs=_network, tolerance=1e-06, outcome=_all_layers),
    Part(
        "steered_margin",
        inputs=_to_steer,
        tolerance=1e-06,
        outcome=partial(_all_layers, layer_at=3),
    ),
)
q3 = (
    Part("smooth", inputs=_examples, tolerance=1e-06),
    Part("agreement", inputs=_votes, tolerance=1e-06),
)
q4 = (
    Part("half_way", inputs=_curve, tolerance=1e-06),
    Part("later_by", inputs=_seeds, tolerance=1e-06),
    Part(
        "order",
        choices=(
            "Prefix matching makes the answers possible.",
            "Gathering comes first, then matching, then the answers.",
            "Nothing: five seeds are too few for an order.",
            "Matching and gathering come before the answers in these trainings. The recipe may be "
            "why.",
        ),
    ),
)
q5 = (
    Part("common_share", inputs=_changes, tolerance=1e-06),
    Part("together", tolerance=2e-3),
    Part("within", tolerance=2e-3),
    Part(
        "reason",
        choices=(
            "The model has a task vector after all: within an answer, half of the change is "
            "common.",
            "The changes are noise.",
            "The change is a vector of the *answer*. It serves prompts with that answer, and no "
            "others.",
            "The model does not use its examples.",
        ),
    ),
)
q6 = (Part("other_vectors", _vectors, draws=1, verdict=_is_control),)

# Students get what stands above this line, and nothing below it.


def _marked(scores, top):
    """1 for the highest scores, 0 for the others, (layer, head)."""
    flat = scores.flatten()
    return torch.zeros_like(flat).index_fill(0, flat.topk(top).indices, 1.0).view(scores.shape)


def beyond_chance(a, b, top):
    m, n = (_marked(each, top) for each in (a, b))
    chance = (m.sum(1) * n.sum(1)).sum() / m.shape[1]
    return float((m * n).sum() - chance)


BEYOND_CHANCE = {
    "Chance keeps layers: count what each lens marks in each layer.": (
        "(m.sum(1) * n.sum(1)).sum() / m.shape[1] -> m.sum() * n.sum() / m.numel()"
    ),
    "That is how many heads both mark: subtract what chance gives.": " - chance -> ",
    "Divide by the number of heads in a layer.": " / m.shape[1] -> ",
    "The highest scores are marked, not the lowest.": "_marked(each -> _marked(-each",
}


def task_vector(blocks, shown, bare, layer):
    means = []
    for x in (shown, bare):
        for block in blocks[: layer + 1]:
            x = x + block(x)
        means.append(x.mean(0))
    return means[0] - means[1]


def steered_margin(blocks, readout, bare, vector, layer, right):
    x = bare
    for i, block in enumerate(blocks):
        x = x + block(x) + (i == layer) * vector
    logits = x @ readout
    own = logits.gather(1, right[:, None])[:, 0]
    return own - (logits.sum(1) - own) / (logits.shape[1] - 1)


TASK_VECTOR = {
    "After a layer means with what this layer has written.": "[: layer + 1] -> [:layer]",
    "That is what the layer writes: take the stream, which holds all writes.": (
        lambda *given: task_vector(*given) - task_vector(*given[:3], given[3] - 1)
    ),
    "Means, not sums: there are more prompts of the one kind.": "x.mean(0) -> x.sum(0)",
    "Keep the length of the vector: it says how far the examples move the stream.": (
        lambda *given: task_vector(*given) / task_vector(*given).norm()
    ),
}


STEERED_MARGIN = {
    "The vector is added *after* the layer: this layer must not read it.": (
        "x + block(x) + (i == layer) * vector "
        "-> x + (i == layer) * vector + block(x + (i == layer) * vector)"
    ),
    "The later layers have to run on the changed stream.": "i == layer -> i == len(blocks) - 1",
    "The vector is added once: the stream carries it on.": "i == layer -> i >= layer",
    "The others do not include the right choice.": (
        "(logits.sum(1) - own) / (logits.shape[1] - 1) -> logits.mean(1)"
    ),
}


def smooth(query, keys, shows, choices):
    weights = (keys @ query / len(query) ** 0.5).softmax(0)
    return weights @ one_hot(shows, choices).double()


def agreement(votes, counts, logits):
    x, z, y = (each.double() for each in (votes, counts, logits))
    x, z, y = ((each - each.mean(1, keepdim=True)).flatten() for each in (x, z, y))
    x, y = (each - (each @ z) / (z @ z) * z for each in (x, y))
    return ((x * y).sum() / (x.norm() * y.norm())).item()


SMOOTH = {
    "The scores are divided by the square root of d.": " / len(query) ** 0.5 -> ",
    "The scores are divided by the square root of d, not by d.": " ** 0.5 -> ",
    "The weights have to sum to 1: divide by the kernel's sum.": "softmax(0) -> exp()",
    "That is a plain count: weigh examples by nearness.": "keys @ query / -> 0 * keys[:, 0] /",
    "Votes of a choice are summed, not averaged.": (
        ".double() -> .double() / shows.bincount(minlength=choices)"
    ),
}


AGREEMENT = {
    "A number that is added to all logits of a prompt says nothing: take each prompt's mean.": (
        "mean(1, keepdim=True) -> mean()"
    ),
    "Nothing is centred: take prompts' means out.": "(each - each.mean(1, keepdim=True)) -> each",
    "That is the plain correlation: what do the counts explain of it?": (
        "each - (each @ z) / (z @ z) * z -> each"
    ),
}


def half_way(steps, values, start):
    wanted = (values[-1] + start) / 2
    n = int((values[1:] >= wanted).nonzero()[0]) + 1
    share = (wanted - values[n - 1]) / (values[n] - values[n - 1])
    return float(steps[n - 1] + share * (steps[n] - steps[n - 1]))


def later_by(first, second):
    later = second - first
    return torch.stack([later.mean(), later.std() / len(later) ** 0.5])


HALF_WAY = {
    "The rise starts at `start`, not at 0.": "(values[-1] + start) -> values[-1]",
    "The rise starts at `start`, not at the first checkpoint.": "+ start) -> + values[0])",
    "The rise ends at the last value, not at the largest.": "values[-1] -> values.max()",
    "That is the checkpoint after it: go along the line.": "share * -> 1.0 *",
    "That is the checkpoint before it: go along the line.": "share * -> 0.0 *",
    "The first time counts: the curve may fall back below half later.": (
        "(values[1:] >= wanted).nonzero()[0] "
        "-> ((values[1:] >= wanted) & (values[:-1] < wanted)).nonzero()[-1]"
    ),
}


LATER_BY = {
    "The sign is turned around: the second less the first.": "second - first -> first - second",
    "Both were measured on the same seeds: take the differences, then their error.": (
        "later.std() -> (first.var() + second.var()).sqrt()"
    ),
    "That is the deviation: the standard error is smaller.": " / len(later) ** 0.5 -> ",
    "Divide the deviation by the *square root* of the number of seeds.": " ** 0.5 -> ",
}


order = "d"
ORDER = {
    "An order is no cause. No head was taken away along training.": "a",
    "Matching and gathering rise together: look at where their lines are steepest.": "b",
    "All five seeds have the answers last, by a third of the training.": "c",
}


def common_share(changes):
    inner = changes @ changes.T
    own = inner.trace()
    return ((inner.sum() - own) / (len(changes) - 1) / own).item()


COMMON_SHARE = {
    "A prompt is no pair with itself: leave the diagonal out.": (
        "(inner.sum() - own) / (len(changes) - 1) -> inner.sum() / len(changes)"
    ),
    "That is the mean cosine: take both means before you divide.": lambda changes: common_share(
        torch.nn.functional.normalize(changes, dim=1)
    ),
    "A share has no unit: divide by the mean square.": " / own) -> / len(changes))",
}


def _own_shares(own):
    """The common shares of a student's model, on this student's prompts: together, within."""
    net = load(f"anchors-{[0, 3, 4, 5, 6, 7][own % 6]}")
    asked = question.of_prompts(topics.sample(256, torch.Generator().manual_seed(own)))
    name, each = get_act_name("resid_post", 1), torch.arange(256)
    after = [net.run_with_cache(x, names_filter=name)[1][name][each, asked.at].double()
             for x in (asked.task.clean, asked.task.corrupt)]  # fmt: skip
    changes, answer = after[0] - after[1], asked.task.answer[:, 0]
    shares = [common_share(changes[answer == a]) for a in answer.unique()]
    return common_share(changes), sum(shares) / len(shares)


def together(own):
    """Return the common share of all prompts of a student."""
    return _own_shares(own)[0]


TOGETHER = {"`together` is the share of all prompts, not within an answer.": 0.54}


def within(own):
    """Return the mean of the common shares within an answer."""
    return _own_shares(own)[1]


WITHIN = {
    "`within` is taken for each answer alone, not of all prompts together.": 0.0,
    "`within` is the mean of the shares, not their sum.": lambda within: 8 * within,
}


reason = "c"
REASON = {
    "Added to a prompt with another right answer, this vector would be wrong.": "a",
    "Noise would be as little common within an answer. Look at `within`.": "b",
    "Half of the change is common to prompts of one answer: the examples did that.": "d",
}


def other_vectors(vector, count, generator):
    drawn = torch.randn(count, len(vector), generator=generator).to(vector)
    unit = vector / vector.norm()
    drawn = drawn - (drawn @ unit)[:, None] * unit
    return drawn / drawn.norm(dim=1, keepdim=True) * vector.norm()


OTHER_VECTORS = {
    "The vectors are not as long": "keepdim=True) * vector.norm() -> keepdim=True)",
    "There is something of the task vector": "drawn - (drawn @ unit)[:, None] * unit -> drawn",
    "Not all directions that are left": ".to(vector) -> .to(vector).abs()",
    "Take random numbers from": "generator=generator -> generator=None",
}
