"""What must hold of a model before a measure of its parts can be right, asked of each model once.

Architectures differ in what stands between a part and the residual stream: a norm before it, after
it or on either side, a factor, an MLP beside the heads in place of after them. ``blocks`` finds out
from one pass over a few tokens (``trace``), and compares every part with what the model did itself.
A model that fits no known way is refused: a measure is right or refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ..errors import IclError
from ..models import TransformerBridge
from ..models.checkpoint import first_line
from .trace import ATTENTION, CHANGED, END, LOGITS, NORMAL, READ, Trace, trace

TOLERANCE = 1e-4  # of the largest value: float32 rounds at 1e-7, other architectures differ by 0.1
PROBE = 3  # tokens that are compared: with one, a norm whose weights are equal would be a factor
COLUMNS = 512  # of the unembedding that are compared, at least, or all
GATE = "attn.hook_in"  # queries, keys and values alone may be made of it
FED = "mlp.hook_in"  # what the MLP writes may be made of it alone

Stream = Float[Tensor, "*#lead d_model"]
Norm = Callable[[Tensor], Tensor]
Answer = TypeVar("Answer")


def once(ask: Callable[[TransformerBridge], Answer]) -> Callable[[TransformerBridge], Answer]:
    """Ask a question of each model once; what cannot be asked of it is a refusal, too."""
    answers: WeakKeyDictionary[TransformerBridge, Answer] = WeakKeyDictionary()

    @wraps(ask)
    @torch.no_grad()
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


traced = once(trace)


@dataclass(frozen=True)
class Frozen:
    """A norm at the scale that it has at one point: (x, less its mean) * gain, and a bias."""

    gain: Stream
    centred: bool  # LayerNorm takes the mean away; RMSNorm does not

    def apply(self, part: Stream) -> Stream:
        """Return what becomes of a part of the input; parts sum to the whole less the bias."""
        return (part - part.mean(-1, keepdim=True) if self.centred else part) * self.gain

    def pull_back(self, direction: Stream) -> Stream:
        """Return the direction before the norm that has the product of ``direction`` after it."""
        before = direction * self.gain
        return before - before.mean(-1, keepdim=True) if self.centred else before


def freeze(norm: Norm, at: Stream) -> Frozen:
    """Hold the scale of a norm fixed at what it is ``at`` a point; a ValueError if it is no norm.

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
            if gap(linear * scale, after) <= TOLERANCE:
                return Frozen(weight * scale, centred)
    raise ValueError("neither LayerNorm nor RMSNorm")


@dataclass(frozen=True)
class Block:
    """How one block reads the residual stream and writes to it."""

    heads_read: Norm | None  # the norm before them, if there is one
    mlp_read: Norm | None
    parallel: bool  # the MLP reads the stream that the heads read
    out: Float[Tensor, "head d_head d_model"]
    bias: Tensor | None
    # What becomes of all that the heads write together, bias included, on its way to the stream.
    after: Norm = lambda stream: stream
    normed: bool = False  # ``after`` is a norm; else a factor, which is 1 for most

    def written(self, z: Float[Tensor, "*#lead head d_head"]) -> Stream:
        """Return what all heads write together, before factor and norm."""
        whole = z.flatten(-2) @ self.out.flatten(0, 1)
        return whole if self.bias is None else whole + self.bias

    def share(self, z: Float[Tensor, "*#lead head d_head"], part: Stream) -> Stream:
        """Return what a part of ``written`` adds to the stream; a norm keeps the scale that it
        has with all of ``z``, so that the parts add up."""
        return freeze(self.after, self.written(z)).apply(part) if self.normed else self.after(part)

    def pull_back(self, z: Float[Tensor, "*#lead head d_head"], direction: Stream) -> Stream:
        """Return the direction that has with ``written`` the product of this one with ``share``."""
        if not self.normed:
            return self.after(direction)
        return freeze(self.after, self.written(z)).pull_back(direction)

    @property
    def reaching(self) -> Float[Tensor, "head d_head d_model"]:
        """``W_O`` as it reaches the stream: times the factor, or the weight of the norm without its
        scale, which is one positive number for each position."""
        if not self.normed:
            return self.after(self.out)
        return self.out * freeze(self.after, torch.ones_like(self.out[0])).gain[0]

    def change(self, z: Float[Tensor, "*#lead head d_head"], change: Stream) -> Stream:
        """Return by how much the stream changes when ``written`` changes from what it is with
        ``z``: exact, since a norm is applied anew."""
        if not self.normed:
            return self.after(change)
        whole = self.written(z)
        return self.after(whole + change) - self.after(whole)


