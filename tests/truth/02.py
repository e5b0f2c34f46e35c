"""Chapter 02: label words gather, the target reads them, and what is left without."""

import torch
from alone import LAYERS, ids, run, write

TEXT, FORMAT, LABEL, QUERY, PAD = range(5)
SHOWN = [("The waiter was rude and the soup was cold.", 0), ("A lovely film from start to end.", 1)]
ASKED = [("We would come back any day, every dish was a joy.", 1), ("I wanted my money back.", 0)]
WORDS = [ids(f" {word}")[0] for word in ("Negative", "Positive")]


def prompt(query):
    pieces = []
    for text, label in SHOWN:
        pieces += [(ids("Review:"), FORMAT), (ids(f" {text}"), TEXT)]
        pieces += [(ids("\nSentiment:"), FORMAT), ([WORDS[label]], LABEL), (ids("\n"), FORMAT)]
    pieces.append((ids(f"Review: {query}\nSentiment:"), QUERY))
    return [t for p, _ in pieces for t in p], [r for p, r in pieces for _ in p]


rows = [prompt(query) for query, _ in ASKED]
longest = max(len(tokens) for tokens, _ in rows)
labels = [i for i, role in enumerate(rows[0][1]) if role == LABEL]


def each(edits):
    """Logits of the label words at the target of every prompt; edits are made for its roles."""
    found = []
    for tokens, roles in rows:
        logits = run(torch.tensor([tokens]), edits(torch.tensor(roles)))[0]
        found.append(logits[0, -1, WORDS])
    return torch.stack(found)


def everywhere(change, name, layers=range(LAYERS)):
    return {(name, layer): change for layer in layers}


def cut(edges):
    return lambda scores: scores.masked_fill(edges, -torch.inf)


def into_labels(roles):
    """Edges from all earlier tokens into a label word."""
    place = torch.arange(len(roles))
    return (roles == LABEL)[:, None] & (place < place[:, None])


def dropped(*kept):
    """The query may not look at demonstrations but at these."""

    def edits(roles):
        gone = (roles != QUERY) & ~torch.isin(roles, torch.tensor(kept))
        return everywhere(cut((roles == QUERY)[:, None] & gone), "scores")

    return edits


def scaled(beta):
    def edits(roles):
        by = torch.ones(len(roles), len(roles))
        by[-1, labels] = torch.tensor(beta).exp()
        return everywhere(lambda weights: weights * by, "weights")

    return edits


clean = each(lambda roles: {})
reading, states = [], {"q": [], "k": []}
DEEP = 18
for tokens, _ in rows:
    seen = run(torch.tensor([tokens]))[1]
    reading.append(seen["weights", DEEP][0, :, -1, labels].sum(0))
    states["q"].append(seen["q_proj", DEEP][0, -1])
    grouped = seen["k_proj", DEEP][0, labels].unflatten(-1, (3, 64)).repeat_interleave(3, 1)
    states["k"].append(grouped.flatten(1))
spread = (states["q"][0] - states["q"][1]).double() / 2  # two queries differ along one direction
near = (states["k"][0][0] - states["k"][0][1]).double() @ spread

small = []
for tokens, roles in rows:
    left = [t for t, r in zip(tokens, roles, strict=True) if r != TEXT]
    small.append(run(torch.tensor([left]))[0][0, -1, WORDS])

padded = [
    [part + [fill] * (longest - len(part)) for part in column]
    for column, fill in zip(zip(*rows, strict=True), (0, PAD), strict=True)
]
isolated = each(lambda roles: everywhere(cut(into_labels(roles)), "scores", range(5)))
given = {"tokens": padded[0], "roles": padded[1], "target": [len(tokens) - 1 for tokens, _ in rows]}
given |= {"label_pos": [labels, labels], "cue_pos": [[i - 1 for i in labels]] * 2}
given |= {"demo_class": [[label for _, label in SHOWN]] * 2, "gold": [gold for _, gold in ASKED]}
given |= {"label_words": [WORDS, WORDS]}
values = {
    "logits of the labels": clean,
    "logits less the mean of the set": clean - clean.mean(0),
    "label words isolated in 5 layers": isolated,
    "attention to earlier tokens zeroed in 5 layers": each(
        lambda roles: everywhere(
            lambda w: w.masked_fill(into_labels(roles), 0), "weights", range(5)
        )
    ),
    "attention to the labels in layer 18": torch.stack(reading),
    "from formatting and labels": each(dropped(FORMAT, LABEL)),
    "from labels alone": each(dropped(LABEL)),
    "without the texts": torch.stack(small),
    "re-weighted": each(scaled((0.5, -0.3))),
    "distance of the keys in layer 18": near.abs().item(),
}
write(__file__, given, values)
