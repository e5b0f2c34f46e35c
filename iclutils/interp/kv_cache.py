"""The key/value cache of demonstrations, to be cut and read again.

Later tokens see earlier ones through their keys and values alone. ``cache_demonstrations`` keeps
some of these, each at its position; ``answer_from_cache`` reads a query with them.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from ..errors import IclError
from ..models import TransformerBridge, check_tokens
from ..tasks.prompts import Prompts, Role
from .hooks import Hook, at_positions
from .invariants import TOLERANCE, gap, once, traced, window
from .readout import check_prompts

Keep = Bool[Tensor, "batch pos"]
States = tuple[Float[Tensor, "rows kv_head mem d_head"], ...]
MISFIT = "A cut memory does not fit this model: it"
KeyStates = tuple[Float[Tensor, "rows kv_head mem d_key"], ...]  # in latent attention wider


def demonstrations(prompts: Prompts) -> Keep:
    """Tell which tokens belong to the demonstrations: all before the query."""
    return prompts.roles <= Role.LABEL


def sets(prompts: Prompts) -> list[Int[Tensor, "rows"]]:
    """List the rows of each set of prompts with the same demonstrations, by its first row."""
    mine = demonstrations(prompts)
    shown = prompts.tokens.masked_fill(~mine, -1)[:, : int(mine.sum(1).max())]
    _, member = shown.unique(dim=0, return_inverse=True)
    return [(member == m).nonzero()[:, 0] for m in dict.fromkeys(member.tolist())]


@dataclass(frozen=True)
class DemonstrationCache:
    """Keys and values of demonstration tokens, packed to the front of their rows."""

    keys: KeyStates  # per layer, after any rotation by position
    values: States
    held: Bool[Tensor, "batch mem"]  # which entries are real; the rest is padding
    next_position: Int[Tensor, "batch"]  # where the query begins in the whole prompt
    read: Int[Tensor, "batch demo_pos"]  # the demonstrations' tokens, -1 after their end

    def __getitem__(self, rows: Int[Tensor, "rows"]) -> "DemonstrationCache":
        """Take the demonstrations of some rows, a row as often as it is named."""
        keys, values = (tuple(x[rows] for x in part) for part in (self.keys, self.values))
        begins = self.next_position[rows]
        read = self.read[rows][:, : int(begins.max())]
        return DemonstrationCache(keys, values, self.held[rows], begins, read)

    def keep(self, mask: Bool[Tensor, "batch mem"]) -> "DemonstrationCache":
        """Keep the entries in ``mask`` alone; a single row is kept once for each of its rows."""
        index, held = pack(mask & self.held)

        def pick(states: Tensor) -> Tensor:
            place = index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            return states.expand(len(index), -1, -1, -1).gather(2, place)

        keys, values = (tuple(map(pick, states)) for states in (self.keys, self.values))
        begins, read = (x.expand(len(held), *x.shape[1:]) for x in (self.next_position, self.read))
        return DemonstrationCache(keys, values, held, begins, read)


def cache_demonstrations(
    model: TransformerBridge, prompts: Prompts, keep: Keep, hooks: Sequence[Hook] = ()
) -> DemonstrationCache:
    """Read demonstrations (of ``prompts[:1]``, if all share theirs), and hold only ``keep``."""
    check_prompts(model, prompts)
    mine = demonstrations(prompts)
    if keep.shape != mine.shape or bool((keep & ~mine).any()):
        raise IclError("keep must be a mask of the tokens, and of demonstrations alone.")
    size = mine.sum(1)
    width = int(size.max())
    tokens, mine = prompts.tokens[:, :width], mine[:, :width]
    keys, values = keys_values(model, tokens, hooks)
    whole = DemonstrationCache(keys, values, mine, size, tokens.masked_fill(~mine, -1))
    return whole.keep(keep[:, :width])


def answer_from_cache(
    model: TransformerBridge,
    cache: DemonstrationCache,
    prompts: Prompts,
    offset: bool = True,
    hooks: Sequence[Hook] = (),
) -> Float[Tensor, "batch vocab"]:
    """Return logits at the target when the query is read, with ``cache`` for its demonstrations;
    one row of it serves all prompts that share these. Without ``offset`` the query begins at
    position 0 (the released script's way with GPT-2 XL), not where it stands."""
    check_prompts(model, prompts)
    mine = demonstrations(prompts)
    width, count = cache.read.shape[1], len(prompts)
    read = prompts.tokens[:, :width].masked_fill(~mine[:, :width], -1)
    if len(cache.held) not in (1, count) or not torch.equal(read, cache.read.expand(count, -1)):
        raise IclError(
            "This cache is of other demonstrations: cache those of the prompts themselves, or "
            "of one of them where all share theirs."
        )
    place, fed, step = _query(prompts, cache.next_position)
    at = place if offset else torch.where(fed, step, 0)
    states, tokens = (cache.keys, cache.values, cache.held), prompts.tokens.gather(1, place)
    with torch.no_grad():
        read = read_with_cache(model, *states, tokens, fed, at, fed.sum(1)[:, None] - 1, hooks)
    return read[:, 0]


def _query(prompts: Prompts, begins: Int[Tensor, "rows"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions of the query's tokens, which are no padding, and their numbers."""
    length = prompts.target + 1 - begins
    step = torch.arange(int(length.max()), device=length.device)
    fed = step < length[:, None]
    return torch.where(fed, begins[:, None] + step, prompts.target[:, None]), fed, step


def whole_states(model: TransformerBridge, prompts: Prompts) -> tuple[KeyStates, States]:
    """Read ``keys_values`` of whole prompts; demonstrations that several share are read once."""
    groups = sets(prompts)
    first = prompts[torch.stack([rows[0] for rows in groups])]
    of_set = torch.empty_like(prompts.target)
    for number, rows in enumerate(groups):
        of_set[rows] = number
    shown = cache_demonstrations(model, first, demonstrations(first))[of_set]
    held, begins = shown.held, shown.next_position
    place, fed, _ = _query(prompts, begins)
    states = keys_values(
        model,
        prompts.tokens.gather(1, place),
        past_key_values=DynamicCache([*zip(shown.keys, shown.values, strict=True)]),
        attention_mask=torch.cat([held, fed], 1).long(),
        position_ids=place,
    )
    position = torch.arange(prompts.tokens.shape[1], device=place.device)
    moved = (position - begins[:, None]).clamp(max=fed.shape[1] - 1) + held.shape[1]
    column = torch.where(position < begins[:, None], position, moved)[:, None, :, None]
    keys, values = (
        tuple(x.gather(2, column.expand(-1, x.shape[1], -1, x.shape[3])) for x in part)
        for part in states
    )
    return keys, values


def keys_values(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    hooks: Sequence[Hook] = (),
    **past: Any,
) -> tuple[KeyStates, States]:
    """Read keys and values of every layer and token, in one forward pass without gradients, after
    those of a ``past`` with its mask and the positions, if there is one. Refuses a model without
    explicit positions, or with a sliding window."""
    check_tokens(model, tokens)
    if window(model) is not None:
        raise IclError(f"{MISFIT} attends to a sliding window. Use one with full attention.")
    _check_positions(model)
    return _states(model, tokens, hooks, **past)


def _states(
    model: TransformerBridge, tokens: Tensor, hooks: Sequence[Hook] = (), **past: Any
) -> tuple[KeyStates, States]:
    options: dict[str, Any] = {"use_cache": True, "return_type": "logits_and_cache", **past}
    with torch.no_grad():
        _, cache = model.run_with_hooks(tokens, fwd_hooks=[*hooks], logits_to_keep=1, **options)
    if cache is None:
        raise IclError(f"{MISFIT} stores no keys and values. Use one that does, such as GPT-2.")
    return tuple(la.keys for la in cache.layers), tuple(la.values for la in cache.layers)


@once
def _check_positions(model: TransformerBridge) -> None:
    """Refuse a model in which keys in another order, behind one that nothing may look at, give
    other logits, as under ALiBi (Falcon), where it is their place in the cache that counts."""
    moved = IclError(
        f"{MISFIT} takes no explicit positions, so nothing can be cut without moving the rest. "
        "Use one with learned or rotary positions."
    )
    if "position_ids" not in inspect.signature(model.original_model.forward).parameters:
        raise moved
    run = traced(model)
    past, last = run.tokens[:, :2], run.tokens[:, 2:3]
    keys, values = (tuple(x[:, :, [1, 1, 0]] for x in part) for part in _states(model, past))
    held, fed = torch.tensor([[False, True, True]], device=last.device), torch.ones_like(last)
    at, read = torch.full_like(last, 2), torch.zeros_like(last)
    again = read_with_cache(model, keys, values, held, last, fed.bool(), at, read)
    if gap(again[:, 0], run.logits[:, 2]) > TOLERANCE:
        raise moved


def read_with_cache(
    model: TransformerBridge,
    keys: KeyStates,
    values: States,
    held: Bool[Tensor, "rows mem"],
    tokens: Int[Tensor, "batch pos"],
    fed: Bool[Tensor, "batch pos"],
    positions: Int[Tensor, "batch pos"],
    read: Int[Tensor, "batch entry"],
    hooks: Sequence[Hook] = (),
) -> Float[Tensor, "batch entry vocab"]:
    """Return next-token logits at the indices ``read`` of ``tokens``, fed to a model that already
    holds ``keys`` and ``values`` (one row serves all of the batch), under hooks; differentiable.
    ``held``: entries of the cache that may be attended to. ``fed``: tokens that are no padding."""
    cache, shape = None, (len(tokens), -1, -1, -1)
    if held.shape[1]:
        states = zip(keys, values, strict=True)
        cache = DynamicCache([(k.expand(shape), v.expand(shape)) for k, v in states])
    return model.run_with_hooks(
        tokens,
        fwd_hooks=[*hooks, at_positions(read)],
        past_key_values=cache,
        attention_mask=torch.cat([held.expand(len(tokens), -1), fed], 1).long(),
        position_ids=positions,
    )


def pack(mask: Bool[Tensor, "batch pos"]) -> tuple[Tensor, Tensor]:
    """Return indices of the true entries of every row, at its front, and which of them are real."""
    size = mask.sum(1)
    index = (~mask).long().argsort(dim=1, stable=True)[:, : int(size.max())]
    return index, torch.arange(index.shape[1], device=mask.device) < size[:, None]
