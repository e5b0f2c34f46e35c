"""Homework 2, on chapter 02: kinds of edges, saliency, isolation, extraction, loyalty."""

import torch
from iclutils.chapters.label_anchors.answers import answers
from iclutils.chapters.label_anchors.isolation import isolation
from iclutils.interp.hooks import cut_attention
from iclutils.models import load
from iclutils.tasks import topics

from checks import Part, generator

CASES = (("anchors-0", 0), ("anchors-3", 1))  # model and layer: public, first hidden


def _places(seed):
    """Label positions in order, and a target after them, for three prompts of 14 words."""
    draw = generator(seed)
    places = [torch.randperm(10, generator=draw)[: 2 + seed % 3] + 1 for _ in range(3)]
    target = torch.randint(12, 14, (3,), generator=draw)
    return torch.stack(places).sort(-1).values, target


def _attention(seed):
    draw, size = generator(seed), 5 + seed
    attention = torch.rand(2, 3, size, size, generator=draw).tril()
    return attention, torch.randn(2, 3, size, size, generator=draw)


def _importance(seed):
    return torch.rand(3, 14, 14, generator=generator(seed + 100)), *_places(seed)


def _raw_scores(seed):
    return torch.randn(3, 2, 14, 14, generator=generator(seed)), _places(seed)[0]


def _classes(seed):
    """Scores with ties, of two classes."""
    draw, count = generator(seed), 12 + 3 * seed
    scores = torch.randint(0, 5, (count,), generator=draw) / 5
    chosen = (scores + torch.rand(count, generator=draw) > 0.8 + 0.1 * (seed % 2)).long()
    chosen[:2] = torch.tensor([0, 1])
    return scores, chosen


def _prompts(seed):
    if seed >= len(CASES):
        return None
    name, layer = CASES[seed]
    return load(name), topics.sample(24, generator(seed)), layer


q1 = (Part("edge_counts", inputs=_places),)
q2 = (Part("saliency", inputs=_attention),)
q3 = (Part("flow", inputs=_importance),)
q4 = (Part("isolated", inputs=_raw_scores),)
q5 = (Part("auc", inputs=_classes),)
q6 = (Part("label_loyalty", inputs=_prompts), Part("reason", "letter"))

# Students get what stands above this line, and nothing below it.


def _is_label(label_pos, size):
    return (label_pos[:, :, None] == torch.arange(size)).any(1)


def _kinds(size, label_pos, target, stop=True, out=False, diagonal=False, rest=True):
    """Which edges are wp, pq and ww, (batch, kind, destination, source)."""
    place, label = torch.arange(size), _is_label(label_pos, size)
    edge = (place[:, None] > place - int(diagonal)).expand(len(target), size, size)
    if stop:
        edge = edge & (place <= target[:, None])[:, :, None]
    asked = (place == target[:, None])[:, :, None]
    into_target = edge & asked & label[:, None, :]
    into_label = edge & (label[:, None, :] & ~asked if out else label[:, :, None])
    return torch.stack([into_label, into_target, edge & ~((into_label | into_target) & rest)], 1)


def edge_counts(label_pos, target, **how):
    """Number of edges wp, pq, ww."""
    return _kinds(int(target.max()) + 1, label_pos, target, **how).sum((-2, -1))


EDGE_COUNTS = {
    "A word's attention to itself is no edge between words: leave the diagonal out.": {
        "diagonal": True
    },
    "wp are the edges *into* a label word, from everything before it; you count those that leave "
    "it.": {"out": True},
    "ww are all *other* edges: subtract wp and pq from q (q + 1) / 2.": {"rest": False},
    "Earlier label words are sources of a label word, too: label word k has p_k "
    "sources.": lambda at, q: edge_counts(at, q) - torch.tensor([sum(range(at.shape[1])), 0, 0]),
    "Positions 0 to q are q + 1 words, so there are q (q + 1) / 2 edges.": lambda at, q: (
        edge_counts(at, q) - q[:, None] * torch.tensor([0, 0, 1])
    ),
}


def saliency(attention, gradient):
    """|sum over heads of attention times gradient|."""
    return (attention * gradient).sum(1).abs()


SALIENCY = {
    "Sum over the heads first, then take the absolute value: heads may cancel.": lambda a, g: (
        (a * g).abs().sum(1)
    ),
    "Sum over the heads; that is their mean.": lambda a, g: (a * g).mean(1).abs(),
    "Saliency has no sign: take the absolute value of the sum.": lambda a, g: (a * g).sum(1),
    "That is the gradient alone: multiply by the attention.": lambda a, g: g.sum(1).abs(),
    "That is a matrix product; "
    "attention and gradient are multiplied entry by entry.": lambda a, g: (a @ g).sum(1).abs(),
}


def flow(importance, label_pos, target, mean=True, **how):
    """Mean saliency of the edges wp, pq, ww."""
    kinds = _kinds(importance.shape[-1], label_pos, target, **how)
    total = (importance[:, None] * kinds).sum((-2, -1))
    return total / kinds.sum((-2, -1)) if mean else total


