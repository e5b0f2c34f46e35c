"""Presets: the sizes of all that a chapter does, on a laptop (``mini``), on a GPU (``paper``)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import unknown


@dataclass(frozen=True)
class Induction:
    """Sizes of chapter 01."""

    models: tuple[str, ...]  # the first is the one the figures show
    length: int  # L, tokens in one copy
    sequences: int  # repeated sequences behind every mean
    sweeps: int  # sequences behind the position sweep
    pairs: int  # random head pairs in the null of the QK-matching circuit


@dataclass(frozen=True)
class LabelWords:
    """Sizes of chapter 02."""

    models: tuple[str, ...]  # the first is the one the figures show
    control: str  # the model that never learned to copy, if there is one
    tasks: tuple[str, ...]
    prompts: int  # behind every mean of accuracy or loyalty
    saliency_prompts: int  # prompts behind the saliency of a layer
    many_shots: int  # demonstrations per class, where several are compared with one
    layers: int  # first and last layers that are isolated
    sets: int  # demonstration sets behind re-weighting and error diagnosis
    queries: int  # on each of them
    train_per_class: int  # training queries per class for the re-weighting
    batch: int | None  # training queries in a step of the re-weighting; None: all
    epochs: int
    rate: float
    batch_size: int | None = None  # prompts in a forward pass; None: all


@dataclass(frozen=True)
class Regression:
    """Sizes of chapter 03. The names are those of networks that know their shape and task."""

    models: tuple[str, ...]  # without noise; the last is the one that was trained longest
    noise: tuple[str, ...]  # a member for each of the paper's ratios; later ones replace earlier
    depth: tuple[str, ...]  # of both formats, if both were trained
    width: tuple[str, ...]
    dims: tuple[str, ...]  # in other dimensions
    probed: tuple[str, ...]  # the first is the one of the figures
    contexts: int  # behind every mean distance
    fitted: int  # contexts with implicit weights
    queries: int  # fresh queries in each of them
    probe_contexts: int
    probe_steps: int


@dataclass(frozen=True)
class GradientDescent:
    """Sizes of chapter 04. Networks not named here are the shipped ones at every tier."""

    transformers: tuple[str, ...]  # whose heads are taken as dual models
    depth: tuple[str, ...]  # linear self-attention of one layer, two and five
    shared: tuple[str, ...]  # of two and five layers that share their weights
    contexts: int  # behind every loss and every alignment
    tuned: int  # contexts on which rates are tuned
    draws: int  # of random features, and of random queries, keys and values
    prompts: int  # to every transformer
    labels: str  # where those that do not know the made-up topics get labelled examples from


@dataclass(frozen=True)
class Circuits:
    """Sizes of chapter 05. The first model is the guide; an empty name or 0 leaves a part out."""

    models: tuple[str, ...]  # seeds of the guide
    deeper: str  # the guide's recipe, deeper
    others: tuple[str, ...]  # seeds of another recipe, for what recurs by name
    control: str  # a model that does not copy
    exception: str  # a model that copies by another circuit
    length: int  # L, tokens of one copy
    sequences: int  # behind wires, removals and circuits
    patterned: int  # behind scores of patterns
    influenced: int  # behind expected influence
    draws: int  # replacements of a token
    untrained: int  # models behind thresholds, and as many held out
    history: int  # sequences behind each checkpoint
    cases: int  # broken cases, healthy ones and held-out ones, each
    tuned: int  # steps of training after pruning
    narrow: bool  # softmax over the tokens of the sequence alone, for speed


@dataclass(frozen=True)
class Tier:
    """One tier: a name and the sizes of each chapter."""

    name: str
    device: str
    induction: Induction
    label_words: LabelWords
    regression: Regression
    gradient_descent: GradientDescent
    circuits: Circuits

    def models(self, chapter: str) -> tuple[str, ...]:
        """Names of the models that a chapter (by number) looks at."""
        return {
            "01": self.induction.models,
            "02": self.label_words.models,
            "03": self.regression.models,
            "04": self.gradient_descent.transformers,
            "05": self.circuits.models,
        }[chapter]


TIERS = {
    "mini": Tier(
        name="mini",
        device="cpu",
        induction=Induction(
            models=("induction-0", "induction-1", "induction-2"),
            length=30,
            sequences=64,
            sweeps=16,
            pairs=100,
        ),
        label_words=LabelWords(
            models=("anchors-0", "anchors-1", "anchors-2", "anchors-deep"),
            control="anchors-uncopied",
            tasks=("topics",),
            prompts=200,
            saliency_prompts=128,
            many_shots=4,
            layers=2,
            sets=8,
            queries=100,
            train_per_class=8,
            batch=None,
            epochs=20,
            rate=0.06,
        ),
        regression=Regression(
            models=("regression-d8", "regression-d8-long"),
            noise=("regression-noise", "regression-noise-long"),
            depth=tuple(f"regression-{form}-L{n}" for form in ("two", "one") for n in (1, 2, 4, 8)),
            width=tuple(f"regression-w{n}" for n in (8, 16, 32, 64, 128)),
            dims=("regression-d2", "regression-one-L8"),
            probed=("regression-two-L8", "regression-two-L2", "regression-one-L8"),
            contexts=2000,
            fitted=32,
            queries=48,
            probe_contexts=5120,
            probe_steps=400,
        ),
        gradient_descent=GradientDescent(
            transformers=(
                *("induction-0", "induction-1", "induction-2"),
                *("anchors-0", "anchors-1", "anchors-2"),
            ),
            depth=("lsa-1", "lsa-2", "lsa-5"),
            shared=("lsa-2-shared", "lsa-5-shared"),
            contexts=10_000,
            tuned=10_000,
            draws=100,
            prompts=200,
            labels="topics",
        ),
        circuits=Circuits(
            models=("anchors-0", "anchors-1", "anchors-2"),
            deeper="anchors-deep",
            others=("induction-0", "induction-1", "induction-2"),
            control="anchors-uncopied",
            exception="detour",
            length=20,
            sequences=16,
            patterned=64,
            influenced=12,
            draws=16,
            untrained=5,
            history=24,
            cases=48,
            tuned=30,
            narrow=False,
        ),
    ),
    "paper": Tier(
        name="paper",
        device="auto",
        induction=Induction(models=("gpt2",), length=50, sequences=32, sweeps=4, pairs=200),
        label_words=LabelWords(
            models=("gpt2-xl",),
            control="",
            tasks=("sst2", "trec", "ag_news"),  # EmoC is on no hub: asked for by name
            prompts=5000,
            saliency_prompts=1000,
            many_shots=5,
            layers=5,
            sets=5,
            queries=500,
            train_per_class=4,
            batch=1,
            epochs=10,
            rate=0.01,
            batch_size=8,
        ),
        regression=Regression(
            models=("regression-paper-d8",),
            noise=("regression-paper-noise",),
            depth=(
                *(f"regression-paper-L{n}" for n in (1, 2, 4, 8, 12)),
                "regression-paper-d8",
            ),
            width=tuple(f"regression-paper-w{n}" for n in (16, 32, 64, 256)),
            dims=("regression-paper-d20",),
            probed=("regression-paper-d8",),
            contexts=4000,
            fitted=200,
            queries=64,
            probe_contexts=4096,
            probe_steps=2000,
        ),
        gradient_descent=GradientDescent(
            transformers=("gpt2",),
            depth=("lsa-paper-1", "lsa-paper-2", "lsa-paper-5"),
            shared=("lsa-paper-2-shared", "lsa-paper-5-shared"),
            contexts=100_000,
            tuned=20_000,
            draws=200,
            prompts=500,
            labels="sst2",
        ),
        circuits=Circuits(
            models=("gpt2",),
            deeper="",
            others=(),
            control="",
            exception="",
            length=25,
            sequences=8,
            patterned=32,
            influenced=4,
            draws=16,
            untrained=2,
            history=0,
            cases=32,
            tuned=0,
            narrow=True,
        ),
    ),
}


def get(name: str) -> Tier:
    """The tier of that name."""
    if name not in TIERS:
        raise unknown("tier", name, TIERS)
    return TIERS[name]
