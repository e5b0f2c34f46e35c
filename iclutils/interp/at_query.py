"""One token of every prompt, its query, with what its heads attend by: read once, then again.

Queries, keys and values are the actual activations as attention compares them: normed (Qwen 3) and,
under rotary positions (Su et al. 2021), turned by where they stand, so that a score depends on the
distance of query and key alone. A model whose scores are made otherwise is refused when it is read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..errors import IclError
from ..models import ActivationCache, TransformerBridge, check_tokens, get_act_name
from .hooks import Hook, run_with_hooks
from .invariants import check_editable, check_queries
from .kv_cache import KeyStates, States, keys_values, read_with_cache

Queries = Float[Tensor, "*batch query channel"]
Keys = Float[Tensor, "*batch key channel"]
Allowed = Bool[Tensor, "..."]
Tokens = Int[Tensor, "batch pos"]
Mask = Shaped[Tensor, "..."]  # (batch, pos), bool; anything else is refused with a cure
Place = Int[Tensor, "..."] | None  # (batch), the query's position; None: the last
Vectors = Float[Tensor, "*lead d_head"]
Angles = tuple[Float[Tensor, "*#lead pos width"], Float[Tensor, "*#lead pos width"]] | None
SCORE_TOLERANCE = 1e-4  # of the largest score: what the model's own may differ from ours
FEW = 8  # tokens on which scores are compared, at least


def scores(
    queries: Queries, keys: Keys, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query key"]:
    """Return k·q / √d, the logarithm of the kernel; -inf where a query may not look."""
    products = queries @ keys.mT / math.sqrt(keys.shape[-1])
    return products if allowed is None else products.masked_fill(~allowed, -torch.inf)


@dataclass(frozen=True)
class AtQuery:
    """One token of every prompt, its query, as ``read`` found it; later tokens may be padding."""

    model: TransformerBridge
    tokens: Tokens
    at: Int[Tensor, "batch"]  # where the query stands
    keys: KeyStates  # per layer (batch, head, pos, d_head), after any rotation
    values: States
    activations: Mapping[str, Tensor]  # at the query, (batch, 1, ...), by the hook's name
    logits: Float[Tensor, "batch vocab"]

    @property
    def seen(self) -> Bool[Tensor, "batch pos"]:
        """Tell which tokens the query sees."""
        return torch.arange(self.tokens.shape[1], device=self.at.device) <= self.at[:, None]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> "AtQuery":
        """Take some of the prompts."""
        keys, values = (tuple(x[rows] for x in part) for part in (self.keys, self.values))
        found = {k: x if len(x) == 1 else x[rows] for k, x in self.activations.items()}
        some = (self.tokens[rows], self.at[rows], keys, values, found, self.logits[rows])
        return AtQuery(self.model, *some)

    def mask(self, demonstrations: Mask) -> Bool[Tensor, "batch pos"]:
        """Return the demonstrations that the query sees; refuse a mask that does not fit."""
        if demonstrations.dtype != torch.bool or demonstrations.shape != self.tokens.shape:
            raise IclError(
                f"Need a bool mask of the tokens' shape, {tuple(self.tokens.shape)}; got "
                f"{demonstrations.dtype} of {tuple(demonstrations.shape)}."
            )
        return demonstrations & self.seen

    def in_reread_order(self, mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch mem"]:
        """Order a mask as ``reread`` has its keys: those before the last query, then its own."""
        own = mask.gather(1, self.at[:, None])
        before = torch.arange(int(self.at.max()), device=self.at.device) < self.at[:, None]
        return torch.cat([mask[:, : before.shape[1]] & before, own], 1)

    def reread(self, hooks: Sequence[Hook] = ()) -> Float[Tensor, "batch vocab"]:
        """Return logits when the query alone is read again, under hooks, on these keys, values."""
        memory = int(self.at.max())
        past = torch.arange(memory, device=self.at.device) < self.at[:, None]
        keys, values = (tuple(x[:, :, :memory] for x in s) for s in (self.keys, self.values))
        own, at = self.tokens.gather(1, self.at[:, None]), self.at[:, None]
        fed, last = torch.ones_like(own, dtype=torch.bool), torch.zeros_like(own)
        with torch.no_grad():
            out = read_with_cache(self.model, keys, values, past, own, fed, at, last, hooks)
        return out[:, 0]


def read(model: TransformerBridge, tokens: Tokens, at: Place = None) -> AtQuery:
    """Read the prompts once; the query is the last token, or that at ``at``. Refuses a model whose
    attention cannot be edited, or whose scores are not q·k / sqrt(d_head)."""
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
        states = keys_values(model, tokens)
    except IclError as error:
        raise IclError(f"Heads of this model cannot be taken as dual models. {error}") from None
    query = AtQuery(model, tokens, at, *states, found, unknown)
    watch: list[Any] = [
        (name, lambda value, hook, name=name: found.update({name: value})) for name in names
    ]
    logits = query.reread(watch)
    query = replace(query, logits=logits)
    seen = query.in_reread_order(query.seen)
    check_queries(model, found[get_act_name("q", 0)], "dual models of heads")
    for layer, (q, key, _, _) in enumerate(read_heads(query)):
        ours = scores(q[:, :, None], key)[:, :, 0]
        last = at[:, None, None].expand(-1, ours.shape[1], 1)
        ours = torch.cat([ours[..., : seen.shape[1] - 1], ours.gather(2, last)], 2)
        theirs = found[get_act_name("attn_scores", layer)][:, :, 0]
        ours, theirs = (x.masked_fill(~seen[:, None], 0.0) for x in (ours, theirs))
        _refuse_other_scores("Dual models of heads", ours, theirs)
    return query


def _refuse_other_scores(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Refuse a model whose attention scores are not those of its queries and keys."""
    if not (ours - theirs).abs().max() <= SCORE_TOLERANCE * (1 + theirs.abs().max()):
        raise IclError(
            f"{what} cannot be had of this model: its attention scores are not q·k / sqrt(d_head) "
            "of queries and keys with learned or rotary positions (another scale, a window). Use "
            "a model like GPT-2, GPT-NeoX, Llama or Qwen."
        )