FLOW = {
    "Those are sums: divide by the number of edges of each kind.": {"mean": False},
    "Rows are destinations and columns are sources: "
    "you have them the wrong way round.": lambda importance, *given: flow(importance.mT, *given),
    "S_wp is about the edges *into* the label words, not out of them.": {"out": True},
    "S_ww is the mean of the edges that are neither wp nor pq.": {"rest": False},
    "Leave the diagonal out.": {"diagonal": True},
    "Nothing after the target belongs to the prompt: stop at q.": {"stop": False},
}


def isolated(scores, label_pos):
    """Attention pattern in which label words read nothing before them."""
    return _pattern(scores, _before(scores) & _is_label(label_pos, scores.shape[-1])[:, :, None])


def _before(scores):
    return torch.ones(scores.shape[-2:]).tril(-1).bool()


def _pattern(scores, cut=False, causal=True):
    """Attention without the edges that are cut, (batch, destination, source)."""
    gone = torch.as_tensor(cut).expand(len(scores), *scores.shape[-2:]) | _before(scores).T & causal
    return scores.masked_fill(gone[:, None], -torch.inf).softmax(-1)


ISOLATED = {
    "The rows of the label words do not sum to 1: cut the scores *before* "
    "the softmax.": lambda s, at: _pattern(s) * ~(_before(s) & _is_label(at, 14)[:, None, :, None]),
    "That cuts what others read *from* the label words. Isolation cuts what the label words "
    "read: their rows.": lambda s, at: _pattern(s, _before(s) & _is_label(at, 14)[:, None]),
    "A label word may still attend to itself: cut only the sources before it.": lambda s, at: (
        _pattern(s) * ~_is_label(at, 14)[:, None, :, None]
    ),
    "Nothing is cut in that pattern.": lambda s, at: _pattern(s),
    "Attention is causal: a word sees only itself and what came before.": lambda s, at: _pattern(
        s, _before(s) & _is_label(at, 14)[:, :, None], causal=False
    ),
}


def auc(scores, predicted, tie=0.5):
    """Area under the ROC curve: the share of pairs that are won."""
    ones, zeros = scores[predicted == 1][:, None], scores[predicted == 0]
    return ((ones > zeros) + tie * (ones == zeros)).float().mean().item()


AUC = {
    "A tie counts one half; you count it as lost.": {"tie": 0.0},
    "A tie counts one half; you count it as won.": {"tie": 1.0},
    "That is the area the other way round: a pair is won when the row of class 1 has the "
    "*higher* score.": lambda scores, predicted: auc(-scores, predicted),
    "That is the accuracy at a threshold of one half: the area compares all pairs and needs no "
    "threshold.": lambda scores, predicted: ((scores > 0.5) == predicted).float().mean().item(),
    "That is won minus lost (a rank correlation): the area is a share of pairs.": lambda *given: (
        2 * auc(*given) - 1
    ),
}


def label_loyalty(model, prompts, layer):
    """Share of predictions that isolation of one layer leaves the same."""
    changed = answers(model, prompts, isolation(model, prompts, [layer])).predicted
    return _share(changed == answers(model, prompts).predicted)


def _share(same):
    return same.float().mean().item()


def _columns(model, prompts, layer):
    size = prompts.tokens.shape[1]
    cut = _is_label(prompts.label_pos, size)[:, None] & torch.ones(size, size).tril(-1).bool()
    changed = answers(model, prompts, cut_attention(model, {layer: cut})).predicted
    return _share(changed == answers(model, prompts).predicted)


LABEL_LOYALTY = {
    "That is the accuracy under isolation. Loyalty asks whether the answer is the *same* as "
    "without isolation, right or wrong.": lambda model, prompts, layer: _share(
        answers(model, prompts, isolation(model, prompts, [layer])).predicted == prompts.gold
    ),
    "That is the share of answers that change; loyalty is the share that stays.": lambda *given: (
        1 - label_loyalty(*given)
    ),
    "Isolation cuts the rows of the label words (what they read), not their columns (what is "
    "read from them).": _columns,
}


REASON = {
    "Reason (a): the target reads the label words in the second layer most, and isolating the "
    "label words there cuts nothing that the target reads.": "a",
    "Reason (c): isolation cuts the same number of edges in every layer.": "c",
    "Reason (d): isolating an early layer hurts, so the label words do not know the answer by "
    "themselves: the words that are dealt out change from prompt to prompt.": "d",
}


TRUTHS = {
    "edge_counts": (edge_counts, EDGE_COUNTS),
    "saliency": (saliency, SALIENCY),
    "flow": (flow, FLOW),
    "isolated": (isolated, ISOLATED),
    "auc": (auc, AUC),
    "label_loyalty": (label_loyalty, LABEL_LOYALTY),
    "reason": ("b", REASON),
}
