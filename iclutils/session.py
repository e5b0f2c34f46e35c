"""The session, with which every notebook starts: the tier's sizes and models, generators for random
draws, and the check of claims."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from IPython import get_ipython
from jaxtyping import Float
from matplotlib_inline.backend_inline import set_matplotlib_formats
from torch import Tensor

from . import cache, claims, models, presets, scorecard
from .cache import Arguments, Value
from .claims.verdicts import UNDEFINED
from .errors import IclError, unknown
from .models import lsa, regressors
from .models.lsa import LinearSelfAttention
from .models.regressors import InContextRegressors
from .models.storage import Networks
from .tasks import generator
from .zoo import smollm2

UNFILLED = "write this first"  # what the stub of an exercise raises


@dataclass(frozen=True)
class Session:
    """One run of one notebook; ``own_model`` is the model that the reader named, if any."""

    tier: presets.Tier
    own_model: str
    seed: int
    device: str
    weights: str = "trained"

    @property
    def column(self) -> str:
        """Return where results belong: the tier, or the null of the tier."""
        return self.tier.column + (claims.NULL if self.weights == "random" else "")

    @property
    def results(self) -> Path:
        """Return the folder that results go to. Those of another seed, or of a model that the
        reader named, have a folder of their own, so that they are not taken for the book's."""
        parts = [f"seed-{self.seed}"] if self.seed else []
        if self.own_model and self.tier.name not in _tiers_named_by(self.own_model):
            parts.append("model-" + re.sub(r"[^A-Za-z0-9.-]+", "_", self.own_model))
        return claims.results_folder().joinpath(*parts)

    def models(self, chapter: str) -> tuple[str, ...]:
        """Return the reader's own model if there is one, else the tier's for that chapter."""
        return (self.own_model,) if self.own_model else self.tier.models(chapter)

    def generator(self, purpose: str, draw: int = 0) -> torch.Generator:
        """Make a random generator (CPU) of its own for each purpose, draw and seed."""
        return generator(purpose, draw, self.seed)

    def load(self, name: str, **options: Any) -> models.TransformerBridge:
        """Load a network onto this session's device, or the same network with random weights."""
        options |= {"device": self.device}
        if self.weights == "trained":
            return models.load(name, **options)
        return models.random_init(name, seed=self._draw(name), **options)

    def example(self, guide: str, *texts: str) -> models.TransformerBridge:
        """Load SmolLM2, for worked examples: the trained one, also at the tier ``mini`` and with
        random ``weights``. Where it cannot be had, a line says so, and the small model ``guide``
        takes its place: the words of ``texts`` are then names of its tokens."""
        if not (why := smollm2.fetch_error()):
            return models.load(smollm2.NAME, device=self.device)
        print(f"{why}\nThe small model {guide} takes its place; the text speaks of SmolLM2.")
        reader = models.word_tokenizer(guide, texts)
        return models.load(guide, device=self.device, tokenizer=reader)

    def edit_weights(
        self, name: str, edit: Callable[[models.PreTrainedModel], None]
    ) -> models.TransformerBridge:
        """Edit the weights that ``load`` gives, as ``models.edit_weights`` does."""
        if self.weights == "trained":
            return models.edit_weights(name, edit, device=self.device)
        return models.random_init(name, self._draw(name), edit, device=self.device)

    def cached(
        self, function: Callable[Arguments, Value], *args: Arguments.args, **named: Arguments.kwargs
    ) -> Value:
        """Return ``function(*args, **named)``. Above the tier ``mini`` it is stored on disk, and a
        later run with the same code, models and arguments reads it (``iclutils.cache``)."""
        if self.tier.name == "mini":
            return function(*args, **named)
        return cache.cached(function, *args, **named)

    def stored_result(self, claim_id: str) -> dict[str, Any]:
        """Return value and spread of a claim, and what was stored beside them, at the last run of
        the tier ``real``, for figures; nothing if it never was run."""
        column = self.column if self.tier.name == "real" else "real"
        if result := self._results(claim_id).get((column, claim_id)):
            return {"value": result.value, "spread": result.spread} | result.detail
        return {}

    def _results(self, name: str) -> dict[tuple[str, str], claims.Result]:
        """Return the committed results of a claim, and at this tier those of the latest run."""
        latest = claims.read_results(self.results, name=name)
        own = (self.tier.column, self.tier.column + claims.NULL)
        here = {key: result for key, result in latest.items() if key[0] in own}
        return claims.read_results(claims.COMMITTED, name=name) | here

    def regressors(self, name: str, **options: Any) -> InContextRegressors:
        """Load regressors onto this session's device, or with random weights."""
        return self._ensemble(regressors.load(name, device=self.device, **options), name)

    def lsa(self, name: str, **options: Any) -> LinearSelfAttention:
        """Load linear self-attention onto this session's device, or with random weights."""
        return self._ensemble(lsa.load(name, device=self.device, **options), name)

    def _draw(self, name: str) -> int:
        return zlib.crc32(f"{name} {self.seed}".encode())

    def _ensemble(self, trained: Networks, name: str) -> Networks:
        if self.weights == "trained":
            return trained
        seeds = [self._draw(f"{name} {member}") for member in range(len(trained.seeds))]
        networks = type(trained)(trained.shape, seeds)
        networks.tasks = trained.tasks
        return networks.to(self.device).eval().requires_grad_(False)

    def check(
        self,
        claim_id: str,
        value: Any,
        spread: SupportsFloat = 0.0,
        *,
        count: int = 1,
        null: Any = None,
        **detail: Any,
    ) -> None:
        """Judge a measurement against its claim: a mean with its standard error over ``count``, a
        sequence of repetitions, or a map of what was measured by model (``repetitions``); ``null``,
        of the cell's own, is such a triple, sequence or map, in the order of the repetitions.
        The verdict is kept, not printed (``table``, and the page of the chapter, show it). Only
        report what is undefined (NaN), or measured on a model of the reader's that is not the
        tier's for this chapter. ``detail`` is anything else worth keeping."""
        value, null = (repetitions(x) if isinstance(x, Mapping) else x for x in (value, null))
        claim, measured = claims.find(claim_id), claims.summary(value, float(spread), count)
        if math.isnan(measured[0]) and self.weights == "trained":
            print(f"{UNDEFINED:<15} {claim_id}")
        elif self.own_model not in ("", *self.tier.models(claim.chapter)):
            what = claim.text_at("measure", self.tier.name) or "a claim of other tiers"
            print(f"{'measured':<15} {claim_id} = {measured[0]:.4g} ({what})")
        elif self.tier.name in claim.tiers:
            paired = claims.paired_difference(value, null)
            if null is not None:
                null = claims.summary(*null) if isinstance(null, tuple) else claims.summary(null)
            where: dict[str, Any] = {"tier": self.column, "seed": self.seed, "device": self.device}
            where |= {"model": ", ".join(self.models(claim.chapter)), "detail": detail}
            claims.write(self.results, claim, measured, null, paired, **where)

    @staticmethod
    @contextmanager
    def exercise(label: str) -> Iterator[None]:
        """Say whether what the reader wrote passes the assertions of the block: ``right``, ``not
        yet`` with the message of the first that fails, or ``write this first`` while it is the
        stub. Any other error passes through, for the reader to see where it was raised."""
        try:
            yield
        except NotImplementedError as error:
            if str(error) != UNFILLED:
                raise
            print(f"{label}: {UNFILLED}.")
        except AssertionError as error:
            print(f"{label}: not yet. {error}".rstrip())
        else:
            print(f"{label}: right.")

    def table(self, *names: str) -> None:
        """Print claims, or all of a chapter (``"06"``) or section (``"06-circuit"``), in every
        column of the scorecard: the source's number, small models, a real language model, the
        paper's own, each with its null: the committed numbers, at this tier those of this run."""
        every = (claim for name in names for claim in claims.matching(name))
        rows = (scorecard.row(claim, self._results(claim.id)) for claim in every)
        print(scorecard.comparison_text(rows))


