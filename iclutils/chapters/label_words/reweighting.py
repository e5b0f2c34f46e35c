"""Re-weighting: learn how much the target listens to each label word.

The target's attention to the label word of class i, in layer l and head h, is multiplied by
``exp(beta[l, h, i])`` after the softmax and not renormalised; everything else is left alone. With
beta = 0 nothing changes.

Attention times value is all that the target takes from a position, so scaling the attention is
scaling the value: ``(exp(beta) A) v = A (exp(beta) v)``. And only the target is touched: whatever
stands before it cannot see it. So the keys and values of all earlier positions are computed once,
and a step of training runs one token through the model, with the label words' values scaled. No
hook is needed, so this works for any model whose keys and values can be read.

With several demonstrations of a class, all its label words share one beta (ours: the paper fits
one demonstration per class only). Several sets of demonstrations, each with a beta of its own,
can be fitted at once (ours): Adam works entry by entry, so the fits do not meet.

Source: Wang et al. 2023, section 3.1, appendices G and H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...errors import IclError
from ...interp.kv_cache import States, keys_values, read_with_cache, shares_demonstrations
from ...interp.readout import batches, check_prompts
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.prompts import Prompts, Role, class_logits, join
from .answers import Answers

Beta = Float[Tensor, "*batch layer head cls"]
Positions = Int[Tensor, "rows demo"]
Sets = Int[Tensor, "batch"]


@dataclass(frozen=True)
class Fit:
    """A fitted re-weighting.

    Attributes:
        beta: logarithm of the factor of every layer, head and class (in the order of class ids);
            one for each set of demonstrations where several were fitted.
        losses: mean cross-entropy (nats) of the rows of every step, before it.
    """

    beta: Float[Tensor, "*set layer head cls"]
    losses: Float[Tensor, "step"]


@dataclass(frozen=True)
class Gain:
    """Accuracy before re-weighting, and what is gained by re-weighting anchors and random words."""

    before: float
    anchors: float
    control: float


@dataclass(frozen=True)
class LastStep:
    """Prompts read up to their target, which is still to come: what ``fit`` repeats, and no more.

    Attributes:
        model: the model.
        prompts: the prompts.
        positions: for every demonstration, in prompt order, the position that is re-weighted.
        keys, values: per layer, of all positions.
    """

    model: TransformerBridge
    prompts: Prompts
    positions: Int[Tensor, "batch demo"]
    keys: States
    values: States

    def __getitem__(self, rows: Int[Tensor, "rows"]) -> LastStep:
        """Some of the prompts."""
        chosen = self.prompts[rows]
        width = chosen.tokens.shape[1]
        return replace(
            self,
            prompts=chosen,
            positions=self.positions[rows],
            keys=tuple(k[rows, :, :width] for k in self.keys),
            values=tuple(v[rows, :, :width] for v in self.values),
        )

    def at(self, positions: Positions) -> LastStep:
        """The same with other positions to re-weight; one row serves all prompts."""
        labels, last = self.prompts.label_pos, self.prompts.target[:, None]
        positions = positions.to(labels.device)
        if positions.shape[1] != labels.shape[1] or not bool(
            ((positions >= 0) & (positions < last)).all()
        ):
            raise IclError(
                "Give one position for every demonstration, and only positions before the target: "
                "no other can be re-weighted."
            )
        return replace(self, positions=positions.expand_as(labels))

    def logits(self, beta: Beta) -> Float[Tensor, "batch vocab"]:
        """Logits at the target under one ``beta`` or that of each prompt, differentiable in it."""
        prompts, target = self.prompts, self.prompts.target
        shape = (self.model.cfg.n_layers, self.model.cfg.n_heads, prompts.classes)
        if beta.shape[-3:] != shape:
            raise IclError(f"beta must have shape {shape} here; got {tuple(beta.shape)}.")
        by_demo = prompts.by_demonstration(beta.expand(len(prompts), -1, -1, -1))
        place = torch.arange(prompts.tokens.shape[1], device=target.device)
        edited = (self.positions[..., None] == place).to(beta.dtype)  # (batch, demo, pos)
        scaled = (
            value * (by_demo[:, layer] @ edited).exp()[..., None]
            for layer, value in enumerate(self.values)
        )
        return read_with_cache(
            self.model,
            self.keys,
            tuple(scaled),
            place < target[:, None],
            prompts.tokens.gather(1, target[:, None]),
            torch.ones_like(target[:, None], dtype=torch.bool),
            target[:, None],
            torch.zeros_like(target),
        )

    def losses(self, beta: Beta) -> Float[Tensor, "batch"]:
        """Cross-entropy (nats) of the gold class under the softmax over the label words."""
        scores = class_logits(self.prompts, self.logits(beta))
        return cross_entropy(scores, self.prompts.gold, reduction="none")

    def answers(self, beta: Beta) -> Answers:
        """What the model answers under ``beta``."""
        with torch.no_grad():
            return Answers.of(self.prompts, self.logits(beta))


def prepare(
    model: TransformerBridge, prompts: Prompts, positions: Positions | None = None
) -> LastStep:
    """Run everything before the target, once; the label words are re-weighted by default."""
    check_prompts(model, prompts)
    keys, values = keys_values(model, prompts.tokens)
    if values[0].shape[1] != model.cfg.n_heads:
        raise IclError(
            f"Here {model.cfg.n_heads} heads share {values[0].shape[1]} sets of keys and values, "
            "so a head cannot be re-weighted by its values alone: use a model without grouped "
            "heads."
        )
    step = LastStep(model, prompts, prompts.label_pos, keys, values)
    return step if positions is None else step.at(positions)


def fit(
    step: LastStep,
    generator: torch.Generator | None = None,
    epochs: int = 10,
    batch: int | None = 1,
    lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    sets: Sets | None = None,
) -> Fit:
    """Learn beta on labelled prompts; the model is frozen.

    The defaults are the paper's: from beta = 0, Adam on the cross-entropy over the label words,
    one row a step, ten epochs, rows shuffled anew in each. (The rate is the paper's and its
    launch script's; the released code's own default is 0.1.)

    Args:
        step: from ``prepare``: the demonstrations, each followed by a training query.
        generator: for the shuffling; the rows keep their order if omitted.
        epochs: passes over the rows.
        batch: rows a step; None for all of them.
        lr: Adam's rate.
        betas: Adam's decay rates.
        sets: number, from 0, of the fit that each prompt belongs to; each set of demonstrations
            then gets its own beta, as if fitted alone. Needs ``batch=None``.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.label_words import reweighting
        >>> from iclutils.tasks import topics
        >>> drawn = topics.sample(8, torch.Generator().manual_seed(0), classes=2, shared=True)
        >>> step = reweighting.prepare(models.load("anchors-0"), drawn)
        >>> found = reweighting.fit(step, epochs=2)
        >>> found.beta.shape, found.losses.shape
        (torch.Size([4, 4, 2]), torch.Size([16]))
    """
    prompts, count = step.prompts, len(step.prompts)
    if epochs < 1 or (batch is not None and (batch < 1 or sets is not None)):
        raise IclError("Fit for at least one epoch; several sets are fitted with batch=None.")
    member = torch.zeros_like(prompts.target) if sets is None else sets.to(prompts.target.device)
    share = 1 / member.bincount()[member]  # of a row in the loss of its set
    shape = int(member.max()) + 1, step.model.cfg.n_layers, step.model.cfg.n_heads, prompts.classes
    beta = torch.zeros(shape, device=member.device, requires_grad=True)
    adam = torch.optim.Adam([beta], lr=lr, betas=betas)
    losses = []
    for _ in bar(range(epochs), "epochs"):
        order = torch.arange(count)
        if generator is not None:
            order = torch.randperm(count, generator=generator, device=generator.device)
        if batch is None or batch >= count:  # then their order does not matter
            parts = iter([(step, member, share)])
        else:
            rows = order.to(member.device).split(batch)
            parts = ((step[r], member[r], torch.full_like(share[r], 1 / len(r))) for r in rows)
        for part, mine, weight in parts:
            with torch.enable_grad():
                value = (part.losses(beta[mine]) * weight).sum()
            (beta.grad,) = torch.autograd.grad(value, beta)
            adam.step()
            losses.append(value.item() / len(beta))
    return Fit(beta.detach() if sets is not None else beta.detach()[0], torch.tensor(losses))


def gradient(step: LastStep, beta: Float[Tensor, "layer head cls"]) -> Beta:
    """Gradient of the mean loss (nats) at ``beta``.

    At beta = 0 it is attention times its gradient, summed over the prompts' label words.
    """
    at = beta.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(step.losses(at).mean(), at)[0]


def compare(
    model: TransformerBridge,
    pairs: Sequence[tuple[Prompts, Prompts]],
    generator: torch.Generator,
    epochs: int = 10,
    batch: int | None = 1,
    lr: float = 0.01,
    batch_size: int | None = None,
) -> list[Gain]:
    """Fit and score on sets of demonstrations, once for anchors and once for random words.

    With ``batch=None`` all sets are fitted in one go, each with a beta of its own.

    Args:
        model: the model.
        pairs: for each set its training prompts and other queries to score it on.
        generator: for the shuffling and the control's words.
        epochs, batch, lr: as for ``fit``.
        batch_size: prompts scored in a forward pass; all if omitted.
    """
    if batch is not None and len(pairs) > 1:
        each = [compare(model, [pair], generator, epochs, batch, lr, batch_size) for pair in pairs]
        return [gain for gains in each for gain in gains]
    if not all(shares_demonstrations(join(pair)) for pair in pairs):
        raise IclError("train and test must all have the same demonstrations, only other queries.")
    (train, mine), (test, theirs) = map(_numbered, zip(*pairs, strict=True))
    words = torch.cat([random_text(first, generator)[:1] for first, _ in pairs])
    labels = torch.cat([first.label_pos[:1] for first, _ in pairs])
    step, sets = prepare(model, train), mine if batch is None else None
    betas = [
        fit(step.at(at[mine]), generator, epochs, batch, lr, sets=sets).beta
        for at in (labels, words)
    ]
    right: list[list[Tensor]] = [[], [], []]  # before, anchors, control
    for rows in batches(test, batch_size, "re-weighting"):
        part, which = prepare(model, test[rows]), theirs[rows]
        fitted = [(torch.zeros_like(betas[0]), labels), (betas[0], labels), (betas[1], words)]
        for found, (beta, at) in zip(right, fitted, strict=True):
            each_beta = beta[which] if sets is not None else beta
            found.append(part.at(at[which]).answers(each_beta).correct.float())
    shares = [
        [torch.cat(found)[theirs == n].mean().item() for found in right] for n in range(len(pairs))
    ]
    return [Gain(start, own - start, other - start) for start, own, other in shares]


def _numbered(parts: Sequence[Prompts]) -> tuple[Prompts, Sets]:
    """Several batches as one, and which each prompt is from."""
    sizes = torch.tensor([len(part) for part in parts])
    member = torch.arange(len(parts)).repeat_interleave(sizes)
    return join(parts), member.to(parts[0].tokens.device)


def random_text(prompts: Prompts, generator: torch.Generator) -> Int[Tensor, "batch demo"]:
    """The control: as many random text tokens of the demonstrations as there are label words.

    Prompts that share their demonstrations share the draw; to use it with other queries, take
    its first row.
    """
    shared = shares_demonstrations(prompts)
    text = (prompts.roles[:1] if shared else prompts.roles) == Role.TEXT
    wanted = prompts.label_pos.shape[1]
    if int(text.sum(1).min()) < wanted:
        raise IclError("The demonstrations have fewer text tokens than label words to stand for.")
    priority = torch.rand(text.shape, generator=generator, device=generator.device)
    order = priority.to(text.device).masked_fill(~text, torch.inf).argsort(1)
    return order[:, :wanted].expand(len(prompts), -1)
