"""What must hold of a model before a measure of its parts can be right, asked of each model once.

Architectures differ in what stands between a part and the residual stream: a norm before it, after
it or on either side, a factor, an MLP beside the heads in place of after them. ``blocks`` finds out
by trying on a few tokens, and compares every part with what the model does itself. A model that
fits no known way is refused with the size of the gap: a measure is right or refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..errors import IclError
from ..models import TransformerBridge, cached, get_act_name, logits
from ..models.checkpoint import first_line

TOLERANCE = 1e-4  # of the largest value: float32 rounds at 1e-7, other architectures differ by 0.1
PROBE = 3  # tokens of a probe: with one, a norm whose weights are equal would look like a factor
GATE = "attn.hook_in"  # NaN there, but not in queries, keys and values, may change nothing
EDITED: dict[str, tuple[int, int | slice]] = {  # row and position of the probe that get NaN
    "attn.hook_q": (2, 0),
    "attn.hook_k": (0, slice(None)),  # every position reads it
    "attn.hook_v": (1, slice(None)),
    "attn.hook_z": (2, 1),
    "mlp.hook_in": (3, 0),
    "hook_mlp_out": (3, 1),
    GATE: (2, 2),
}
READ = ("hook_in", "hook_attn_out", "hook_out")
END = "ln_final.hook_in"  # what the logits read
NORMAL = "unembed.hook_in"  # what the final norm gives

Stream = Float[Tensor, "*#lead d_model"]
Norm = Callable[[Tensor], Tensor]
Answer = TypeVar("Answer")


def once(ask: Callable[[TransformerBridge], Answer]) -> Callable[[TransformerBridge], Answer]:
    """Ask a question of each model once; what cannot be asked of it is a refusal, too."""
    answers: WeakKeyDictionary[TransformerBridge, Answer] = WeakKeyDictionary()

    @wraps(ask)
    def answer(model: TransformerBridge) -> Answer:
        if model not in answers:
            try:
                answers[model] = ask(model)
            except IclError:
                raise
            except Exception as error:  # an architecture may lack any part, or have another shape
                _refuse(model, f"its parts are not where others have them ({first_line(error)})")
        return answers[model]

    return answer


@dataclass(frozen=True)
class Frozen:
    """A norm at the scale that it has at one point: x becomes (x, less its mean) * gain + shift."""

    gain: Stream
    shift: Float[Tensor, "d_model"]
    centred: bool  # LayerNorm takes the mean away; RMSNorm does not

    def apply(self, part: Stream) -> Stream:
        """Return what becomes of a part of the input; parts sum to the whole less ``shift``."""
        return (part - part.mean(-1, keepdim=True) if self.centred else part) * self.gain

    def pull_back(self, direction: Stream) -> Stream:
        """Return the direction before the norm that has the product of ``direction`` after it."""
        before = direction * self.gain
        return before - before.mean(-1, keepdim=True) if self.centred else before


def freeze(norm: Norm, at: Stream) -> Frozen | None:
    """Hold the scale of a norm fixed at what it is ``at`` a point; None if it is no norm.

    What the norm makes of zeros and of numbers of one size shows its bias and its weight. Zeros
    become NaN without an epsilon; then numbers of both signs show the bias.
    """
    sign = torch.ones_like(at[..., :1, :].flatten(0, -2)[0])
    sign[1::2] = -1
    with torch.no_grad():
        shift = norm(torch.zeros_like(sign))
        shift = shift if bool(shift.isfinite().all()) else (norm(sign) + norm(-sign)) / 2
        weight = (norm(1e3 * sign) - shift) * sign
        after = norm(at) - shift
        for centred in (False, True):
            linear = (at - at.mean(-1, keepdim=True) if centred else at) * weight
            size = linear.square().sum(-1, keepdim=True).clamp_min(1e-30)
            scale = (after * linear).sum(-1, keepdim=True) / size
            if _gap(linear * scale, after) <= TOLERANCE:
                return Frozen(weight * scale, shift, centred)
    return None


@dataclass(frozen=True)
class Block:
    """How one block reads the residual stream and writes to it.

    ``heads_read``, ``mlp_read``: the norm before them, None without one. ``parallel``: the MLP
    reads the stream that the heads read. ``after``: what becomes of all that the heads write
    together, ``W_O`` and bias included, before it is added to the stream: a norm if ``normed``,
    else a factor, which is 1 for most.
    """

    heads_read: Norm | None
    mlp_read: Norm | None
    parallel: bool
    out: Float[Tensor, "head d_head d_model"]
    bias: Tensor | None
    after: Norm = lambda stream: stream
    normed: bool = False

    def written(self, z: Float[Tensor, "*#lead head d_head"]) -> Stream:
        """Return what all heads write together, before factor and norm."""
        whole = torch.einsum("...hk,hkd->...d", z, self.out)
        return whole if self.bias is None else whole + self.bias

    def share(self, z: Float[Tensor, "*#lead head d_head"], part: Stream) -> Stream:
        """Return what a part of ``written`` adds to the stream; a norm keeps the scale that it
        has with all of ``z``, so that the parts add up."""
        return self._frozen(self.written(z)).apply(part) if self.normed else self.after(part)

    def pull_back(self, z: Float[Tensor, "*#lead head d_head"], direction: Stream) -> Stream:
        """Return the direction that has with ``written`` the product of this one with ``share``."""
        if not self.normed:
            return self.after(direction)
        return self._frozen(self.written(z)).pull_back(direction)

    @property
    def reaching(self) -> Float[Tensor, "head d_head d_model"]:
        """``W_O`` as it reaches the stream: times the factor, or the weight of the norm without its
        scale, which is one positive number for each position."""
        if not self.normed:
            return self.after(self.out)
        return self.out * self._frozen(torch.ones_like(self.out[0])).gain[0]

    def change(self, z: Float[Tensor, "*#lead head d_head"], change: Stream) -> Stream:
        """Return by how much the stream changes when ``written`` changes from what it is with
        ``z``: exact, since a norm is applied anew."""
        if not self.normed:
            return self.after(change)
        whole = self.written(z)
        return self.after(whole + change) - self.after(whole)

    def _frozen(self, at: Stream) -> Frozen:
        frozen = freeze(self.after, at)
        assert frozen is not None, "blocks has tried this norm"
        return frozen


@once
def blocks(model: TransformerBridge) -> tuple[Block, ...]:
    """Return how each block reads and writes, or refuse the model.

    What reads must read what a norm makes of the stream, the parts must sum to the stream, and a
    NaN at each hook by which parts are read or changed must come out again.
    """
    seen, faults = _try_out(model)
    every = []
    for layer in range(model.cfg.n_layers):
        own = {part: seen[f"blocks.{layer}.{part}"] for part in (*EDITED, *READ)}
        every.append(_wiring(model, layer, own))
    _require(model, seen[END], own["hook_out"], "what the final norm reads")
    if faults:
        _refuse(model, faults[0])
    return tuple(every)


@once
def _try_out(model: TransformerBridge) -> tuple[dict[str, Tensor], list[str]]:
    """Run one sequence in five rows. Return what passes the hooks in the last row, which stays as
    it is, and its logits; and what is wrong with edits in the other rows.

    NaN in a place of ``EDITED`` must change what its block gives (to NaN; after folding, attention
    becomes 0). Every block gives its rows back as if nothing had been changed, so that one run is
    enough for all layers.
    """
    prefixes = [f"blocks.{layer}." for layer in range(model.cfg.n_layers)]
    inside = [(prefix, part) for prefix in prefixes for part in (*EDITED, *READ)]
    names = [prefix + part for prefix, part in inside] + [END]
    if lacking := sorted({*names} - set(model.hook_dict)):
        _refuse(model, f"it has no {lacking[0]}")
    seen, faults = dict[str, Tensor](), list[str]()
    tokens = _probe(model)[:1].expand(5, -1)
    places = {**EDITED, END: (0, slice(None))}

    def edit(prefix: str, part: str, value: Tensor, hook: object) -> Tensor:
        if prefix + part in seen:  # an edit there would be made twice
            _refuse(model, f"a run passes {prefix}{part} twice")
        clean = seen[prefix + part] = value[-1:].clone()
        if part == "hook_out":
            compare(prefix, ((value - clean).abs() <= TOLERANCE * clean.abs().max()).all(-1))
            return clean.expand_as(value)
        if part not in places:
            return value
        changed = value.reshape(*tokens.shape, -1).clone()
        if part in ("attn.hook_q", "attn.hook_k", "attn.hook_v"):
            changed[EDITED[GATE]] = changed[-1, EDITED[GATE][1]]
        changed[places[part]] = torch.nan
        return changed.view_as(value)

    def compare(prefix: str, same: Bool[Tensor, "row pos"]) -> None:
        for part, place in EDITED.items():
            unchanged = bool(same[place].all())
            if unchanged and part != GATE:
                faults.append(f"a change at {prefix}{part} does not reach what the block gives")
            if part == GATE and not unchanged:
                where = f"in layer {prefix.split('.')[1]} heads read more of the stream"
                faults.append(f"{where} than queries, keys and values do (a gate?)")

    def last(value: Tensor, hook: object) -> Tensor:
        seen[NORMAL] = value[-1:].clone()
        return value

    hooks: list[Any] = [(prefix + part, partial(edit, prefix, part)) for prefix, part in inside]
    hooks += [(END, partial(edit, "", END)), (NORMAL, last)]
    with torch.no_grad():
        changed, *same, clean = model.run_with_hooks(tokens, fwd_hooks=hooks)
    if dead := [name for name in names if name not in seen]:
        _refuse(model, f"nothing ever passes {dead[0]}")
    if not _gap(torch.stack(same), clean.expand(len(same), -1, -1)) <= TOLERANCE:
        faults.append("a change at what a block gives does not reach its logits")
    if _gap(changed, clean) <= TOLERANCE:
        faults.append(f"a change at {END} does not reach its logits")
    return {**seen, "logits": clean[None]}, faults


def _wiring(model: TransformerBridge, layer: int, seen: Mapping[str, Tensor]) -> Block:
    """Find out how one block is wired, from what passed its hooks."""
    block: Any = model.blocks[layer]
    attn, before, attended = block.attn, seen["hook_in"], seen["hook_attn_out"]
    parallel = bool(getattr(model.cfg, "parallel_attn_mlp", False))
    stream = before if parallel else before + attended
    where = f"in layer {layer} "
    check_queries(model, seen["attn.hook_q"])
    heads_read = _fit(model, block, before, seen["attn.hook_in"], f"{where}what the heads read")
    mlp_read = _fit(model, block, stream, seen["mlp.hook_in"], f"{where}what the MLP reads")
    for channel in "qkv":
        weight: Any = getattr(attn, f"W_{channel.upper()}")
        bias = getattr(attn, f"b_{channel.upper()}", None)
        states = (seen["attn.hook_in"][:, None] @ weight).transpose(1, 2)  # no copy of the weight
        states = states if bias is None else states + bias
        _require(model, states, seen[f"attn.hook_{channel}"], f"{where}the {channel} of heads")
    plain = Block(heads_read, mlp_read, parallel, attn.W_O, getattr(attn, "b_O", None))
    whole, what = plain.written(seen["attn.hook_z"]), f"{where}what the heads write"
    factor = float((whole * attended).sum() / whole.square().sum())
    if _gap(whole, attended) <= TOLERANCE:
        wired = plain
    elif _gap(factor * whole, attended) <= TOLERANCE:
        wired = replace(plain, after=lambda stream: factor * stream)
    else:
        norm = _fit(model, block, whole, attended, what)
        if norm is None or freeze(norm, whole) is None:
            _refuse(model, f"{what} is changed in an unknown way", _gap(whole, attended))
        wired = replace(plain, after=norm, normed=True)
    sum_of_parts = before + attended + seen["hook_mlp_out"]
    _require(model, sum_of_parts, seen["hook_out"], f"{where}the sum of what heads and MLP write")
    return wired


def _fit(model: TransformerBridge, owner: Any, stream: Tensor, read: Tensor, what: str) -> Any:
    """Return the norm that makes ``read`` of ``stream``, None if they are the same; a module of
    the network is called itself, so that no hook fires."""
    if _gap(stream, read) <= TOLERANCE:
        return None
    best = float("inf")
    for norm in _norms(model, owner):
        best = min(best, gap := _gap(norm(stream), read))
        if gap <= TOLERANCE:
            return norm
    _refuse(model, f"{what} is no norm of the stream", best)


def _norms(model: TransformerBridge, owner: Any) -> Iterator[Norm]:
    """List the norms of a block or of the model, and those without weights, as after folding."""
    for name in ("ln1", "ln2", "ln1_post", "ln2_post", "ln_final"):
        module = getattr(getattr(owner, name, None), "original_component", None)
        if module is not None:
            yield module
    shape, eps = (model.cfg.d_model,), getattr(model.cfg, "eps", None)
    eps = 1e-5 if eps is None else float(eps)
    yield partial(functional.layer_norm, normalized_shape=shape, eps=eps)
    yield partial(functional.rms_norm, normalized_shape=shape, eps=eps)


def _spoil(value: Tensor, hook: object) -> Tensor:
    return torch.full_like(value, torch.nan)


@once
def editable(model: TransformerBridge) -> bool:
    """Tell whether an edit of attention patterns, or of the scores before them, changes the output.

    Some architectures (GPT-J, GPT-Neo, OPT) compute attention on their own, and TransformerLens
    shows it afterwards. Measured at layer 0: NaN put in must come out.
    """
    patterns: list[Tensor] = []

    def keep(value: Tensor, hook: object) -> Tensor:
        patterns.append(value)
        return value

    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.cfg.device)
    first: Any = {"stop_at_layer": 1}  # what reaches the second layer reaches the logits
    scores, pattern = (f"blocks.0.attn.hook_{part}" for part in ("attn_scores", "pattern"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the edits that are lost
        model.run_with_hooks(tokens, fwd_hooks=[(scores, _spoil), (pattern, keep)], **first)
        out = model.run_with_hooks(tokens, fwd_hooks=[(pattern, _spoil)], **first)
    no_rows = not bool(patterns[0].sum() > 0)  # NaN or, after folding, 0
    return no_rows and bool(out.isnan().any())


@once
def _unembedding(model: TransformerBridge) -> tuple[Norm, float]:
    """Return the norm before the unembedding, and the factor between what the unembedding gives and
    the logits (Cohere, Granite), 1 for most. Refuses a model whose logits are not linear in what
    this norm gives, as under a soft cap (Gemma-2): there no part of a logit is due to one head."""
    seen, _ = _try_out(model)
    end, normal, said = (seen[name] for name in (END, NORMAL, "logits"))
    norm = _fit(model, model, end, normal, "what the unembedding reads") or (lambda stream: stream)
    if freeze(norm, end) is None:
        _refuse(model, "its final norm is neither LayerNorm nor RMSNorm")
    plain = normal @ model.W_U + model.b_U
    if _gap(plain, said) <= TOLERANCE:
        return norm, 1.0
    factor = float((plain * said).sum() / plain.square().sum())
    if (gap := _gap(factor * plain, said)) > TOLERANCE:
        _refuse(model, "its logits are not linear in the last state (a soft cap?)", gap)
    return norm, factor


def toward(
    model: TransformerBridge,
    end: Float[Tensor, "*lead d_model"],
    direction: Float[Tensor, "*#lead d_model"],
) -> Float[Tensor, "*lead d_model"]:
    """Return the direction in the residual stream whose product with a part of the stream is what
    that part adds to a logit directly; ``direction`` is the logit's column of ``W_U``, or a
    difference of columns. The final norm keeps its scale at ``end``, the run's last stream."""
    norm, factor = _unembedding(model)
    frozen = freeze(norm, end)
    assert frozen is not None, "_unembedding has tried this norm"
    before = frozen.pull_back(direction)
    return before if factor == 1 else factor * before


