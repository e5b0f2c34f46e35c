"""One token of every prompt, its query, with what its heads attend by: read once, then again.

Queries, keys and values are the actual activations, after any rotation by position; whether
attention is made of them as usual is checked when a prompt is read. Products are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..errors import IclError
from ..models import TransformerBridge, check_tokens, get_act_name
from .hooks import Hook, check_editable
from .kv_cache import States, keys_values, read_with_cache
from .rotary import angle_names, angles, placed

Queries = Float[Tensor, "*batch query channel"]
Keys = Float[Tensor, "*batch key channel"]
Allowed = Bool[Tensor, "..."]
Tokens = Int[Tensor, "batch pos"]
Mask = Shaped[Tensor, "..."]  # (batch, pos), bool; anything else is refused with a cure
Place = Int[Tensor, "..."] | None  # (batch), the query's position; None: the last
SCORE_TOLERANCE = 1e-4  # of the largest score: the model's float32 against our float64


def scores(
    queries: Queries, keys: Keys, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query key"]:
    """k·q / √d, the logarithm of the kernel; -inf where a query may not look."""
    products = queries @ keys.mT / math.sqrt(keys.shape[-1])
    return products if allowed is None else products.masked_fill(~allowed, -torch.inf)


@dataclass(frozen=True)
class AtQuery:
    """One token of every prompt, its query, as ``read`` found it; later tokens may be padding."""

    model: TransformerBridge
    tokens: Tokens
    at: Int[Tensor, "batch"]  # where the query stands
    keys: States  # per layer (batch, head, pos, d_head), after any rotation
    values: States
    found: Mapping[str, Tensor]  # activations at the query, (batch, 1, ...), by the hook's name
    logits: Float[Tensor, "batch vocab"]

    @property
    def seen(self) -> Bool[Tensor, "batch pos"]:
        """Which tokens the query sees."""
        return torch.arange(self.tokens.shape[1], device=self.at.device) <= self.at[:, None]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> AtQuery:
        """Some of the prompts."""
        keys, values = (tuple(x[rows] for x in part) for part in (self.keys, self.values))
        found = {k: x if len(x) == 1 else x[rows] for k, x in self.found.items()}
        some = (self.tokens[rows], self.at[rows], keys, values, found, self.logits[rows])
        return AtQuery(self.model, *some)

    def mask(self, demonstrations: Mask) -> Bool[Tensor, "batch pos"]:
        """The demonstrations that the query sees; refuses a mask that does not fit."""
        fits = demonstrations.dtype == torch.bool and demonstrations.shape == self.tokens.shape
        if not fits:
            raise IclError(
                "The demonstrations must be a bool mask of the tokens' shape, "
                f"{tuple(self.tokens.shape)}; got {demonstrations.dtype} of "
                f"{tuple(demonstrations.shape)}."
            )
        return demonstrations & self.seen

    def as_read_again(self, mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch mem"]:
        """The mask as ``again`` has its keys: those before the last query, then the query's own."""
        own = mask.gather(1, self.at[:, None])
        before = torch.arange(int(self.at.max()), device=self.at.device) < self.at[:, None]
        return torch.cat([mask[:, : before.shape[1]] & before, own], 1)

    def again(self, hooks: Sequence[Hook] = ()) -> Float[Tensor, "batch vocab"]:
        """Logits when the query alone is read again, under hooks, on the kept keys and values."""
        memory = int(self.at.max())
        held = torch.arange(memory, device=self.at.device) < self.at[:, None]
        keys, values = (tuple(x[:, :, :memory] for x in s) for s in (self.keys, self.values))
        own, at = self.tokens.gather(1, self.at[:, None]), self.at[:, None]
        fed, last = torch.ones_like(own, dtype=torch.bool), torch.zeros_like(own)
        with torch.no_grad():
            out = read_with_cache(self.model, keys, values, held, own, fed, at, last, hooks)
        return out[:, 0]


def read(model: TransformerBridge, tokens: Tokens, at: Place = None) -> AtQuery:
    """Read the prompts once; the query is the last token, or that at ``at``."""
    check_tokens(model, tokens)
    check_editable(model)
    size, layers = tokens.shape[1], range(model.cfg.n_layers)
    at = torch.full((len(tokens),), size - 1, device=tokens.device) if at is None else at
    if at.shape != tokens.shape[:1] or not bool(((at >= 0) & (at < size)).all()):
        raise IclError(f"Need one query position per prompt, in 0..{size - 1}.")
    ends = ("q", "attn_scores", "z", "resid_post", "attn_out", "mlp_out")
    names = {get_act_name(end, layer) for layer in layers for end in ends}
    names |= {f"ln_final.hook_{part}" for part in ("scale", "normalized")}
    names |= {get_act_name("resid_pre", 0)} | angle_names(model.cfg.n_layers)
    names &= set(model.hook_dict)
    found: dict[str, Tensor] = {}
    unknown = torch.empty(len(tokens), model.cfg.d_vocab)
    try:
        kept = keys_values(model, tokens)
    except IclError as error:
        raise IclError(f"Heads of this model cannot be taken as dual models. {error}") from None
    query = AtQuery(model, tokens, at, *kept, found, unknown)
    watch: list[Any] = [
        (name, lambda value, hook, name=name: found.update({name: value})) for name in names
    ]
    logits = query.again(watch)
    query = replace(query, logits=logits)
    seen = query.as_read_again(query.seen)
    for layer, (q, key, _, _) in enumerate(read_heads(query)):
        ours = scores(q[:, :, None], key)[:, :, 0]
        last = at[:, None, None].expand(-1, ours.shape[1], 1)
        ours = torch.cat([ours[..., : seen.shape[1] - 1], ours.gather(2, last)], 2)
        theirs = found[get_act_name("attn_scores", layer)][:, :, 0]
        ours, theirs = (x.masked_fill(~seen[:, None], 0.0) for x in (ours, theirs))
        if not (ours - theirs).abs().max() <= SCORE_TOLERANCE * (1 + theirs.abs().max()):
            raise IclError(
                "Heads of this model cannot be taken as dual models: attention scores are not "
                "q·k / sqrt(d_head) of the queries and keys that it shows (another scale, other "
                "positions, a window). Use one like GPT-2 or Llama."
            )
    return query


def read_heads(query: AtQuery, layers: Sequence[int] | None = None) -> Iterator[list[Tensor]]:
    """Query, keys, values and z of every head, layer by layer, float64.

    Query and z are (batch, head, d_head), keys and values (batch, head, pos, d_head).
    """
    for layer in range(query.model.cfg.n_layers) if layers is None else layers:
        q, z = (query.found[get_act_name(part, layer)] for part in ("q", "z"))
        q = placed(query.model, layer, "q", q, angles(query.found, layer))
        parts = q[:, 0], query.keys[layer], query.values[layer], z[:, 0]
        yield [part.double() for part in parts]
