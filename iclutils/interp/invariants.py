"""What must hold of a model before a measure of its parts can be right, asked of each model once.

Architectures differ in what stands between a part and the residual stream: a norm before it, after
it or on either side, a factor, an MLP beside the heads in place of after them. ``blocks`` finds out
by trying on a few tokens, and compares every part with what the model does itself. A model that
fits no known way is refused with the size of the gap: a measure is right or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..errors import IclError
from ..models import TransformerBridge, cached, get_act_name, logits
from ..models.checkpoint import first_line

TOLERANCE = 1e-4  # of the largest value: float32 rounds at 1e-7, other architectures differ by 0.1
PROBE = 6  # tokens of a probe
EDITED = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z", "mlp.hook_in", "hook_mlp_out")
END = "ln_final.hook_in"  # what the logits read

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
        """Return what the norm makes of a part of its input; parts sum to the whole less
        ``shift``."""
        return (part - part.mean(-1, keepdim=True) if self.centred else part) * self.gain

    def pull_back(self, direction: Stream) -> Stream:
        """Return the direction before the norm whose product is that with ``direction`` after
        it."""
        before = direction * self.gain
        return before - before.mean(-1, keepdim=True) if self.centred else before


def freeze(norm: Norm, at: Stream) -> Frozen | None:
    """Hold the scale of a norm fixed at what it is ``at`` a point; None if it is no norm.

    What the norm makes of zeros and of numbers of one size shows its bias and its weight.
    """
    sign = torch.ones_like(at[..., :1, :].flatten(0, -2)[0])
    sign[1::2] = -1
    with torch.no_grad():
        shift = norm(torch.zeros_like(sign))
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
    reads the stream that the heads read. ``factor`` and ``norm``: what becomes of all that the
    heads write together, ``W_O`` and bias included, before it is added to the stream.
    """

    heads_read: Norm | None
    mlp_read: Norm | None
    parallel: bool
    factor: float
    norm: Norm | None
    out: Float[Tensor, "head d_head d_model"]
    bias: Tensor | None

    def written(self, z: Float[Tensor, "*#lead head d_head"]) -> Stream:
        """Return what all heads write together, before factor and norm."""
        whole = torch.einsum("...hk,hkd->...d", z, self.out)
        return whole if self.bias is None else whole + self.bias

    def share(self, z: Float[Tensor, "*#lead head d_head"], part: Stream) -> Stream:
        """Return what a part of ``written`` adds to the stream; a norm keeps the scale that it
        has with all of ``z``, so that the parts add up."""
        if self.norm is None:
            return part if self.factor == 1 else self.factor * part
        return self._frozen(z).apply(part)

    def pull_back(self, z: Float[Tensor, "*#lead head d_head"], direction: Stream) -> Stream:
        """Return the direction whose product with a part of ``written`` is that of ``direction``
        with its ``share``."""
        if self.norm is None:
            return direction if self.factor == 1 else self.factor * direction
        return self._frozen(z).pull_back(direction)

    @property
    def reaching(self) -> Float[Tensor, "head d_head d_model"]:
        """``W_O`` as it reaches the stream: times the factor, or the weight of the norm without its
        scale, which is one positive number for each position."""
        if self.norm is None:
            return self.out if self.factor == 1 else self.factor * self.out
        frozen = freeze(self.norm, torch.ones_like(self.out[0]))
        assert frozen is not None, "blocks has tried this norm"
        return self.out * frozen.gain[0]

    def _frozen(self, z: Tensor) -> Frozen:
        frozen = freeze(self.norm, self.written(z)) if self.norm else None
        assert frozen is not None, "blocks has tried this norm"
        return frozen

    def change(self, whole: Stream, change: Stream) -> Stream:
        """Return by how much the stream changes when ``written`` changes from ``whole``: exact,
        since a norm is applied anew."""
        if self.norm is None:
            return change if self.factor == 1 else self.factor * change
        return self.norm(whole + change) - self.norm(whole)


@once
def blocks(model: TransformerBridge) -> tuple[Block, ...]:
    """Return how each block reads and writes, or refuse the model.

    What reads must read what a norm makes of the stream, the parts must sum to the stream, and a
    NaN at each hook by which parts are read or changed must reach the logits.
    """
    layers = range(model.cfg.n_layers)
    parts = (*EDITED, "attn.hook_in", "hook_in", "hook_attn_out", "hook_out")
    wanted = {f"blocks.{layer}.{part}" for layer in layers for part in parts} | {END}
    if lacking := sorted(wanted - set(model.hook_dict)):
        _refuse(model, f"it has no {lacking[0]}")
    _, cache = cached(model, _probe(model), wanted | {get_act_name("resid_post", layers[-1])})
    every = []
    for layer in layers:
        seen = {part: cache.cache_dict.get(f"blocks.{layer}.{part}") for part in parts}
        if dead := [part for part, value in seen.items() if value is None]:
            _refuse(model, f"nothing ever passes {dead[0]} of layer {layer}")
        every.append(_wiring(model, layer, seen))
    last = cache[get_act_name("resid_post", layers[-1])]
    _require(model, cache[END], last, "what the final norm reads")
    _check_alive(model)
    return tuple(every)