@once
def blocks(model: TransformerBridge) -> tuple[Block, ...]:
    """Return how each block reads and writes, or refuse the model.

    What reads must read what a norm makes of the stream, the parts must sum to the stream, and
    what is changed at a part must reach what the block gives, and nothing else. For the weights of
    readers, see ``check_channels``.
    """
    run, layers = traced(model), range(model.cfg.n_layers)
    if run.twice:  # an edit there would be made twice
        _refuse(model, f"a run passes {run.twice[0]} twice")
    every = tuple(_wiring(model, layer) for layer in layers)
    stream = run.seen[f"blocks.{layers[-1]}.hook_out"]
    _require(model, run.seen[END], stream, "what the final norm reads")
    _check_paths(model, run)
    return every


def _check_paths(model: TransformerBridge, run: Trace) -> None:
    """Refuse a model in which a change does not reach what it should, or reaches more."""
    whole = run.behind(LOGITS) | {LOGITS}
    for at in (f"blocks.{layer}." for layer in range(model.cfg.n_layers)):
        parts = {at + part for part in CHANGED}
        if lost := parts - run.behind(f"{at}hook_out", f"{at}hook_in") or {END} - whole:
            _refuse(model, f"a change at {min(lost)} does not reach what follows")
    for name in (name for name in run.sources if name in whole):
        block, layer, *_ = name.split(".") if "." in name else (name, "")
        sources = {source.removeprefix(f"{block}.{layer}.") for source in run.sources[name]}
        if GATE in sources and not name.endswith(CHANGED[:3]):
            more = "heads read more of the stream than queries, keys and values do (a gate?)"
            _refuse(model, f"in layer {layer} {more}")
        if name.endswith(".hook_mlp_out") and sources != {FED}:
            _refuse(model, f"in layer {layer} something beside the MLP reads the stream (experts?)")


def _wiring(model: TransformerBridge, layer: int) -> Block:
    """Find out how one block is wired, from what passed its hooks."""
    block: Any = model.blocks[layer]
    seen = _last(model, layer)
    attn, before, attended = block.attn, seen["hook_in"], seen["hook_attn_out"]
    parallel = bool(getattr(model.cfg, "parallel_attn_mlp", False))
    stream = before if parallel else before + attended
    where = f"in layer {layer} "
    check_queries(model, seen["attn.hook_q"])
    heads_read = _fit(model, block, before, seen["attn.hook_in"], f"{where}what the heads read")
    mlp_read = _fit(model, block, stream, seen["mlp.hook_in"], f"{where}what the MLP reads")
    plain = Block(heads_read, mlp_read, parallel, attn.W_O, getattr(attn, "b_O", None))
    whole, what = plain.written(seen["attn.hook_z"]), f"{where}what the heads write"
    if gap(whole, attended) <= TOLERANCE:
        wired = plain
    elif gap((factor := _factor(whole, attended)) * whole, attended) <= TOLERANCE:
        wired = replace(plain, after=lambda stream: factor * stream)
    else:
        norm = _fit(model, block, whole, attended, what)
        freeze(norm, whole)  # or an error
        wired = replace(plain, after=norm, normed=True)
    sum_of_parts = before + attended + seen["hook_mlp_out"]
    _require(model, sum_of_parts, seen["hook_out"], f"{where}the sum of what heads and MLP write")
    return wired


def _last(model: TransformerBridge, layer: int) -> dict[str, Tensor]:
    """Return what passed the points of a layer at the last tokens of the trace."""
    seen = traced(model).seen
    return {part: seen[f"blocks.{layer}.{part}"][:, -PROBE:] for part in (*CHANGED, *READ)}


@once
def check_channels(model: TransformerBridge) -> None:
    """Refuse a model whose queries, keys and values are not what their matrices make of what the
    heads read: measures of weights, and of edges into heads, take them for this."""
    for layer in range(len(blocks(model))):
        seen = _last(model, layer)
        for channel in "qkv":
            weight = getattr(model.blocks[layer].attn, f"W_{channel.upper()}")
            bias = getattr(model.blocks[layer].attn, f"b_{channel.upper()}", None)
            states = (seen["attn.hook_in"][:, None] @ weight).transpose(1, 2)  # no copy of it
            states = states if bias is None else states + bias
            what = f"in layer {layer} the {channel} of heads"
            _require(model, states, seen[f"attn.hook_{channel}"], what)


