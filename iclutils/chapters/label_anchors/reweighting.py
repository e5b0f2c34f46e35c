"""Re-weighting: learn how much the target listens to each label word.

The target's attention to the label word of class i, in layer l and head h, is multiplied by
``exp(beta[l, h, i])`` after the softmax, which is scaling the value. Nothing before the target sees
it, so a step of training runs one token. Other tokens are re-weighted where ``label_pos`` of the
prompts names these. Source: Wang et al. 2023, section 3.1, appendices G and H."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...interp.kv_cache import States, read_with_cache, whole_states
from ...interp.readout import check_prompts, in_batches
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.prompts import Prompts, class_logits, join
from .answers import Answers

Beta = Float[Tensor, "*batch layer head cls"]


@dataclass(frozen=True)
class LastStep:
    """Prompts read up to their target, which is still to come: what ``fit`` repeats, and no more.
    Keys and values are per layer: (batch, head, pos, d_head)."""

    model: TransformerBridge
    prompts: Prompts
    keys: States
    values: States

    def __getitem__(self, rows: slice | Int[Tensor, "rows"]) -> LastStep:
        """Return the step of some of the prompts."""
        prompts = self.prompts[rows]
        width = prompts.tokens.shape[1]
        keys, values = (
            tuple(x[rows, :, :width] for x in part) for part in (self.keys, self.values)
        )
        return LastStep(self.model, prompts, keys, values)

    def logits(self, beta: Beta) -> Float[Tensor, "batch vocab"]:
        """Return logits at the target under one ``beta`` or one a prompt, differentiable in it."""
        prompts, target = self.prompts, self.prompts.target
        scale = prompts.by_demonstration(beta.expand(len(prompts), -1, -1, -1)).exp()
        place = torch.arange(prompts.tokens.shape[1], device=target.device)
        scaled = []  # of each layer, (batch, head, pos, d_head)
        for value, by in zip(self.values, scale.unbind(1), strict=True):  # by: (batch, head, demo)
            at = prompts.label_pos[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3])
            scaled.append(value.scatter(2, at, value.gather(2, at) * by[..., None]))
        return read_with_cache(
            self.model,
            self.keys,
            tuple(scaled),
            place < target[:, None],
            prompts.tokens.gather(1, target[:, None]),
            torch.ones_like(target[:, None], dtype=torch.bool),
            target[:, None],
            torch.zeros_like(target[:, None]),
        )[:, 0]

    def losses(self, beta: Beta) -> Float[Tensor, "batch"]:
        """Return the cross-entropy (nats) of the gold class among the label words."""
        scores = class_logits(self.prompts, self.logits(beta))
        return cross_entropy(scores, self.prompts.gold, reduction="none")

    def answers(self, beta: Beta) -> Answers:
        """Return the model's answers under ``beta``."""
        with torch.no_grad():
            return Answers.of(self.prompts, self.logits(beta))


def prepare(model: TransformerBridge, prompts: Prompts) -> LastStep:
    """Run everything before the target, once; the label words are to be re-weighted."""
    check_prompts(model, prompts)
    keys, values = whole_states(model, prompts)
    return LastStep(model, prompts, keys, values)


def fit(
    step: LastStep,
    generator: torch.Generator | None,
    epochs: int = 10,
    batch: int | None = 1,
    lr: float = 0.01,
    batch_size: int | None = None,
) -> Float[Tensor, "layer head cls"]:
    """Learn beta on training prompts of one set of demonstrations.

    The defaults are the paper's: from 0, Adam on the cross-entropy over the label words, one row a
    step (``batch=None``: all), shuffled in each of ten epochs (without a generator: in order).
    ``batch_size``: rows in a pass, whose gradients are added up.
    """
    cfg, prompts = step.model.cfg, step.prompts
    shape = cfg.n_layers, cfg.n_heads, prompts.classes
    beta = torch.zeros(shape, device=prompts.target.device, requires_grad=True)
    adam = torch.optim.Adam([beta], lr=lr)
    for _ in bar(range(epochs), "epochs"):
        order = torch.arange(len(prompts))
        if generator is not None and batch is not None:
            order = torch.randperm(len(prompts), generator=generator, device=generator.device)
        for rows in order.to(beta.device).split(batch or len(prompts)):
            adam.zero_grad()
            for few in rows.split(batch_size or len(rows)):
                part = step if batch is None and len(few) == len(prompts) else step[few]
                with torch.enable_grad():
                    (part.losses(beta).sum() / len(rows)).backward()
            adam.step()
    return beta.detach()


def fit_sets(
    model: TransformerBridge, each: Sequence[Prompts], epochs: int, lr: float
) -> Float[Tensor, "set layer head cls"]:
    """Learn what ``fit`` learns from each of several sets with all rows a step, in one pass of all
    sets a step: of a small network that takes a quarter less time."""
    step = prepare(model, join(each))
    sizes = torch.tensor([len(train) for train in each], device=step.prompts.target.device)
    of_set = torch.arange(len(each), device=sizes.device).repeat_interleave(sizes)
    shape = len(each), model.cfg.n_layers, model.cfg.n_heads, step.prompts.classes
    beta = torch.zeros(shape, device=sizes.device, requires_grad=True)
    adam = torch.optim.Adam([beta], lr=lr)
    for _ in bar(range(epochs), "epochs"):
        adam.zero_grad()
        with torch.enable_grad():
            (step.losses(beta[of_set]) / sizes[of_set]).sum().backward()
        adam.step()
    return beta.detach()


def compare(
    model: TransformerBridge,
    pairs: Sequence[tuple[Prompts, Prompts]],
    generator: torch.Generator,
    epochs: int = 10,
    batch: int | None = 1,
    lr: float = 0.01,
    batch_size: int | None = None,
) -> list[tuple[Answers, Answers]]:
    """Return the answers before and after re-weighting, of each set of demonstrations.

    ``pairs`` are training prompts and other queries on the same demonstrations, which are
    answered; the other arguments are those of ``fit``."""
    if batch is None and batch_size is None:
        betas = iter(fit_sets(model, [train for train, _ in pairs], epochs, lr))
    else:
        how = generator, epochs, batch, lr, batch_size
        betas = (fit(prepare(model, train), *how) for train, _ in pairs)
    before_and_after = []
    for (_, test), beta in zip(pairs, betas, strict=True):

        def both(some: Prompts, _: Tensor, beta: Tensor = beta) -> Iterator[Tensor]:
            ready = prepare(model, some)
            for used in (torch.zeros_like(beta), beta):
                yield from vars(ready.answers(used)).values()

        columns = in_batches(test, batch_size, "re-weighting", both)
        before_and_after.append((Answers(*columns[:3]), Answers(*columns[3:])))
    return before_and_after
