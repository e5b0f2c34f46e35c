"""Homework 6, on chapter 06: influence, chance, circuits, path patching, similarity, synergy."""

import math
from functools import partial

import torch
from torch import Tensor

from checks import Part, generator, normal


def _logits(seed):
    draw, draws, vocab = generator(seed), 5 + seed, 7 + seed
    clean = 2 * normal(draw, vocab) + 3
    return clean, clean + normal(draw, draws, vocab) + 4 * normal(draw, draws, 1)


def _effects(seed):
    """Quarters, so that sums are exact and ties are ties; the first draw is what was seen."""
    draw, samples = generator(seed), 6 + seed
    whole = torch.randint(-2, 4, (samples,), generator=draw)
    whole[0] = 4
    signs = torch.randint(0, 2, (39 + 10 * seed, samples), generator=draw) * 2 - 1
    signs[0] = 1
    return (-whole if seed % 2 else whole).double() / 4, signs.double()


def _scores(seed, kept=0.6):
    draw, batch = generator(seed), 8 + seed
    clean, gap, mixed = (torch.rand(batch, generator=draw, dtype=torch.float64) for _ in range(3))
    corrupt = -clean - 3 - 4 * gap
    return corrupt + (kept + 0.3 * mixed) * (3 + 4 * gap), -clean, corrupt


def _all_edges(function, nodes, clean, corrupt):
    """The output for every edge; a wrong type or shape is left to be found as it is."""
    found = []
    for writer in range(len(nodes)):
        for reader in range(writer + 1, len(nodes) + 1):
            out = function(list(nodes), clean, corrupt, writer, reader)
            if not isinstance(out, Tensor) or out.squeeze().shape != clean.shape:
                return out
            found.append(out.squeeze())
    return torch.stack(found)


def _network(seed):
    draw, d = generator(seed), 4
    clean, corrupt = normal(draw, 3, d), normal(draw, 3, d)
    maps = [0.5 * normal(draw, d, d) for _ in range(5 + seed % 2)]
    return [lambda x, w=each: torch.tanh(x @ w + 0.3) for each in maps], clean, corrupt


def _samples(seed):
    draw, count, a = generator(seed), 12 + 3 * seed, 3 + seed
    x = normal(draw, count, a) + 1.5
    return x, torch.cat([x[:, :2], normal(draw, count, 3)], 1) @ normal(draw, 5, 5) + 2


def _groups(seed):
    draw, batch, groups = generator(seed), 6 + seed, 2 + seed % 3
    rand = partial(torch.rand, generator=draw, dtype=torch.float64)
    clean = -rand(batch)
    return clean, clean - 2 * rand(groups, batch), clean - 5 * rand(batch)


q1 = (Part("influence", inputs=_logits, tolerance=1e-06),)
q2 = (Part("sign_flip_p", inputs=_effects, tolerance=1e-09),)
q3 = (
    Part("faithfulness", inputs=_scores, tolerance=1e-06),
    Part("completeness", inputs=partial(_scores, kept=0.05), tolerance=1e-06),
)
q4 = (Part("patched", inputs=_network, tolerance=1e-06, outcome=_all_edges),)
q5 = (Part("cka", inputs=_samples, tolerance=1e-06),)
q6 = (
    Part("synergy", inputs=_groups, tolerance=1e-06),
    Part("stand_in", "number", tolerance=0.065),
    Part("pipeline", "number", tolerance=0.1),
    Part("reason", "letter"),
)

# Students get what stands above this line, and nothing below it.


def influence(clean, altered, swapped=False, unit=1.0, **error):
    """Mean divergence KL(clean || altered) and its standard error, in nats."""
    p, q = clean.log_softmax(-1), altered.log_softmax(-1)
    p, q = (q, p) if swapped else (p, q)
    return _mean_se((p.exp() * (p - q)).sum(-1) / unit, **error)


def _mean_se(values, root=True, correction=1):
    spread = values.std(correction=correction)
    return torch.stack([values.mean(), spread / (math.sqrt(len(values)) if root else 1)])


INFLUENCE = {
    "The divergence is the other way round: KL(clean || altered) weighs by the clean "
    "probabilities.": {"swapped": True},
    "That is the norm of a difference of logits: a number added to all of them changes it, and "
    "no probability.": lambda clean, altered: _mean_se((altered - clean).norm(dim=-1)),
    "Those are bits: take the natural logarithm.": {"unit": math.log(2)},
    "The standard error of a mean is the deviation over the square root of the number of draws.": {
        "root": False
    },
    "For the deviation of a sample, divide by one less than the number of draws.": {
        "correction": 0
    },
    "Those are cross-entropies: the clean entropy has to be subtracted.": lambda clean, altered: (
        _mean_se(-(clean.softmax(-1) * altered.log_softmax(-1)).sum(-1))
    ),
}


