"""The score that each lens gives every head, read from the same prompts.

circuit: nats lost when it is resampled, estimated (Syed et al. 2023). anchors: attention from the
target to the answers (Wang et al. 2023). induction: prefix matching (Olsson et al. 2022). vector:
share of u, what the examples add to the state there (Hendel et al. 2023; Todd et al. 2024). dual:
nats of its step on the examples (Ren and Liu 2024)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from ...interp.at_query import AtQuery, read, read_heads, scores
from ...interp.attribution import node_attribution
from ...interp.graph import model_graph
from ...interp.hooks import logits_at
from ...interp.invariants import blocks
from ...models import TransformerBridge, get_act_name
from ..contrastive_kernel.heads import direct_logit_attribution, dual_heads
from .question import Question

LENSES = ("circuit", "anchors", "induction", "vector", "dual")
Heads = Float[Tensor, "batch layer head"]
States = Float[Tensor, "batch d_model"]


@dataclass(frozen=True)
class LensScores:
    """Scores by the lenses that look at the target of a batch of prompts."""

    clean: Float[Tensor, "batch"]  # margin, in nats
    corrupt: Float[Tensor, "batch"]
    circuit: Heads
    anchors: Heads
    vector: Heads
    dual: Heads
    logit_by_example: Float[Tensor, "batch demo"]  # the dual lens, summed over heads
    states: Float[Tensor, "batch layer d_model"]  # with examples less without, after every layer
    writes: Float[Tensor, "layer head d_model"]  # the same of what heads write, the mean of prompts

    @property
    def u(self) -> Float[Tensor, "layer d_model"]:
        """Return the mean of the states: the one vector, after every layer."""
        return self.states.mean(0)


def measure(model: TransformerBridge, question: Question, layer: int, steps: int = 2) -> LensScores:
    """Return the scores by four lenses, from one reading of the clean prompts and of those without
    examples, and ``steps`` backward passes; without these the circuit's are NaN. u is taken after
    ``layer``: heads above add nothing."""
    task = question.task
    shape = len(task), model.cfg.n_layers, model.cfg.n_heads
    circuit = torch.full(shape, torch.nan)
    if steps:
        heads = [i for i, node in enumerate(model_graph(model).writers[1:]) if node.kind == "head"]
        circuit = node_attribution(model, task, steps)[heads].T.reshape(shape)
    clean, alone = (read(model, *side) for side in ((task.clean, question.at), question.bare))
    (writes, states), (bare, before) = head_writes(clean), head_writes(alone)
    common = (states - before)[:, layer].mean(0)  # u, (d_model)
    vector = (writes - bare) @ (common / common.square().sum())  # (batch, layer, head)
    vector[:, layer + 1 :] = 0.0
    examples = [question.example == i for i in range(question.examples)]  # each (batch, pos)
    steps_of = torch.stack([direct(clean, question, each) for each in examples], 1)
    # (batch, demo, layer, head)
    marked = {
        "clean": question.margin(clean.logits),
        "corrupt": question.margin(logits_at(model, task.corrupt, task.at)[:, 0]),
        "circuit": circuit,
        "anchors": attention(clean, question).sum(-1),
        "vector": vector,
        "dual": steps_of.sum(1),
        "logit_by_example": steps_of.sum((2, 3)),
        "states": states - before,
        "writes": (writes - bare).mean(0),
    }
    return LensScores(**{name: values.detach().float().cpu() for name, values in marked.items()})


def direct(query: AtQuery, question: Question, demonstrations: Tensor) -> Heads:
    """Return the margin that every head's step on these tokens adds directly, in nats."""
    task = question.task
    assert task.choices is not None
    others = task.choices[task.choices != task.answer].view(len(question), -1)
    duals = dual_heads(query, demonstrations)
    return direct_logit_attribution(query, duals, task.answer[:, 0], others).update


def head_writes(
    query: AtQuery,
) -> tuple[Float[Tensor, "batch layer head d_model"], Float[Tensor, "batch layer d_model"]]:
    """Return what every head writes at the query, and the residual stream after every layer."""
    writes, states = [], []
    for layer, block in enumerate(blocks(query.model)):
        z = query.activations[get_act_name("z", layer)][:, 0]
        every = z[:, None].expand(-1, z.shape[1], -1, -1)  # of all heads, for each of them
        writes.append(block.share(every, torch.einsum("bhe,hed->bhd", z, block.out)))
        states.append(query.activations[get_act_name("resid_post", layer)][:, 0])
    return torch.stack(writes, 1), torch.stack(states, 1)


def attention(query: AtQuery, question: Question) -> Float[Tensor, "batch layer head demo"]:
    """Return the attention of every head from the target to the answer of each example, float64."""
    seen, layers = query.seen[:, None, None], read_heads(query)
    rows = [scores(q[:, :, None], k, seen).softmax(-1)[:, :, 0] for q, k, *_ in layers]
    return torch.stack(rows, 1).take_along_dim(question.answers[:, None, None], 3)


def common_share(states: States, other: Float[Tensor, "other d_model"] | None = None) -> float:
    """Return the share of a difference that is the same for all prompts: the mean of v_a·v_b over
    pairs of prompts, over that of v_a·v_a. One vector gives 1, unrelated ones 0. With ``other``
    prompts: over pairs of one of either, by the root of both mean squares."""
    states = states.double()
    own = states.square().sum()
    if other is None:
        return float(((states @ states.T).sum() - own) / (len(states) - 1) / own)
    other = other.double()
    sizes = own / len(states) * other.square().sum() / len(other)
    return float((states @ other.T).mean() / sizes.sqrt())


def own_share(cases: Sequence[States]) -> list[float]:
    """Return for each case its common share less the mean of that with the other cases."""
    return [
        common_share(x) - fmean([common_share(x, y) for y in cases if y is not x] or [math.nan])
        for x in cases
    ]
