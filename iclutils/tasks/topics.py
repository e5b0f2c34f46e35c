"""In-context classification of made-up topics: only the context can tell which label is meant.

The vocabulary has 12 topics of 8 words, in 4 families of 3 (siblings), 16 fillers and 8 label
words. Every prompt deals out anew the first of these, as many as it has classes (four in training):
``BOS text : label text : label .. query :``.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from .prompts import Prompts, Role

_LINES = (Path(__file__).parent / "data" / "topics.tsv").read_text(encoding="utf-8").splitlines()
TOPIC_WORDS = dict(line.split("\t") for line in _LINES)  # three after three are siblings
FILLERS = "the a of and to in it is was on with that for as at by"
LABELS = "Alpha Bravo Cedar Dover Ember Flint Grove Haven"

TOPICS = list(TOPIC_WORDS)
_WORDS = " ".join(TOPIC_WORDS.values()).split()
NAMES = [*_WORDS, *FILLERS.split(), *LABELS.split(), ":", "<bos>"]
PER_TOPIC, SIBLINGS = 8, 3
FIRST_FILLER = len(_WORDS)
FIRST_LABEL = FIRST_FILLER + len(FILLERS.split())
CUE, BOS, VOCAB = len(NAMES) - 2, len(NAMES) - 1, len(NAMES)


@dataclass(frozen=True)
class Texts:
    """How texts are drawn: length in tokens, and the share of each kind of word. Each token is a
    filler with probability ``filler``; else a word of the text's own topic, of a sibling topic, or
    (the rest) of any. ``same``: the share of own-topic words that are always the same word."""

    shortest: int = 4
    longest: int = 12
    filler: float = 0.3
    own: float = 0.8
    sibling: float = 0.15
    same: float = 0.0

    def with_difficulty(self, difficulty: float) -> "Texts":
        """Return the same, easier: at 0 one fixed word per topic, at 1 the full task."""
        return replace(
            self,
            shortest=max(1, round(self.shortest * difficulty)),
            longest=max(1, round(self.longest * difficulty)),
            filler=self.filler * difficulty,
            own=1 - (1 - self.own) * difficulty,
            sibling=self.sibling * difficulty,
            same=max(0.0, 1 - 2 * difficulty),
        )


FULL = Texts()
HARD = Texts(filler=0.6)  # so few topic words that errors are common


def sample(
    count: int,
    generator: Generator,
    *,
    shots: int = 1,
    classes: int = 4,
    texts: Texts = FULL,
    shared: bool = False,
) -> Prompts:
    """Draw prompts of ``shots`` demonstrations per class, in random order, and a query; ``shared``
    gives all prompts the same demonstrations. Sequences to train on: ``stream``."""
    sets = 1 if shared else count
    topics = _choose(sets, len(TOPICS), classes, generator)
    words = FIRST_LABEL + _choose(sets, classes, classes, generator)
    order = _choose(sets, classes * shots, classes * shots, generator) % classes
    parts = *_draw(topics, order, texts, generator), topics, words, order
    demos, sizes, topics, words, order = (part.expand(count, *part.shape[1:]) for part in parts)
    gold = torch.randint(0, classes, (count, 1), generator=generator)
    query, size = _draw(topics, gold, texts, generator)
    labels = words.gather(1, torch.cat([order, gold], 1))
    tokens, cue = assemble(torch.cat([demos, query], 1), torch.cat([sizes, size], 1), labels)
    target, label_pos = cue[:, -1], cue[:, :-1] + 1
    tokens = tokens[:, : int(target.max()) + 1].clone()
    place = torch.arange(tokens.shape[1])
    roles = torch.full_like(tokens, Role.TEXT)
    roles[:, 0] = Role.FORMAT
    roles.scatter_(1, cue[:, :-1], Role.FORMAT).scatter_(1, label_pos, Role.LABEL)
    roles[place > label_pos[:, -1:]] = Role.QUERY
    roles[place > target[:, None]] = Role.PAD
    tokens[roles == Role.PAD] = BOS
    return Prompts(tokens, roles, target, label_pos, cue[:, :-1], order, gold[:, 0], words)


def stream(
    count: int, examples: int, generator: Generator, *, texts: Texts = FULL, cues: bool = True
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch example"]]:
    """Draw training sequences of more than four examples, and the positions before their labels.
    The first four show every class once, in random order; the others are of any class. Without
    ``cues`` a label follows its text at once."""
    classes = 4
    topics = _choose(count, len(TOPICS), classes, generator)
    words = FIRST_LABEL + _choose(count, classes, classes, generator)
    first = _choose(count, classes, classes, generator)
    rest = torch.randint(0, classes, (count, examples - classes), generator=generator)
    order = torch.cat([first, rest], 1)
    drawn, sizes = _draw(topics, order, texts, generator)
    return assemble(drawn, sizes, words.gather(1, order), cues)


def assemble(
    texts: Int[Tensor, "batch example longest"],
    sizes: Int[Tensor, "batch example"],
    labels: Int[Tensor, "batch example"],
    cues: bool = True,
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch example"]]:
    """Write ``BOS text : label text : label ..`` of the first ``sizes`` tokens of each text, padded
    with BOS; say what is before the labels."""
    ends = (sizes + 1 + cues).cumsum(1)
    start = 1 + ends - (sizes + 1 + cues)
    length = 1 + int(ends[:, -1].max())
    tokens = torch.full((len(texts), length + 1), BOS)  # the last column takes what is cut off
    inside = torch.arange(texts.shape[2])
    place = torch.where(inside < sizes[..., None], start[..., None] + inside, length)
    tokens.scatter_(1, place.flatten(1), texts.flatten(1))
    label = start + sizes + cues
    if cues:
        tokens.scatter_(1, label - 1, torch.full_like(label, CUE))
    tokens.scatter_(1, label, labels)
    return tokens[:, :length], label - 1


def _choose(rows: int, total: int, wanted: int, generator: Generator) -> Tensor:
    """Draw ``wanted`` different numbers below ``total`` in each row."""
    return _uniform((rows, total), generator).argsort(1)[:, :wanted]


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw numbers from 0 to 1, in single precision whatever torch's default is."""
    return torch.rand(shape, generator=generator, dtype=torch.float32)


def _draw(
    topics: Tensor, classes: Tensor, texts: Texts, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Draw texts (batch, example, longest) of these classes, and their lengths."""
    lengths = texts.shortest, texts.longest + 1
    sizes = torch.randint(*lengths, tuple(classes.shape), generator=generator)
    shape = (*classes.shape, texts.longest)
    own = topics.gather(1, classes)[..., None].expand(shape)
    step = torch.randint(1, SIBLINGS, shape, generator=generator)
    sibling = own // SIBLINGS * SIBLINGS + (own % SIBLINGS + step) % SIBLINGS
    anything = torch.randint(0, len(TOPICS), shape, generator=generator)
    kind = _uniform(shape, generator)
    others = torch.where(kind < texts.own + texts.sibling, sibling, anything)
    topic = torch.where(kind < texts.own, own, others)
    which = torch.randint(0, PER_TOPIC, shape, generator=generator)
    head = (_uniform(shape, generator) < texts.same) & (kind < texts.own)
    word = topic * PER_TOPIC + torch.where(head, 0, which)
    filler = torch.randint(FIRST_FILLER, FIRST_LABEL, shape, generator=generator)
    return torch.where(_uniform(shape, generator) < texts.filler, filler, word), sizes