def _fit(model: TransformerBridge, owner: Any, stream: Tensor, read: Tensor, what: str) -> Any:
    """Return the norm that makes ``read`` of ``stream``, None if they are the same; a module of
    the network is called itself, so that no hook fires."""
    if gap(stream, read) <= TOLERANCE:
        return None
    best = float("inf")
    for norm in _norms(model, owner):
        best = min(best, off := gap(norm(stream), read))
        if off <= TOLERANCE:
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


@once
def check_editable(model: TransformerBridge) -> None:
    """Refuse a model in which an edit of attention patterns, or of the scores before them, changes
    nothing: some (GPT-J, OPT) compute attention on their own, and it is shown afterwards."""
    reached = traced(model).behind(LOGITS)
    names = {f"blocks.{i}.{part}" for i in range(model.cfg.n_layers) for part in ATTENTION}
    if names - reached:
        raise IclError(
            "This model shows its attention only after using it, so editing the attention, or "
            "a gradient through it, would silently come to nothing. Use a model like GPT-2, "
            "GPT-NeoX or Llama."
        )


@once
def _unembedding(model: TransformerBridge) -> tuple[Norm, float]:
    """Return the norm before the unembedding, and the factor between what the unembedding gives and
    the logits (Cohere, Granite), 1 for most. Refuses a model whose logits are not linear in what
    this norm gives, as under a soft cap (Gemma-2): there no part of a logit is due to one head."""
    run, some = traced(model), slice(None, None, max(1, model.cfg.d_vocab // COLUMNS))
    end, normal = (run.seen[name][:, -PROBE:] for name in (END, NORMAL))
    said = run.logits[:, -PROBE:, some]
    norm = _fit(model, model, end, normal, "what the unembedding reads") or (lambda stream: stream)
    freeze(norm, end)  # or an error
    plain = normal @ model.W_U[:, some] + model.b_U[some]
    if gap(plain, said) <= TOLERANCE:
        return norm, 1.0
    factor = _factor(plain, said)
    if (off := gap(factor * plain, said)) > TOLERANCE:
        _refuse(model, "its logits are not linear in the last state (a soft cap?)", off)
    return norm, factor


def logit_direction(
    model: TransformerBridge,
    end: Float[Tensor, "*lead d_model"],
    direction: Float[Tensor, "*#lead d_model"],
) -> Float[Tensor, "*lead d_model"]:
    """Return the direction in the residual stream whose product with a part of the stream is what
    that part adds to a logit directly; ``direction`` is the logit's column of ``W_U``, or a
    difference of columns. The final norm keeps its scale at ``end``, the run's last stream."""
    norm, factor = _unembedding(model)
    return factor * freeze(norm, end).pull_back(direction)


@contextmanager
def skip_layers(
    model: TransformerBridge, layers: int, start: Float[Tensor, "batch pos d_model"]
) -> Iterator[None]:
    """Let no block below a layer compute anything: they hand on ``start``."""
    lowest = [model.blocks[layer] for layer in range(layers)]
    output = (start,) if layers and traced(model).tuples else start
    for block in lowest:
        block.__dict__["forward"] = lambda *_, **__: output
    try:
        yield
    finally:
        for block in lowest:
            del block.__dict__["forward"]


def check_queries(
    model: TransformerBridge, queries: Float[Tensor, "*lead head d_head"], what: str = "its parts"
) -> None:
    """Refuse queries that are not one for each head, as where gates stand between them
    (Qwen-3.5)."""
    if queries.shape[-2] != (heads := model.cfg.n_heads):
        why = f"its queries are not one for each of its {heads} heads (gates among them?)"
        _refuse(model, why, what=what)


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


def gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, in parts of the largest value."""
    if one.shape != other.shape:
        return float("inf")
    far, largest = (torch.linalg.vector_norm(x, torch.inf) for x in (one - other, other))
    return float(far) / max(float(largest), 1e-30)


def _factor(one: Tensor, other: Tensor) -> float:
    """Return the factor between two tensors, as near as there is one."""
    return float((one * other).sum() / one.square().sum())


def _require(model: TransformerBridge, ours: Tensor, theirs: Tensor, what: str) -> None:
    off = gap(ours, theirs)
    if not off <= TOLERANCE:
        _refuse(model, f"{what} is not what its weights give", off)


def _refuse(
    model: TransformerBridge, why: str, off: float | None = None, what: str = "its parts"
) -> NoReturn:
    size = "" if off is None else f", off by {off:.2g} of the largest value"
    kind = getattr(model.original_model.config, "model_type", "unknown")
    raise IclError(
        f"This model ({kind}) cannot be measured by {what}: {why}{size}. Its predictions, and "
        "what they lose when heads are removed, can be measured all the same."
    )
