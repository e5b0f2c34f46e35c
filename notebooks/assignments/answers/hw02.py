"""Homework 2, on chapter 02: a control, saliency, flow, isolation, extraction, loyalty."""

import torch
from iclutils.chapters.label_anchors.answers import answers
from iclutils.chapters.label_anchors.isolation import isolation
from iclutils.models import load
from iclutils.tasks import topics

from checks import Mistake, Part, generator, shaped

CASES = (("anchors-0", 0), ("anchors-3", 1))  # model and layer: public, first hidden


def _places(seed):
    """Label positions in order, and a target after them, for three prompts of 14 words."""
    draw = generator(seed)
    places = [torch.randperm(10, generator=draw)[: 2 + seed % 3] + 1 for _ in range(3)]
    target = torch.randint(12, 14, (3,), generator=draw)
    return torch.stack(places).sort(-1).values, target


def _attention(seed):
    draw, size, d = generator(seed), 5 + seed, 4 + seed
    attention = torch.rand(2, 3, size, size, generator=draw).tril()
    written = torch.randn(2, 3, size, d, generator=draw)
    return attention, written, torch.randn(2, size, d, generator=draw)


def _labels(seed):
    draw = generator(seed)
    gaps = torch.randint(2, 5 + seed, (4, 3), generator=draw)
    return gaps.cumsum(1), generator(seed + 50)


def _is_control(drawn, label_pos):
    """Whether the positions are words of the label words' own examples, at random."""
    places = torch.stack([shaped(each, *label_pos.shape) for each in drawn])
    if places.is_floating_point():
        raise Mistake("Positions are whole numbers.")
    before = torch.cat([0 * label_pos[:, :1], label_pos[:, :-1]], 1)
    if (places[..., None] == label_pos[:, None]).any():
        raise Mistake("A label word is in the control: then it cannot differ from it.")
    if (places == 0).any():
        raise Mistake("BOS is no word of an example, and there is nothing before it to cut.")
    if ((places <= before) | (places > label_pos)).any():
        raise Mistake("A word of another example has more edges to be cut, or fewer.")
    count = label_pos - before - 1
    share = torch.stack([(places == before + 1 + i).float().mean(0) for i in range(count.max())])
    wanted = (torch.arange(len(share))[:, None, None] < count) / count
    if (share - wanted).abs().max() > 0.25:
        raise Mistake("Not every word of an example has the same chance.")


def _importance(seed):
    return torch.rand(3, 14, 14, generator=generator(seed + 100)), *_places(seed)


def _raw_scores(seed):
    return torch.randn(3, 2, 14, 14, generator=generator(seed)), _places(seed)[0]


def _classes(seed):
    """Scores with ties, of two classes."""
    draw, count = generator(seed), 12 + 3 * seed
    scores = torch.randint(0, 6, (count,), generator=draw) / 7  # no score is the area
    chosen = (scores + torch.rand(count, generator=draw) > 0.8 + 0.1 * (seed % 2)).long()
    chosen[:2] = torch.tensor([0, 1])
    return scores, chosen


def _prompts(seed):
    if seed >= len(CASES):
        return None
    name, layer = CASES[seed]
    return load(name), topics.sample(24, generator(seed)), layer


q1 = (Part("control_words", _labels, draws=150, verdict=_is_control),)
q2 = (Part("saliency", inputs=_attention),)
q3 = (Part("flow", inputs=_importance),)
q4 = (Part("isolated", inputs=_raw_scores),)
q5 = (Part("auc", inputs=_classes),)
q6 = (
    Part("label_loyalty", inputs=_prompts),
    Part("loyalty", tolerance=0.02),
    Part(
        "reason",
        choices=(
            "The target reads the label words in that layer.",
            "The label words gather in that layer what their texts say, and later layers read it.",
            "Isolation cuts more edges in that layer than in later ones.",
            "The label words know their meaning by themselves, and the first layers add noise.",
        ),
    ),
)

# Students get what stands above this line, and nothing below it.


def _is_label(label_pos, size):
    return (label_pos[:, :, None] == torch.arange(size)).any(1)


def control_words(label_pos, generator):
    before = torch.cat([0 * label_pos[:, :1], label_pos[:, :-1]], 1)
    count = label_pos - before - 1
    return before + 1 + (torch.rand(label_pos.shape, generator=generator) * count).long()


CONTROL_WORDS = {
    "A label word is in the control": "before - 1 -> before",
    "BOS is no word of an example": (
        lambda at, generator: control_words(at, generator).index_fill(1, torch.tensor([0]), 0)
    ),
    "A word of another example": lambda at, draw: control_words(at, draw).flip(1),
    "Not every word of an example": lambda at, generator: at - 1,
    "Positions are whole numbers.": ".long() -> ",
    "Take random numbers from": "generator=generator -> generator=None",
}