def _wiring(model: TransformerBridge, layer: int, seen: Mapping[str, Any]) -> Block:
    """Find out how one block is wired, from what passed its hooks."""
    block: Any = model.blocks[layer]
    attn, before, attended = block.attn, seen["hook_in"], seen["hook_attn_out"]
    parallel = bool(getattr(model.cfg, "parallel_attn_mlp", False))
    stream = before if parallel else before + attended
    where = f"in layer {layer} "
    heads_read = _fit(model, block, before, seen["attn.hook_in"], f"{where}what the heads read")
    mlp_read = _fit(model, block, stream, seen["mlp.hook_in"], f"{where}what the MLP reads")
    for channel in "qkv":
        weight, bias = (getattr(attn, f"{part}_{channel.upper()}", None) for part in "Wb")
        states = torch.einsum("bpd,hdk->bphk", seen["attn.hook_in"], weight)
        states = states if bias is None else states + bias
        _require(model, states, seen[f"attn.hook_{channel}"], f"{where}the {channel} of heads")
    out, bias = attn.W_O, getattr(attn, "b_O", None)
    plain = Block(heads_read, mlp_read, parallel, 1.0, None, out, bias)
    whole = plain.written(seen["attn.hook_z"])
    factor = float((whole * attended).sum() / whole.square().sum())
    norm = None
    if _gap(whole, attended) <= TOLERANCE:
        factor = 1.0
    elif _gap(factor * whole, attended) > TOLERANCE:
        factor, what = 1.0, f"{where}what the heads write"
        norm = _fit(model, block, whole, attended, what)
        if norm is None or freeze(norm, whole) is None:
            _refuse(model, f"{what} is changed in an unknown way", _gap(whole, attended))
    sum_of_parts = before + attended + seen["hook_mlp_out"]
    _require(model, sum_of_parts, seen["hook_out"], f"{where}the sum of what heads and MLP write")
    return Block(heads_read, mlp_read, parallel, factor, norm, out, bias)


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
    shape, eps = (model.cfg.d_model,), float(getattr(model.cfg, "eps", None) or 1e-5)
    yield partial(functional.layer_norm, normalized_shape=shape, eps=eps)
    yield partial(functional.rms_norm, normalized_shape=shape, eps=eps)


def _check_alive(model: TransformerBridge) -> None:
    """Refuse a model in which a hook can be read, but an edit there is lost: NaN at each of them,
    all in one pass, must change the logits (to NaN; after folding, attention becomes 0)."""
    names = [f"blocks.{layer}.{part}" for layer in range(model.cfg.n_layers) for part in EDITED]
    names.append(END)

    def spoil(row: int) -> Callable[[Tensor, object], Tensor]:
        def spoiled(value: Tensor, hook: object) -> Tensor:
            return value.index_fill(0, torch.tensor([row], device=value.device), torch.nan)

        return spoiled

    tokens = _probe(model)[:1, :1].expand(len(names) + 1, -1)  # the last row stays as it is
    hooks: list[Any] = [(name, spoil(row)) for row, name in enumerate(names)]
    with torch.no_grad():
        *changed, clean = model.run_with_hooks(tokens, fwd_hooks=hooks)
    for name, row in zip(names, changed, strict=True):
        if bool(((row - clean).abs() <= TOLERANCE * clean.abs().max()).all()):
            _refuse(model, f"a change at {name} does not reach its logits")


@once
def logit_factor(model: TransformerBridge) -> float:
    """Return the factor between what the unembedding gives and the logits (Cohere, Granite), 1 for
    most. Refuses a model whose logits are not linear in what the final norm gives, as under a soft
    cap (Gemma-2): there no part of a logit is due to one head."""
    names = [get_act_name("resid_post", model.cfg.n_layers - 1), "unembed.hook_in"]
    said, cache = cached(model, _probe(model), names)
    end, normal = cache[names[0]], cache[names[1]]
    if freeze(final_norm(model), end) is None:
        _refuse(model, "its final norm is neither LayerNorm nor RMSNorm")
    plain = normal @ model.W_U + model.b_U
    if _gap(plain, said) <= TOLERANCE:
        return 1.0
    factor = float((plain * said).sum() / plain.square().sum())
    gap = _gap(factor * plain, said)
    if gap > TOLERANCE:
        _refuse(model, "its logits are not linear in the last state (a soft cap?)", gap)
    return factor


@once
def final_norm(model: TransformerBridge) -> Norm:
    """Return the norm before the unembedding; refuse a model in which something else is there."""
    names = [get_act_name("resid_post", model.cfg.n_layers - 1), "unembed.hook_in"]
    _, cache = cached(model, _probe(model), names)
    end, normal = (cache[name] for name in names)
    norm = _fit(model, model, end, normal, "what the unembedding reads")
    return norm if norm is not None else lambda stream: stream


def toward(
    model: TransformerBridge,
    end: Float[Tensor, "*lead d_model"],
    direction: Float[Tensor, "*#lead d_model"],
) -> Float[Tensor, "*lead d_model"]:
    """Return the direction in the residual stream whose product with a part of the stream is what
    that part adds to a logit directly; ``direction`` is the logit's column of ``W_U``, or a
    difference of columns. The final norm keeps the scale that it has at ``end``, the last stream
    of the run."""
    factor, frozen = logit_factor(model), freeze(final_norm(model), end)
    assert frozen is not None, "logit_factor has tried this norm"
    before = frozen.pull_back(direction)
    return before if factor == 1 else factor * before


@contextmanager
def skip_layers(
    model: TransformerBridge, layers: int, start: Float[Tensor, "batch pos d_model"]
) -> Iterator[None]:
    """Let no block below a layer compute anything: they hand on ``start``. Refuses a model in which
    a run that goes on so is not the whole run."""
    if layers:
        with _handing_on(model, layers, (start,) if _gives_tuples(model) else start):
            yield
    else:
        yield


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