def read_heads(query: AtQuery, layers: Sequence[int] | None = None) -> Iterator[list[Tensor]]:
    """Yield query, keys, values and z of every head, layer by layer, float64: query and z are
    (batch, head, d_head), keys and values (batch, head, pos, d_head)."""
    for layer in range(query.model.cfg.n_layers) if layers is None else layers:
        q, z = (query.activations[get_act_name(part, layer)] for part in ("q", "z"))
        q = rotate(query.model, layer, "q", q, angles(query.activations, layer))
        parts = q[:, 0], query.keys[layer], query.values[layer], z[:, 0]
        yield [part.double() for part in parts]


def angle_names(layers: int) -> set[str]:
    """Name the hooks of cosines and sines of every layer, which only some models have."""
    return {
        f"blocks.{layer}.attn.hook_{part}" for layer in range(layers) for part in ("cos", "sin")
    }


def angles(cache: ActivationCache | Mapping[str, Tensor], layer: int) -> Angles:
    """Return cosines and sines of a layer (``angle_names``); None without rotary positions."""
    prefix = f"blocks.{layer}.attn.hook_"
    if f"{prefix}cos" not in cache:
        return None
    return cache[f"{prefix}cos"], cache[f"{prefix}sin"]


def rotate(
    model: TransformerBridge,
    layer: int,
    channel: str,
    states: Float[Tensor, "*lead pos head d_head"],
    turns: Angles,
) -> Float[Tensor, "*lead pos head d_head"]:
    """Norm and rotate queries or keys (``"q"``, ``"k"``) as the head does, if it does: the first
    channels turn, halves paired, as in GPT-NeoX, Llama and Qwen. For keys at a distance, see
    ``rotate_apart``."""
    norm = getattr(model.blocks[layer].attn, f"{channel}_norm", None)
    if getattr(norm, "weight", torch.empty(0)).shape == states.shape[-1:]:
        states = norm(states)  # type: ignore[misc]
    if turns is None:
        return states
    cos, sin = (part[..., None, :] for part in turns)
    width = cos.shape[-1]
    part, rest = states[..., :width], states[..., width:]
    turned = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
    return torch.cat([part * cos + turned * sin, rest], -1)


def rotate_apart(
    model: TransformerBridge, layer: int, distance: int, queries: Vectors, keys: Vectors
) -> tuple[Vectors, Vectors]:
    """Norm and rotate queries, and keys ``distance`` tokens before them: (*lead, d_head) each.
    Refuses a model whose attention scores are not those of its queries and keys."""
    parts = zip("qk", (queries, keys), _angles_apart(model, layer, distance), strict=True)
    queries, keys = (
        rotate(model, layer, channel, states[..., None, None, :], turns)[..., 0, 0, :]
        for channel, states, turns in parts
    )
    return queries, keys


@lru_cache(maxsize=64)  # pairs of heads ask again
def _angles_apart(model: TransformerBridge, layer: int, distance: int) -> tuple[Angles, Angles]:
    """Return angles of a query and of a key so many tokens before it."""
    names = {get_act_name(part, layer) for part in ("q", "k", "attn_scores")}
    tokens = torch.arange(max(distance + 1, FEW), device=model.cfg.device)[None]
    names |= angle_names(layer + 1) & set(model.hook_dict)
    _, cache = run_with_hooks(model, tokens % model.cfg.d_vocab, [], names, layer + 1)
    turns = angles(cache, layer)
    states = (rotate(model, layer, c, cache[get_act_name(c, layer)], turns)[0] for c in "qk")
    q, k = (each.transpose(0, 1) for each in states)
    ours = (q @ k.mT / q.shape[-1] ** 0.5).tril()
    theirs = cache[get_act_name("attn_scores", layer)][0].tril()
    _refuse_other_scores("QK matching at a distance", ours, theirs)
    if turns is None:
        return None, None
    cos, sin = turns
    at, first = slice(distance, distance + 1), slice(1)
    return (cos[0, at], sin[0, at]), (cos[0, first], sin[0, first])