def saliency(attention, written, gradient):
    slope = gradient[:, None] @ written.mT  # (batch, head, dest, src)
    return (attention * slope).sum(1).abs()


SALIENCY = {
    "Sum over the heads first: they may cancel.": ".sum(1).abs() -> .abs().sum(1)",
    "Saliency has no sign: take the absolute value of the sum.": ".abs() -> ",
    "That is the derivative alone: multiply by the attention.": "attention * slope -> slope",
    "Take the gradient at i, what is written of j.": "attention * slope -> attention * slope.mT",
}


def flow(importance, label_pos, target):
    place = torch.arange(importance.shape[-1])
    label, asked = _is_label(label_pos, len(place)), (place == target[:, None])[:, :, None]
    edge = (place[:, None] > place) & (place <= target[:, None])[:, :, None]
    gather, read = edge & label[:, :, None], edge & asked & label[:, None, :]
    kinds = torch.stack([gather, read, edge & ~(gather | read)], 1)
    return (importance[:, None] * kinds).sum((-2, -1)) / kinds.sum((-2, -1))


FLOW = {
    "Those are sums: divide by the number of edges of each kind.": " / kinds.sum((-2, -1)) -> ",
    "Rows are destinations, columns are sources.": "importance[:, None] -> importance[:, None].mT",
    "Gather edges lead *into* the label words, not out of them.": (
        "edge & label[:, :, None] -> edge & ~asked & label[:, None, :]"
    ),
    "The rest are the edges that neither gather nor read.": "edge & ~(gather | read) -> edge",
    "Nothing after q is in the prompt.": " & (place <= target[:, None])[:, :, None] -> ",
}


def isolated(scores, label_pos):
    size = scores.shape[-1]
    before, label = torch.ones(size, size).tril(-1).bool(), _is_label(label_pos, size)
    cut = label[:, :, None] & before
    return scores.masked_fill((cut | before.T)[:, None], -torch.inf).softmax(-1)


ISOLATED = {
    "The rows of the label words do not sum to 1: cut the scores *before* the softmax.": (
        "(cut | before.T)[:, None], -torch.inf).softmax(-1) "
        "-> before.T, -torch.inf).softmax(-1) * ~cut[:, None]"
    ),
    "Cut what the label words read, their rows, not what others read from them.": (
        "label[:, :, None] -> label[:, None]"
    ),
    "A label word may still attend to itself: cut only the sources before it.": (
        "(cut | before.T)[:, None], -torch.inf).softmax(-1) "
        "-> before.T, -torch.inf).softmax(-1) * ~label[:, None, :, None]"
    ),
    "Attention is causal: a word sees only itself and what came before.": "(cut | before.T) -> cut",
}


def auc(scores, predicted):
    ones, zeros = scores[predicted == 1][:, None], scores[predicted == 0]
    return ((ones > zeros) + 0.5 * (ones == zeros)).float().mean().item()


AUC = {
    "A tie counts one half; you count it as lost.": "0.5 -> 0.0",
    "A tie counts one half; you count it as won.": "0.5 -> 1.0",
    "The row of class 1 wins with the *higher* score.": "(ones > zeros) -> (ones < zeros)",
    "That is the accuracy at one half: the area compares all pairs.": lambda scores, predicted: (
        _share((scores > 0.5) == predicted)
    ),
}


def label_loyalty(model, prompts, layer):
    changed = answers(model, prompts, isolation(model, prompts, [layer])).predicted
    return _share(changed == answers(model, prompts).predicted)


def _share(same):
    return same.float().mean().item()


LABEL_LOYALTY = {
    "That is the accuracy: loyalty asks for the *same* answer, right or wrong.": (
        "answers(model, prompts).predicted -> prompts.gold"
    ),
    "That is the share of answers that change; loyalty is the share that stays.": "== -> !=",
}


def loyalty(own):
    """Loyalty by layer of a student's model, on this student's prompts."""
    model = load(f"anchors-{[0, 3, 4, 5, 6, 7][own % 6]}")
    prompts = topics.sample(64, torch.Generator().manual_seed(own))
    return torch.tensor([label_loyalty(model, prompts, layer) for layer in range(4)])


LOYALTY = {
    "`loyalty` is the share of answers that stay, not of those that change.": lambda x: 1 - x,
    "`loyalty` begins with layer 0.": lambda x: x.flip(0),
}


reason = "b"
REASON = {
    "What the target reads is not cut: the rows of the label words are.": "a",
    "Isolation cuts the same number of edges in every layer.": "c",
    "Then isolating an early layer would not hurt; and words are dealt out anew.": "d",
}
