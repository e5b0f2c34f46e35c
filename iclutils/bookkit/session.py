"""The session, with which every notebook starts: the tier's sizes and models, generators for random
draws, and the check of claims.

Example:
    >>> import iclutils
"""

from __future__ import annotations

import atexit
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import torch

from .. import models
from ..errors import IclError, unknown
from ..files import write_json
from ..models import lsa, regressors
from ..models.lsa import LinearSelfAttention
from ..models.regressors import InContextRegressors
from ..tasks import generator
from . import claims, machine, presets


@dataclass(frozen=True)
class Session:
    """One run of one notebook; ``own_model`` is the model that the reader named, if any."""

    tier: presets.Tier
    own_model: str
    seed: int
    device: str

    def models(self, chapter: str) -> tuple[str, ...]:
        """The reader's own model if there is one, else the tier's for that chapter."""
        return (self.own_model,) if self.own_model else self.tier.models(chapter)

    def generator(self, purpose: str, draw: int = 0) -> torch.Generator:
        """A random generator (CPU) of its own for each purpose, draw and seed."""
        return generator(purpose, draw, self.seed)

    def load(self, name: str, **options: Any) -> models.TransformerBridge:
        """``models.load`` onto this session's device."""
        return models.load(name, device=self.device, **options)

    def regressors(self, name: str, **options: Any) -> InContextRegressors:
        """``regressors.load`` onto this session's device."""
        return regressors.load(name, device=self.device, **options)

    def lsa(self, name: str, **options: Any) -> LinearSelfAttention:
        """``lsa.load`` onto this session's device."""
        return lsa.load(name, device=self.device, **options)

    def check(
        self,
        claim_id: str,
        value: SupportsFloat,
        spread: SupportsFloat = 0.0,
        *,
        count: int = 1,
        **detail: Any,
    ) -> None:
        """Judge a measured value against its claim; only report it if it is undefined (NaN), or on
        a model of the reader's that is not the tier's for this chapter."""
        known, number = claims.ledger(), float(value)
        if claim_id not in known:
            raise unknown("claim", claim_id, known)
        claim = known[claim_id]
        if math.isnan(number):
            print(f"{'undefined':<15} {claim_id}")
        elif self.own_model not in ("", *self.tier.models(claim.chapter)):
            print(f"{'measured':<15} {claim_id} = {number:.4g} ({claim.measure})")
        elif self.tier.name not in claim.tiers:
            print(f"{'no claim':<15} {claim_id} at the {self.tier.name} tier")
        else:
            where: dict[str, Any] = {"tier": self.tier.name, "seed": self.seed}
            where |= {"model": ", ".join(self.models(claim.chapter)), "device": self.device}
            claims.check(claim_id, number, **where, spread=float(spread), count=count, **detail)


def begin(tier: str = "mini", model: str = "", seed: int = 0, device: str = "auto") -> Session:
    """Start a notebook at the tier ``"mini"`` or ``"paper"``, on the tier's models or on a
    ``model`` of the reader's own: a folder, ``"gpt2"``, ``"owner/name"``.

    Example:
        >>> book = iclutils.begin("mini", seed=3, device="cpu")
        mini tier, the tier's own models, seed 3, cpu
        >>> book.tier.name, book.models("01")[0]
        ('mini', 'induction-0')
    """
    chosen = presets.get(tier)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise IclError(f"seed must be a natural number; got {seed!r}.")
    if model in models.HUB:  # a published model: the sizes and claims of the paper tier
        chosen = presets.TIERS["paper"]
    where = resolve_device(chosen.device if device == "auto" else device)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if noted := os.environ.get("ICLUTILS_PEAK"):  # the runner asks how much memory it took
        atexit.register(lambda: write_json(Path(noted), machine.peak()))
    what = model or "the tier's own models"
    print(f"{chosen.name} tier, {what}, seed {seed}, {where}")
    return Session(chosen, model, seed, where)


def resolve_device(name: str) -> str:
    """The device of that name, ``auto`` being a CUDA GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "mps":
        raise IclError("Apple's mps gives wrong attention silently; use device='cpu'.")
    if name not in ("cpu", "cuda"):
        raise IclError(f"Unknown device {name!r}. Use 'auto', 'cpu' or 'cuda'.")
    if name == "cuda" and not torch.cuda.is_available():
        raise IclError("device='cuda', but no CUDA GPU is visible. Use device='cpu' or 'auto'.")
    return name