def skip_layers(
    model: TransformerBridge, layers: int, start: Float[Tensor, "batch pos d_model"]
) -> AbstractContextManager[None]:
    """Let no block below a layer compute anything: they hand on ``start``. Refuses a model in which
    a run that goes on so is not the whole run."""
    return _handing_on(model, layers, (start,) if layers and _gives_tuples(model) else start)


@contextmanager
def _handing_on(model: TransformerBridge, layers: int, output: object) -> Iterator[None]:
    lowest = [model.blocks[layer] for layer in range(layers)]
    for block in lowest:
        block.__dict__["forward"] = lambda *_, **__: output
    try:
        yield
    finally:
        for block in lowest:
            del block.__dict__["forward"]


@once
def _gives_tuples(model: TransformerBridge) -> bool:
    """Tell whether a block hands on a tuple with the stream in it, not the stream itself; refuse a
    model whose logits differ when the blocks below the last are skipped."""
    outputs, last = list[object](), model.cfg.n_layers - 1
    name, tokens = get_act_name("resid_pre", last), _probe(model)
    handle = model.blocks[0].register_forward_hook(lambda block, args, out: outputs.append(out))
    try:
        whole, cache = cached(model, tokens, [name])
    finally:
        handle.remove()
    tuples, start = isinstance(outputs[0], tuple), cache[name]
    with _handing_on(model, last, (start,) if tuples else start):
        gap = _gap(logits(model, tokens), whole)
    if gap > TOLERANCE:
        _refuse(model, "a run that goes on from a layer is not the whole run", gap)
    return tuples


