"""Presets: the sizes of all that a chapter does. The defaults are those of the ``mini`` tier, for a
laptop; ``presets.toml`` has those of ``real`` (a language model on a laptop) and ``paper`` (a GPU).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import unknown
from .zoo import HELD_OUT

Names = tuple[str, ...]
INDUCTION = tuple(f"induction-{seed}" for seed in HELD_OUT)
UNCOPIED = tuple(f"anchors-uncopied-{seed}" for seed in HELD_OUT[:3])
ANCHORS = tuple(f"anchors-{seed}" for seed in HELD_OUT)
RIVALS = (  # functions between words, each with another one on the same words
    *(("past", "gerund"), ("gerund", "third-person"), ("third-person", "past")),
    *(("comparative", "superlative"), ("superlative", "comparative")),
)


@dataclass(frozen=True)
class Induction:
    """Sizes of chapter 01."""

    models: Names = INDUCTION  # the first is the one the figures show
    length: int = 30  # L, tokens in one copy
    sequences: int = 32  # repeated sequences behind every mean
    sweeps: int = 8  # sequences behind the position sweep
    pairs: int = 100  # random head pairs in the null of the QK-matching circuit
    matched: int | None = None  # tokens among which queries are matched with keys; None: all
    ways: Names = ("zero", "mean", "resample")  # in which MLP layers are removed
    mlp_step: int = 1  # every so many layers
    draws: int = 0  # of other heads of the same layers; 0: of all heads without a role
    explained: int = 5  # sequences with Shapley values of their tokens
    strongest: int = 0  # induction heads that are removed together on text and words
    functions: Names = ()  # between words
    prompts: int = 0  # of each function
    quantised: Names = ()  # a model in few bits, and the same unquantised


@dataclass(frozen=True)
class LabelWords:
    """Sizes of chapter 02."""

    models: Names = ANCHORS  # the first is the one the figures show
    controls: Names = UNCOPIED  # twins of the first models, in whose training nothing repeats
    tasks: Names = ("topics",)
    prompts: int = 120  # behind every mean of accuracy or loyalty
    saliency_prompts: int = 64  # prompts behind the saliency of a layer
    many_shots: int = 4  # demonstrations per class, where several are compared with one
    layers: int = 2  # first and last layers that are isolated
    sets: int = 5  # demonstration sets behind re-weighting and error diagnosis
    queries: int = 100  # on each of them
    train_per_class: int = 8  # training queries per class for the re-weighting
    batch: int | None = None  # training queries in a step of the re-weighting; None: all
    epochs: int = 20
    rate: float = 0.06
    draws: int = 20  # of random words in place of label words; the luckiest counts
    batch_size: int | None = None  # prompts in a forward pass; None: all
    details: bool = True  # also what holds in any network, single layers and seconds
    # Asked of a language model alone:
    functions: Names = ()  # between words; the heads behind the first two are removed
    texts: Names = ()  # sets of sentences, with own, swapped and meaningless label words
    confused: Names = ()  # sets of texts whose errors are diagnosed, in place of the tasks
    diagnosed: int = 0  # queries on each of their demonstration sets
    asked: int = 8  # queries on each set of demonstrations
    strong: int = 20  # heads that are removed


@dataclass(frozen=True)
class Regression:
    """Sizes of chapter 03. The names are those of networks that know their shape and task."""

    models: Names = ("regression-d8",)  # without noise
    longer: str = "regression-d8-long"  # trained twice as long, if there is one
    # A member for each of the paper's ratios, by one recipe.
    noise: Names = ("regression-noise",)
    # Of both formats, if both were trained.
    depth: Names = tuple(f"regression-{form}-L{n}" for form in ("two", "one") for n in (1, 2, 4, 8))
    width: Names = tuple(f"regression-w{n}" for n in (8, 16, 32, 64, 128))
    wider: Names = ("regression-d16-w16", "regression-d16-w32")  # the same, d = 16
    dims: Names = ("regression-d2", "regression-one-L8")  # in other dimensions
    one_head: str = "regression-d2-one-head"
    # The first is the one of the figures.
    probed: Names = ("regression-two-L8", "regression-two-L2", "regression-one-L8")
    contexts: int = 2000  # behind every mean distance
    fitted: int = 32  # contexts with implicit weights
    queries: int = 48  # fresh queries in each of them
    probe_contexts: int = 5120
    probe_steps: int = 400
    reader: str = ""  # a language model that reads numbers as text, and then is all there is
    read: int = 64  # contexts that it reads, in one digit
    spelled: int = 40  # the same in each other format
    asked: int = 32  # contexts in which it is asked for every x
    states: int = 240  # contexts behind a probe of its hidden states


@dataclass(frozen=True)
class GradientDescent:
    """Sizes of chapters 04 and 05. Networks not named here are the shipped ones at every tier."""

    transformers: Names = (*INDUCTION, *ANCHORS)  # whose heads are taken as dual models
    depth: Names = ("lsa-1", "lsa-2", "lsa-5")  # linear self-attention of one layer, two and five
    shared: Names = ("lsa-2-shared", "lsa-5-shared")  # layers that share their weights
    contexts: int = 10_000  # behind every loss and every alignment
    tuned: int = 10_000  # contexts on which rates are tuned
    draws: int = 100  # of random features, and of random queries, keys and values
    prompts: int = 200  # to every transformer
    labels: str = "topics"  # labelled examples for those that do not know the made-up topics
    label_words: str = "own"  # or without a meaning: of a model that knows what its own mean
    functions: Names = ()  # between words, for a language model
    asked: int = 0  # prompts of each of these
    featured: int = 6  # prompts behind the error of random features, of each kind


@dataclass(frozen=True)
class Circuits:
    """Sizes of chapter 06. The first model is the guide; an empty name or 0 leaves a part out."""

    models: Names = ANCHORS  # seeds of the guide
    deeper: str = "anchors-deep"  # the guide's recipe, deeper
    others: Names = INDUCTION  # seeds of another recipe, for what recurs by name
    exception: str = "detour"  # a model that copies by another circuit
    length: int = 20  # L, tokens of one copy
    sequences: int = 8  # behind edges, ablations and circuits, of each model
    patterned: int = 32  # behind scores of patterns, of each model
    influenced: int = 4  # behind expected influence, of each model
    draws: int = 8  # replacements of a token
    untrained: int = 5  # models behind thresholds, and as many held out
    cases: int = 28  # broken cases, healthy ones and held-out ones, each
    tuned: int = 30  # steps of training after pruning
    narrow: bool = False  # softmax over the tokens of the sequence alone, for speed
    whole: bool = True  # else a part, for a model so large that edges are estimated from gradients
    # Functions between words, each with another one on the same words, and prompts of each.
    functions: tuple[tuple[str, str], ...] = ()
    prompts: int = 6


@dataclass(frozen=True)
class Lenses:
    """Sizes of chapter 07. What is repeated are models or, of a single one, functions."""

    models: Names = ANCHORS
    # Functions between words, each with its rival on the same words.
    functions: tuple[tuple[str, str], ...] = ()
    examples: int = 5  # of a function
    prompts: int = 64  # behind the marks of the heads, and as many fresh ones for what is removed
    contexts: int = 128  # behind the fit of the algorithms
    steps: int = 5  # of the path along which the circuit's gradients are taken
    strong: int = 4  # heads that a lens marks
    layer: int = 1  # after which the vector is read
    hidden: int = 0  # layer of the states that algorithms compare
    length: int = 24  # L of the repeated random tokens
    text: str = ""  # sentences with label words without a meaning
    sets: int = 5  # of their demonstrations
    asked: int = 8  # sentences on each
    edges: int = 0  # prompts behind the edges; 0: none


@dataclass(frozen=True)
class Tier:
    """One tier: a name, a device and the sizes of each chapter."""

    name: str
    column: str  # where its results belong: its name, or that of a part of it
    device: str
    induction: Induction
    label_words: LabelWords
    regression: Regression
    gradient_descent: GradientDescent
    circuits: Circuits
    lenses: Lenses

    def models(self, chapter: str) -> Names:
        """Names of the models that a chapter (by number) looks at."""
        return {
            "01": self.induction.models,
            "02": self.label_words.models,
            "03": (r.reader,) if (r := self.regression).reader else r.models,
            "04": self.gradient_descent.depth,
            "05": self.gradient_descent.transformers,
            "06": self.circuits.models,
            "07": self.lenses.models,
        }[chapter]


def _sizes(tier: str, device: str, part: str = "") -> Tier:
    """A tier, of the defaults above and of what ``presets.toml`` says otherwise; or a part of it,
    which does the same with fewer of everything."""
    kinds = {
        **{"induction": Induction, "label_words": LabelWords, "regression": Regression},
        **{"gradient_descent": GradientDescent, "circuits": Circuits, "lenses": Lenses},
    }
    layers = [OTHERWISE.get(name, {}) for name in (tier, part)]
    changed = {
        name: _frozen({k: v for of in layers for k, v in of.get(name, {}).items()})
        for name in kinds
    }
    made = {name: kind(**changed[name]) for name, kind in kinds.items()}
    return Tier(tier, part or tier, device, **made)


def _frozen(value: Any) -> Any:
    """Lists as tuples, wherever they stand."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


OTHERWISE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MINI, REAL, PAPER = _sizes("mini", "cpu"), _sizes("real", "auto"), _sizes("paper", "auto")
TIERS = {"mini": MINI, "real": REAL, "paper": PAPER}
PART = _sizes("real", "cpu", "real-part")  # to see in minutes that code gives what it gave


def get(name: str) -> Tier:
    """The tier of that name, or the part of one."""
    known = TIERS | {PART.column: PART}
    if name not in known:
        raise unknown("tier", name, known)
    return known[name]
