"""Re-weighting: learn how much the target listens to each label word.

The target's attention to the label word of class i, in layer l and head h, is multiplied by
``exp(beta[l, h, i])`` after the softmax and not renormalised; everything else is left alone. With
beta = 0 nothing changes.

Attention times value is all that the target takes from a position, so scaling the attention is
scaling the value: ``(exp(beta) A) v = A (exp(beta) v)``. And only the target is touched: whatever
stands before it cannot see it. So the keys and values of all earlier positions are computed once,
and a step of training runs one token through the model, with the label words' values scaled. No
hook is needed, so this works for any model whose memory can be read.

With several demonstrations of a class, all its label words share one beta (ours: the paper fits
one demonstration per class only). Several sets of demonstrations, each with a beta of its own,
can be fitted at once (ours): Adam works entry by entry, so the fits do not meet.

Source: Wang et al. 2023, section 3.1, appendices G and H.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.label_words import reweighting
    >>> from iclutils.interp.readout import target_logits
    >>> from iclutils.tasks import topics
    >>> net = models.load("anchors-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> both = topics.sample(8, generator, classes=2, shared=True)
    >>> train, test = both[torch.arange(4)], both[torch.arange(4, 8)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...errors import IclError
from ...interp.kv_cache import (
    States,
    keys_values,
    read_with_cache,
    shares_demonstrations,
)
from ...interp.readout import batches, check_prompts, target_logits
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.prompts import Prompts, Role, class_logits, correct, join

Beta = Float[Tensor, "*set layer head cls"]
Positions = Int[Tensor, "rows demo"]


@dataclass(frozen=True)
class Fit:
    """A fitted re-weighting.

    Attributes:
        beta: logarithm of the factor of every layer, head and class (in the order of class ids);
            one for each set of demonstrations where several were fitted.
        losses: mean cross-entropy (nats) over the rows of each epoch, each row taken before the
            step that it leads to. The released code divides the sum by one row less.
    """

    beta: Float[Tensor, "*set layer head cls"]
    losses: Float[Tensor, "epoch"]


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
        positions: for every demonstration, the position that is re-weighted.
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

    def logits(self, beta: Float[Tensor, "rows layer head cls"]) -> Float[Tensor, "batch vocab"]:
        """Logits at the target under ``beta``, differentiable in it; one row serves all."""
        prompts, target = self.prompts, self.prompts.target
        place = torch.arange(prompts.tokens.shape[1], device=target.device)
        edited = (self.positions[..., None] == place).to(beta.dtype)  # batch demo pos
        scaled = []
        by_demo = beta @ prompts.of_class().to(beta.dtype).mT[:, None]  # rows layer head demo
        for layer, value in enumerate(self.values):
            scaled.append(value * (by_demo[:, layer] @ edited).exp()[..., None])
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


def prepare(
    model: TransformerBridge, prompts: Prompts, positions: Positions | None = None
) -> LastStep:
    """Run everything before the target, once.

    Args:
        model: the model.
        prompts: the prompts.
        positions: for every demonstration, the position to re-weight; one row serves all
            prompts. The label words if omitted.

    Example:
        >>> step = reweighting.prepare(net, train)
        >>> len(step.keys) == net.cfg.n_layers
        True
    """
    check_prompts(model, prompts)
    if positions is None:
        positions = prompts.label_pos
    if (
        positions.shape[0] not in (1, len(prompts))
        or positions.shape[1:] != (prompts.label_pos.shape[1:])
    ):
        raise IclError(
            f"positions must have one row, or one for each of the {len(prompts)} prompts, and "
            f"{prompts.label_pos.shape[1]} columns; got {tuple(positions.shape)}."
        )
    positions = positions.to(prompts.tokens.device).expand(len(prompts), -1)
    if bool((positions < 0).any()) or bool((positions >= prompts.target[:, None]).any()):
        raise IclError("Only positions before the target can be re-weighted.")
    keys, values = keys_values(model, prompts.tokens)
    if values[0].shape[1] != model.cfg.n_heads:
        raise IclError(
            f"Here {model.cfg.n_heads} heads share {values[0].shape[1]} sets of keys and values, "
            "so a head cannot be re-weighted by its values alone: use a model without grouped "
            "heads."
        )
    return LastStep(model, prompts, positions, keys, values)


def fit(
    model: TransformerBridge,
    prompts: Prompts,
    generator: torch.Generator,
    positions: Positions | None = None,
    epochs: int = 10,
    batch: int | None = 1,
    lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    sets: Int[Tensor, "batch"] | None = None,
) -> Fit:
    """Learn beta on labelled prompts; the model is frozen.

    The defaults are the paper's: from beta = 0, Adam on the cross-entropy over the label words,
    one row a step, ten epochs, rows shuffled anew in each. (The rate is the paper's and its
    launch script's; the released code's own default is 0.1.)

    Args:
        model: the model.
        prompts: the training prompts: the demonstrations, each followed by a training query.
        generator: for the shuffling.
        positions: as for ``prepare``; ``random_positions`` for the control.
        epochs: passes over the rows.
        batch: rows a step; None for all of them.
        lr: Adam's rate.
        betas: Adam's decay rates.
        sets: number, from 0, of the fit that each prompt belongs to; each set of demonstrations
            then gets its own beta, as if fitted alone. Needs ``batch=None``.

    Example:
        >>> found = reweighting.fit(net, train, generator, epochs=2)
        >>> found.beta.shape == (net.cfg.n_layers, net.cfg.n_heads, 2)
        True
    """
    if epochs < 1 or (batch is not None and batch < 1) or not len(prompts):
        raise IclError("Fit on at least one prompt, for at least one epoch, one row a step.")
    if sets is not None:
        numbers = sets.unique().tolist()
        if batch is not None or len(sets) != len(prompts) or numbers != list(range(len(numbers))):
            raise IclError(
                "sets needs one number for each prompt, from 0 without gaps, and batch=None."
            )
    step = prepare(model, prompts, positions)
    device = prompts.tokens.device
    member = torch.zeros_like(prompts.target) if sets is None else sets.to(device)
    count = int(member.max()) + 1
    share = 1 / member.bincount()[member]  # of a row in the loss of its set
    shape = count, model.cfg.n_layers, model.cfg.n_heads, prompts.classes
    beta = torch.zeros(shape, device=device, requires_grad=True)
    adam = torch.optim.Adam([beta], lr=lr, betas=betas)
    losses = []
    for _ in bar(range(epochs), "epochs"):
        total = 0.0
        order = torch.randperm(len(prompts), generator=generator, device=generator.device)
        for rows in order.to(device).split(batch or len(prompts)):
            part = step[rows]
            with torch.enable_grad():
                each = losses_of(part.prompts, part.logits(beta[member[rows]]))
                value = each.mean() if sets is None else (each * share[rows]).sum()
            (beta.grad,) = torch.autograd.grad(value, beta)
            adam.step()
            total += float((each.detach() * share[rows]).sum()) / count
        losses.append(total)
    fitted = beta.detach()
    return Fit(fitted[0] if sets is None else fitted, torch.tensor(losses))


def apply(
    model: TransformerBridge,
    prompts: Prompts,
    beta: Beta,
    positions: Positions | None = None,
    batch_size: int | None = None,
    sets: Int[Tensor, "batch"] | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Logits at the target under ``beta``.

    Args:
        model: the model.
        prompts: the prompts.
        beta: from ``fit``.
        positions: those it was fitted for, as for ``prepare``.
        batch_size: prompts per forward pass, whose keys and values are held; all if omitted.
        sets: which beta is each prompt's, where several were fitted.

    Example:
        >>> zero = torch.zeros(net.cfg.n_layers, net.cfg.n_heads, 2)
        >>> same = reweighting.apply(net, test, zero)
        >>> bool((same - target_logits(net, test)).abs().max() < 1e-3)
        True
    """
    shape = (model.cfg.n_layers, model.cfg.n_heads, prompts.classes)
    member = torch.zeros_like(prompts.target) if sets is None else sets.to(prompts.target.device)
    every = beta[None] if sets is None else beta
    if every.shape[1:] != shape or not 0 <= int(member.min()) <= int(member.max()) < len(every):
        raise IclError(
            f"beta must have shape {shape} here, after the sets if there are any; got "
            f"{tuple(beta.shape)}."
        )
    parts = []
    for rows in batches(prompts, batch_size, "re-weighting"):
        mine = positions if positions is None or len(positions) == 1 else positions[rows]
        with torch.no_grad():
            parts.append(prepare(model, prompts[rows], mine).logits(every[member[rows]]))
    return torch.cat(parts)


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
        epochs: as for ``fit``.
        batch: as for ``fit``.
        lr: as for ``fit``.
        batch_size: prompts scored in a forward pass; all if omitted.

    Example:
        >>> gains = reweighting.compare(net, [(train, test)], generator, epochs=1)
        >>> 0 <= gains[0].anchors <= 1
        True
    """
    if batch is not None and len(pairs) > 1:
        each = [compare(model, [pair], generator, epochs, batch, lr, batch_size) for pair in pairs]
        return [gain for gains in each for gain in gains]
    if not all(shares_demonstrations(join(list(pair))) for pair in pairs):
        raise IclError("train and test must all have the same demonstrations, only other queries.")
    (train, mine), (test, theirs) = map(_numbered, zip(*pairs, strict=True))
    words = torch.cat([random_positions(first, generator)[:1] for first, _ in pairs])
    right = [correct(test, target_logits(model, test, batch_size=batch_size))]
    for where in (None, words):
        at = [None, None] if where is None else [where[mine], where[theirs]]
        if batch is None:
            beta = fit(model, train, generator, at[0], epochs, None, lr, sets=mine).beta
            logits = apply(model, test, beta, at[1], batch_size, sets=theirs)
        else:
            beta = fit(model, train, generator, at[0], epochs, batch, lr).beta
            logits = apply(model, test, beta, at[1], batch_size)
        right.append(correct(test, logits))
    shares = [[r[theirs == n].float().mean().item() for r in right] for n in range(len(pairs))]
    return [Gain(start, own - start, other - start) for start, own, other in shares]


def _numbered(parts: Sequence[Prompts]) -> tuple[Prompts, Int[Tensor, "batch"]]:
    """Several batches as one, and which each prompt is from."""
    sizes = torch.tensor([len(part) for part in parts])
    member = torch.arange(len(parts)).repeat_interleave(sizes)
    return join(parts), member.to(parts[0].tokens.device)


def losses_of(prompts: Prompts, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch"]:
    """Cross-entropy (nats) of the gold class under the softmax over the label words."""
    return cross_entropy(class_logits(prompts, logits), prompts.gold, reduction="none")


def random_positions(prompts: Prompts, generator: torch.Generator) -> Int[Tensor, "batch demo"]:
    """The control: as many random text tokens of the demonstrations as there are label words.

    Prompts that share their demonstrations share the draw; to use it with other queries, take
    its first row.

    Example:
        >>> reweighting.random_positions(train, generator).shape == train.label_pos.shape
        True
    """
    shared = shares_demonstrations(prompts)
    text = (prompts.roles[:1] if shared else prompts.roles) == Role.TEXT
    wanted = prompts.label_pos.shape[1]
    if int(text.sum(1).min()) < wanted:
        raise IclError("The demonstrations have fewer text tokens than label words to stand for.")
    priority = torch.rand(text.shape, generator=generator, device=generator.device)
    order = priority.to(text.device).masked_fill(~text, torch.inf).argsort(1)
    return order[:, :wanted].expand(len(prompts), -1)