def sign_flip_p(effects, signs):
    """Two-sided p-value that the mean effect is 0."""
    return (1 + _extreme(effects, signs)) / (1 + len(signs))


def _extreme(effects, signs, ties=True, two_sided=True):
    """Draws at least as extreme as what was seen."""
    flipped, seen = (signs * effects).mean(-1), effects.mean()
    flipped, seen = (flipped.abs(), seen.abs()) if two_sided else (flipped, seen)
    return int(((flipped >= seen) if ties else (flipped > seen)).sum())


SIGN_FLIP_P = {
    "The observation is one of the draws: "
    "(1 + as extreme) / (1 + draws), so that no p is 0.": lambda e, s: _extreme(e, s) / len(s),
    "The observation counts above the line as well: (1 + as extreme) / (1 + draws).": lambda e, s: (
        _extreme(e, s) / (1 + len(s))
    ),
    "The observation counts below the line as well: (1 + as extreme) / (1 + draws).": lambda e, s: (
        (1 + _extreme(e, s)) / len(s)
    ),
    "The test is two-sided: compare absolute values.": lambda e, s: (
        (1 + _extreme(e, s, two_sided=False)) / (1 + len(s))
    ),
    "The test is two-sided: compare absolute values, and count the observation.": lambda e, s: (
        _extreme(e, s, two_sided=False) / len(s)
    ),
    "As extreme means at least as large: ties count.": lambda e, s: (
        (1 + _extreme(e, s, ties=False)) / (1 + len(s))
    ),
    "That is the share of draws that are *less* extreme.": lambda *given: 1 - sign_flip_p(*given),
}


def faithfulness(alone, clean, corrupt):
    """Share of the gap that the circuit alone keeps."""
    return ((alone - corrupt).mean() / (clean - corrupt).mean()).item()


def completeness(without, clean, corrupt):
    """Share of the gap that is lost without the circuit."""
    return 1 - faithfulness(without, clean, corrupt)


def _ratios(scores, clean, corrupt):
    return ((scores - corrupt) / (clean - corrupt)).mean().item()


FAITHFULNESS = {
    "Numerator and denominator are exchanged: the gap goes below.": lambda *a: 1 / faithfulness(*a),
    "That is the share that is lost: faithfulness is what the circuit keeps.": completeness,
    "Mean over mean, not the mean of the ratios: a sequence with a small gap would weigh too "
    "much.": _ratios,
    "Measure from the corrupt run: it is the zero of the scale.": lambda alone, clean, corrupt: (
        alone.mean() / clean.mean()
    ).item(),
    "Divide by the gap, clean minus corrupt.": lambda alone, clean, corrupt: (
        (alone - corrupt).mean().item()
    ),
}


COMPLETENESS = {
    "That is the faithfulness of everything *but* the circuit. A complete circuit leaves "
    "nothing: completeness is 1 minus it.": faithfulness,
    "Mean over mean, not the mean of the ratios.": lambda *given: 1 - _ratios(*given),
    "Numerator and denominator are exchanged: the gap goes below.": lambda *a: 1 / completeness(*a),
    "Divide by the gap, clean minus corrupt.": lambda without, clean, corrupt: (
        (clean - without).mean().item()
    ),
}


def patched(nodes, clean, corrupt, writer, reader):
    """Output of the clean run in which one node reads another's corrupt output."""
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


def _early(nodes, clean, corrupt, writer, reader):
    read = _streams(nodes, clean)[writer]
    change = nodes[writer](read + corrupt - clean) - nodes[writer](read)
    return _changed(nodes, clean, change, reader)