def check_rows(model: TransformerBridge, pattern: Float[Tensor, "*lead src"], what: str) -> None:
    """Refuse rows of attention that do not sum to 1, as beside a sink (GPT-OSS)."""
    total = pattern.sum(-1)
    gap = float((total - 1).abs().max())
    if gap > TOLERANCE:
        _refuse(model, f"its rows of attention sum to {float(total.min()):.2g}, not 1", gap, what)


def check_queries(
    model: TransformerBridge,
    queries: Float[Tensor, "*lead head d_head"],
    what: str = "its parts",
) -> None:
    """Refuse queries that are not one for each head, as where gates stand between them
    (Qwen-3.5)."""
    count, heads = queries.shape[-2], model.cfg.n_heads
    if count != heads:
        _refuse(model, f"its {heads} heads have {count} queries (gates among them?)", what=what)


def window(model: TransformerBridge) -> int | None:
    """Return how many tokens the most short-sighted layer sees, None if all see everything."""
    config = model.original_model.config
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds and all("full" in kind or "global" in kind for kind in kinds):
        return None
    sizes = (getattr(config, name, None) for name in ("sliding_window", "window_size"))
    return next((size for size in sizes if size is not None), 0 if kinds else None)


def check_window(model: TransformerBridge, length: int, what: str) -> None:
    """Refuse a model that sees less than ``length`` tokens at once."""
    size = window(model)
    if size is not None and size < length:
        raise IclError(
            f"{what} cannot be had of this model: some of its layers see {size} tokens at once, "
            f"and the prompts have {length}. Use shorter prompts, or a model with full attention."
        )


