"""Re-weighting: learn how much the target listens to each label word.

The target's attention to the label word of class i, in layer l and head h, is multiplied by
``exp(beta[l, h, i])`` after the softmax. Nothing before the target sees it, so a step of training
runs one token. Other tokens are re-weighted where ``label_pos`` of the prompts names these.
Source: Wang et al. 2023, section 3.1, appendices G and H."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...interp.hooks import Hook
from ...interp.invariants import check_editable
from ...interp.kv_cache import States, read_with_cache, whole_states
from ...interp.readout import check_prompts, in_batches
from ...models import TransformerBridge, get_act_name
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

    def __getitem__(self, rows: slice | Int[Tensor, "rows"]) -> "LastStep":
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
        factors = prompts.by_demonstration(beta.expand(len(prompts), -1, -1, -1)).exp()
        at = prompts.label_pos[:, None, None].expand(-1, factors.shape[2], 1, -1)

        def scale(layer: int, by: Float[Tensor, "batch head demo"]) -> Hook:
            def edit(pattern: Tensor, hook: object) -> Tensor:  # (batch, head, 1, src)
                return pattern.scatter(-1, at, pattern.gather(-1, at) * by[:, :, None])

            return get_act_name("pattern", layer), edit

        place = torch.arange(prompts.tokens.shape[1], device=target.device)
        return read_with_cache(
            self.model,
            self.keys,
            self.values,
            place < target[:, None],
            prompts.tokens.gather(1, target[:, None]),
            torch.ones_like(target[:, None], dtype=torch.bool),
            target[:, None],
            torch.zeros_like(target[:, None]),
            [scale(*item) for item in enumerate(factors.unbind(1))],
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
    check_editable(model)
    keys, values = whole_states(model, prompts)
    return LastStep(model, prompts, keys, values)


def fit(
    model: TransformerBridge,
    each: Sequence[Prompts],
    generator: torch.Generator | None,
    epochs: int = 10,
    batch: int | None = 1,
    lr: float = 0.01,
    batch_size: int | None = None,
) -> Float[Tensor, "set layer head cls"]:
    """Learn a beta from the training prompts of each set of demonstrations.

    The defaults are the paper's: from 0, Adam on the cross-entropy over the label words, one row a
    step (``batch=None``: all), shuffled in each of ten epochs (without a generator: in order).
    ``batch_size``: rows in a pass, whose gradients are added up."""
    together = 1 if batch else max(1, (batch_size or sum(map(len, each))) // max(map(len, each)))
    if together < len(each):
        parts = (each[i : i + together] for i in range(0, len(each), together))
        how = generator, epochs, batch, lr, batch_size
        return torch.cat([fit(model, some, *how) for some in parts])
    step = prepare(model, join(each))
    device, rows_of = step.prompts.target.device, torch.tensor([*map(len, each)])
    of_set = torch.arange(len(each)).repeat_interleave(rows_of).to(device)
    shape = len(each), model.cfg.n_layers, model.cfg.n_heads, step.prompts.classes
    beta = torch.zeros(shape, device=device, requires_grad=True)
    adam = torch.optim.Adam([beta], lr=lr)
    for _ in bar(range(epochs), "epochs"):
        order = torch.arange(len(of_set))
        if generator is not None and batch is not None:
            order = torch.randperm(len(of_set), generator=generator, device=generator.device)
        for rows in order.to(device).split(batch or len(of_set)):
            adam.zero_grad()
            share = 1 / of_set[rows].bincount(minlength=len(each))  # of a row in its set's mean
            for few in rows.split(batch_size or len(rows)):
                part = step if batch is None and len(few) == len(of_set) else step[few]
                with torch.enable_grad():
                    (part.losses(beta[of_set[few]]) * share[of_set[few]]).sum().backward()
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
    """Return the answers before and after re-weighting, of each set of demonstrations: ``pairs``
    are prompts to ``fit`` and other queries on the same demonstrations, which are answered."""
    betas = fit(model, [train for train, _ in pairs], generator, epochs, batch, lr, batch_size)
    before_and_after = []
    for (_, test), beta in zip(pairs, betas, strict=True):

        def both(some: Prompts, _: Tensor, beta: Tensor = beta) -> Iterator[Tensor]:
            ready = prepare(model, some)
            for used in (torch.zeros_like(beta), beta):
                yield from vars(ready.answers(used)).values()

        columns = in_batches(test, batch_size, "re-weighting", both)
        before_and_after.append((Answers(*columns[:3]), Answers(*columns[3:])))
    return before_and_after