PATCHED = {
    "Every later node reads the patched write: that lets indirect paths through. Patch what "
    "*one* reader reads.": lambda f, x, y, writer, reader: _changed(
        f, x, _change(f, x, y, writer), writer + 1, stays=True
    ),
    "The patch stays in the stream: from the reader on, everything reads it. Give it to the "
    "reader alone.": lambda f, x, y, writer, reader: _changed(
        f, x, _change(f, x, y, writer), reader, stays=True
    ),
    "The nodes after the reader are held at their clean writes: let them run, on what the reader "
    "now writes.": _held,
    "That is the corrupt run with one clean edge: "
    "start from the clean one.": lambda f, x, y, *edge: patched(f, y, x, *edge),
    "The reader reads the corrupt stream: patch only what this one writer has put there.": (
        lambda f, x, y, writer, reader: _changed(
            f, x, _streams(f, y)[reader] - _streams(f, x)[reader], reader
        )
    ),
    "The writer's corrupt write comes from a corrupt run of the *whole* model: earlier nodes "
    "write other things there, too.": _early,
    "The writer's own clean write is still there: replace it.": lambda f, x, y, writer, reader: (
        _changed(f, x, f[writer](_streams(f, y)[writer]), reader)
    ),
    "That is what the patch changes: return the output.": lambda f, x, *given: (
        patched(f, x, *given) - _streams(f, x)[-1]
    ),
    "Nothing was patched.": lambda f, x, *given: _streams(f, x)[-1],
    "The patch has the wrong sign: corrupt minus clean.": lambda f, x, y, writer, reader: _changed(
        f, x, -_change(f, x, y, writer), reader
    ),
}


def cka(X, Y, axis=0, above=1.0, norm=lambda X: (X.T @ X).norm()):
    """Linear CKA."""
    if axis is not None:
        X, Y = X - X.mean(axis, keepdim=True), Y - Y.mean(axis, keepdim=True)
    return ((Y.T @ X).square().sum() ** above / (norm(X) * norm(Y))).item()


CKA = {
    "The samples are not centred: subtract each column's mean first.": {"axis": None},
    "The mean runs over the samples, for each column, and not over the columns.": {"axis": 1},
    "The norm above is squared: ||Y^T X||².": {"above": 0.5},
    "That is its square root.": lambda *given: cka(*given) ** 0.5,
    "Below stand the norms of X^T X and Y^T Y, not the squared norms of X and Y.": {
        "norm": lambda X: X.square().sum()
    },
    "Below, the norms are not squared: ||X^T X|| ||Y^T Y||.": {
        "norm": lambda X: (X.T @ X).square().sum()
    },
}


def synergy(clean, alone, together):
    """What removing all groups costs, minus what each costs alone, in nats."""
    return ((clean - together).mean() - (clean - alone).mean(-1).sum()).item()


# The shares were measured for ten batches of 16 sequences: .752 and -.629, with standard
# deviations .021 and .032. The tolerances are three of these.
SYNERGY = {
    "The sign is turned around: D is a *loss*, clean minus what is left.": lambda *a: -synergy(*a),
    "Those are scores, not losses: subtract each from the clean score.": lambda clean, *rest: (
        -synergy(0 * clean, *rest)
    ),
    "Subtract what *each* removal costs: the sum of them.": lambda clean, alone, together: (
        alone.mean() - together.mean()
    ).item(),
    "That is what removing all of them costs: subtract "
    "what each costs alone.": lambda clean, alone, together: (clean - together).mean().item(),
    "That is a ratio. The interaction is a difference, in nats.": lambda clean, alone, together: (
        (clean - together).mean() / (clean - alone).mean(-1).sum()
    ).item(),
}


STAND_IN = {
    "`stand_in` has the wrong sign: removing all costs *more* than the sum.": -0.75,
    "`stand_in` is in nats: divide by the gap.": 6.0,
}


PIPELINE = {
    "`pipeline` has the wrong sign: removing all costs *less* than the sum.": 0.63,
    "`pipeline` is in nats: divide by the gap.": -5.04,
}


REASON = {
    "Reason (a): what one removal at a time shows is what the *others* cannot replace. Look at "
    "what the four cost together.": "a",
    "Reason (c): removed together, at the same mean, the four cost most of the gap. So the mean "
    "does take away what they say.": "c",
    "Reason (d): then removing all four would cost little, too.": "d",
}


TRUTHS = {
    "influence": (influence, INFLUENCE),
    "sign_flip_p": (sign_flip_p, SIGN_FLIP_P),
    "faithfulness": (faithfulness, FAITHFULNESS),
    "completeness": (completeness, COMPLETENESS),
    "patched": (patched, PATCHED),
    "cka": (cka, CKA),
    "synergy": (synergy, SYNERGY),
    "stand_in": (0.75, STAND_IN),
    "pipeline": (-0.63, PIPELINE),
    "reason": ("b", REASON),
}