def check_turns(model: TransformerBridge, *lengths: int) -> None:
    """Refuse lengths of which some are read with other rotary positions (LongRoPE, as in Phi-3):
    those of texts in a batch, or of a text and of what is read on top of its keys."""
    rope = getattr(model.original_model.config, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings") or model.cfg.n_ctx
    if rope.get("rope_type") == "longrope" and min(lengths) <= limit < max(lengths):
        raise IclError(
            f"This model has other rotary positions in texts of more than {limit} tokens, and here "
            f"some are shorter and some longer ({min(lengths)} and {max(lengths)} tokens). Use "
            "texts on one side of this length."
        )


def _probe(model: TransformerBridge) -> Int[Tensor, "two pos"]:
    """Draw two short sequences, always the same."""
    draw = torch.Generator().manual_seed(0)
    size = 2, min(PROBE, model.cfg.n_ctx)
    return torch.randint(model.cfg.d_vocab, size, generator=draw).to(model.cfg.device)


def _gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, in parts of the largest value."""
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))


def _require(model: TransformerBridge, ours: Tensor, theirs: Tensor, what: str) -> None:
    gap = _gap(ours, theirs)
    if not gap <= TOLERANCE:
        _refuse(model, f"{what} is not what its weights give", gap)


def _refuse(
    model: TransformerBridge, why: str, gap: float | None = None, what: str = "its parts"
) -> NoReturn:
    size = "" if gap is None else f", off by {gap:.2g} of the largest value"
    kind = getattr(model.original_model.config, "model_type", "unknown")
    raise IclError(
        f"This model ({kind}) cannot be measured by {what}: {why}{size}. Its predictions, and "
        "what they lose when heads are removed, can be measured all the same."
    )