def begin(
    tier: str = "mini",
    model: str = "",
    seed: int = 0,
    device: str = "auto",
    weights: str = "trained",
) -> Session:
    """Start a notebook at the tier ``"mini"``, ``"real"`` or ``"paper"``, on the tier's models or
    on a ``model`` of the reader's own: a folder, ``"owner/name@COMMIT"``, or a published
    one such as ``"gpt2"``, which takes the sizes of its own tier. ``weights`` that
    are ``"random"`` measure the same without training: the null of every finding.

    Example:
        >>> book = iclutils.begin("mini", seed=3, device="cpu")
        mini tier, the tier's own models, seed 3, cpu
        >>> book.tier.name, book.models("01")[0]
        ('mini', 'induction-3')
    """
    chosen = presets.get(tier)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise IclError(f"seed must be a natural number; got {seed!r}.")
    if weights not in ("trained", "random"):
        raise unknown("weights", weights, ("trained", "random"))
    its_own = _tiers_named_by(model)  # of a published model: sizes and claims of its tier
    if its_own and chosen.name not in (*its_own, "real"):
        chosen = presets.TIERS[its_own[0]]
    if model and (folder := models.local_folder(model)):
        model = str(folder.resolve())  # as the user sees it now, whatever folder comes later
    where = resolve_device(chosen.device if device == "auto" else device)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if get_ipython() is not None:  # figures of SVG whose text is text, with nothing that varies
        set_matplotlib_formats("svg", metadata={"Date": None})
    what = model or "the tier's own models"
    untrained = ", random weights" if weights == "random" else ""
    print(f"{chosen.column} tier, {what}{untrained}, seed {seed}, {where}")
    return Session(chosen, model, seed, where, weights)


def repetitions(
    cases: Mapping[Hashable, Float[Tensor, "*sample"] | Sequence[SupportsFloat] | SupportsFloat],
) -> Float[Tensor, "_"] | float:
    """Return the repetitions behind a claim: the mean of each case, or samples of a single one."""
    samples = [torch.as_tensor(values).double().cpu().flatten() for values in cases.values()]
    if len(samples) > 1:
        return torch.stack([values.mean() for values in samples])
    return samples[0] if len(samples[0]) > 1 else samples[0].mean().item()  # of none, NaN


def _tiers_named_by(model: str) -> tuple[str, ...]:
    """Return the tiers whose own model has this name, the usual one first."""
    if model.startswith(smollm2.NAME):
        return ("real",)
    return ("paper",) if model and model in models.HUB else ()


def resolve_device(name: str) -> str:
    """Return the device of that name, ``auto`` being a CUDA GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise IclError(
            f"Unknown device {name!r}. Use 'auto', 'cpu' or 'cuda': Apple's mps gives wrong "
            "attention silently."
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise IclError("device='cuda', but no CUDA GPU is visible. Use device='cpu' or 'auto'.")
    return name
