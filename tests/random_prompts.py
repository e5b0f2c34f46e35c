"""Random prompts of every shape, for tests: content means nothing, positions are right."""

import torch
from hypothesis import strategies as st

from iclutils.tasks.prompts import Prompts, Role, join

VOCAB = 40
LABELS = 30  # ids 30 .. 35 are label words, 36 is the cue, 37 starts a prompt, 38 pads
CUE, BOS, PAD = 36, 37, 38


def random_prompts(seed=0, count=3, classes=3, shots=1, shortest=1, longest=4, shared=False):
    """``count`` prompts of ``classes * shots`` demonstrations with texts of random length.

    ``shared`` gives all of them the same demonstrations, so that only the queries differ.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    def text():
        return [draw(0, LABELS - 1) for _ in range(draw(shortest, longest))]

    def demonstrations():
        words = (LABELS + torch.randperm(6, generator=generator)[:classes]).tolist()
        order = torch.randperm(classes * shots, generator=generator) % classes
        tokens, roles, places = [BOS], [Role.FORMAT], []
        for c in order.tolist():
            body = text()
            tokens += [*body, CUE, words[c]]
            roles += [Role.TEXT] * len(body) + [Role.FORMAT, Role.LABEL]
            places.append(len(tokens) - 1)
        return tokens, roles, places, order.tolist(), words

    rows = []
    common = demonstrations()
    for _ in range(count):
        tokens, roles, places, order, words = common if shared else demonstrations()
        query = [*text(), CUE]
        whole = tokens + query, roles + [Role.QUERY] * len(query)
        rows.append((*whole, places, order, words, draw(0, classes - 1)))
    length = max(len(row[0]) for row in rows)
    label_pos = torch.tensor([row[2] for row in rows])
    return Prompts(
        tokens=torch.tensor([r[0] + [PAD] * (length - len(r[0])) for r in rows]),
        roles=torch.tensor([r[1] + [Role.PAD] * (length - len(r[1])) for r in rows]),
        target=torch.tensor([len(row[0]) - 1 for row in rows]),
        label_pos=label_pos,
        cue_pos=label_pos - 1,
        demo_class=torch.tensor([row[3] for row in rows]),
        gold=torch.tensor([row[5] for row in rows]),
        label_words=torch.tensor([row[4] for row in rows]),
    )


def two_sets(**shape):
    """Seven prompts on two sets of demonstrations, mixed."""
    parts = [random_prompts(s, count=n, shared=True, **shape) for s, n in ((5, 3), (6, 4))]
    return join(parts)[torch.tensor([0, 3, 1, 4, 5, 2, 6])]


def prompts_strategy():
    return st.builds(
        random_prompts,
        seed=st.integers(0, 10_000),
        count=st.integers(1, 4),
        classes=st.integers(2, 5),
        shots=st.integers(1, 3),
        longest=st.integers(1, 5),
        shared=st.booleans(),
    )
