"""The induction pair: a head that writes the previous token, and one that looks it up.

The second head is found by its pattern, the first by its effect: the share of the second's prefix
matching that is lost when the first one's write into the second one's *keys*, and nothing else, is
what it would be on other sequences (path patching; Wang et al. 2022)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Edge, Node, head
from ...interp.head_scores import LABEL, prefix_matching, score_heads, strongest
from ...interp.patching import key_patterns
from ...models import TransformerBridge

DROP = 0.1  # share of prefix matching that a path must carry to belong to the circuit


class Pair(NamedTuple):
    """Two heads; ``edges``, all paths into the keys of induction heads that carry more than a tenth
    of their matching; ``drop``: by sequence, the share of it that the path between both carries."""

    previous: Node
    induction: Node
    edges: tuple[Edge, ...]
    drop: Float[Tensor, "batch"]

    @property
    def layer_distance(self) -> int:
        """Return the layers from the first head up to the second, at least one."""
        return self.induction.layer - self.previous.layer

    @property
    def matchers(self) -> list[Node]:
        """Return the induction heads: those whose keys the edges reach."""
        return sorted({head(v.layer, v.head) for _, v in self.edges})


def find_induction_circuit(model: TransformerBridge, task: CleanCorrupt) -> Pair:
    """Return the best induction head on the clean sequences (random tokens that stand twice;
    ``clean_corrupt.copying``), and the earlier head whose path to its keys matters most. For the
    usual guess by score alone, see ``head_scores``. Refuses a model of one layer.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.attention_circuits import pair
        >>> from iclutils.interp import clean_corrupt
        >>> net, generator = models.load("induction-0"), torch.Generator().manual_seed(0)
        >>> pair.find_induction_circuit(
        ...     net, clean_corrupt.copying(net, 6, 8, generator)
        ... ).layer_distance
        1
    """
    if model.cfg.n_layers < 2:
        raise IclError("An induction pair needs two attention layers; this model has one.")
    prefix = score_heads(model, task.clean, task.clean.shape[1] // 2)["prefix"].mean(0)
    prefix[0] = -1  # nothing below layer 0 could feed a head there
    second = head(*strongest(prefix))
    labelled = (head(*place) for place in (prefix > LABEL).nonzero().tolist())
    seconds = list(dict.fromkeys([second, *labelled]))  # the best comes first, and once
    drops, heads = path_drops(model, task, seconds), graph.all_heads(model)
    best = int(drops[: second.layer * model.cfg.n_heads, 0].mean(-1).argmax())
    strong = (drops.mean(-1) > DROP).nonzero().tolist()
    paths = [(heads[best], second), *((heads[u], seconds[v]) for u, v in strong)]
    edges = tuple(dict.fromkeys((u, v._replace(kind="k")) for u, v in paths))
    return Pair(heads[best], second, edges, drops[best, 0])


def path_drops(
    model: TransformerBridge, task: CleanCorrupt, induction: Sequence[Node]
) -> Float[Tensor, "head induction batch"]:
    """Return the share of an induction head's mean prefix matching that is lost when its keys alone
    read what an earlier head writes on the corrupt sequences (``key_patterns``); 0 for heads that
    are not earlier. The clean sequences are a block of tokens twice; a head that matches nothing
    there raises ``IclError``."""
    heads, length = graph.all_heads(model), task.clean.shape[1] // 2
    drops = torch.zeros(len(heads), len(induction), len(task), device=task.clean.device)
    for i, target in enumerate(induction):
        below = target.layer * model.cfg.n_heads
        groups = [[], *([node[1:]] for node in heads[:below])]
        seen = key_patterns(model, task.clean, task.corrupt, groups, target[1:])
        before, *after = prefix_matching(seen.flatten(0, 1), length).view(len(seen), -1)
        if not bool(before.any()):
            raise IclError(
                f"Head {target} never attends to what followed the earlier copy, so that no share "
                "of this can be lost. In a model with a sliding window, use shorter copies."
            )
        if below:
            drops[:below, i] = (before - torch.stack(after)) / before.mean()
    return drops
