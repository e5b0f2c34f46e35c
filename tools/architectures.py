"""Check every measure on every architecture: python tools/architectures.py writes the table.

Each case of ``book/architectures/cases.yml`` is a small random network of an architecture, or of an
option of one, that transformers builds from its config. It is saved, loaded as a reader's folder
is, and measured. What is measured is computed once more with transformers alone. ``table.json`` has
the largest difference of each, or the sentence with which the package refuses.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from iclutils import IclError, models
from iclutils.chapters.contrastive_kernel import ablation, heads
from iclutils.chapters.label_anchors import isolation, saliency
from iclutils.interp import at_query, circuit, graph, head_scores, hooks
from iclutils.interp.attribution import direct_logits
from iclutils.interp.clean_corrupt import CleanCorrupt
from iclutils.models import TransformerBridge
from iclutils.tasks.prompts import Prompts, Role

PAGES = Path(__file__).resolve().parents[1] / "book/architectures"  # cases.yml, table.json and .md
LISTED = yaml.safe_load((PAGES / "cases.yml").read_text(encoding="utf-8"))
CASES, SIZES = LISTED["networks"], LISTED["sizes"]
BOS = SIZES["bos_token_id"]
FAULT = "traceback: "
EXACT = 1e-4  # nats: what rounding explains
COPY = 8  # random tokens of a sequence, which come twice
HEAD_OUT, HEAD_IN = (1, 2), (0, 1)  # a head that is removed, and one whose edges are patched
MLPS = ("mlp.dense_4h_to_h", "ffn.down_proj", "mlp", "feed_forward", "block_sparse_moe", "fc2",
        "output.dense")  # fmt: skip
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "Wo", "output.dense")
Edit = Callable[[tuple[Any, ...], Any], Any]  # what a module is given and gives; its new output


def build(case: str) -> PreTrainedModel:
    """Build the random network of a case, its norms, biases and scales not trivial."""
    options = dict(CASES[case])
    torch.manual_seed(0)
    config = AutoConfig.for_model(options.pop("type"), **{**SIZES, **options})
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in network.parameters():
            noise = 0.3 * torch.randn_like(weight)
            weight.copy_(weight + noise if weight.ndim == 1 else noise)
    return network


def save(case: str, folder: Path) -> PreTrainedModel:
    """Build a case and write it to a folder, as ``save_pretrained`` does."""
    network = build(case)
    network.save_pretrained(folder)
    return network


class Alone:
    """A network of transformers without our code, its modules seen and changed by plain hooks, its
    attention at the softmax."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.network, self.config = network, network.config.get_text_config()
        named = [m for m in network.modules() if "Attention" in type(m).__name__]
        self.layers = [m for m in named if not any(x in named for x in list(m.modules())[1:])]
        self.patterns: list[Tensor] = []  # of the last run, by layer: (batch, head, dest, src)

    def __call__(
        self,
        tokens: Tensor,
        scores: Mapping[int, Tensor] | None = None,
        change: Callable[[Tensor], Tensor] = lambda pattern: pattern,
        edits: Mapping[nn.Module, Edit] | None = None,
    ) -> Tensor:
        """Return log-probabilities. ``scores``: by layer, edges (batch, dest, src) whose score is
        -10,000; ``change``: what to make of each pattern; ``edits``: of what modules give."""
        self.patterns, now = [], list[int]()
        softmax = functional.softmax

        def seen(values: Tensor, *args: Any, **named: Any) -> Tensor:
            if not now:  # of a router of experts
                return softmax(values, *args, **named)
            layer, shape = now[-1], values.shape
            values = values.view(len(tokens), -1, *shape[-2:])
            if scores and layer in scores:  # a sink, if there is one, stands in a last column
                more = shape[-1] - tokens.shape[1]
                edges = functional.pad(scores[layer], (0, more))[:, None]
                values = values.masked_fill(edges, -10_000.0)
            pattern = change(softmax(values, *args, **named))
            self.patterns.append(pattern)
            return pattern.view(shape)

        def leave(*_: Any) -> None:
            now.pop()

        handles = []
        for layer, module in enumerate(self.layers):
            enter = partial(lambda layer, *_: now.append(layer), layer)
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
        functional.softmax = torch.softmax = seen
        try:
            with _edited(edits or {}):
                return self.network(tokens).logits.log_softmax(-1)
        finally:
            functional.softmax = torch.softmax = softmax
            for handle in handles:
                handle.remove()

    def writer(self, layer: int) -> nn.Module:
        """Return the matrix with which the heads of a layer write; BERT has it one module up."""
        for part in self.network.modules():
            if part is self.layers[layer] or self.layers[layer] in part.children():
                parts = dict(part.named_modules())
                if found := [parts[name] for name in OUTPUTS if name in parts]:
                    return found[0]
        raise ValueError(f"no output matrix in {type(self.layers[layer]).__name__}")

    def mlp(self, layer: int) -> nn.Module:
        """Return what the MLP of a layer ends with, before a norm, a factor and the residual."""
        for part in self.network.modules():
            inside = dict(part.named_modules())
            own = self.layers[layer] in inside.values()
            if own and (names := [n for n in MLPS if n in inside]):
                last = inside[names[0]]
        return last

    def with_z(self, head: tuple[int, int], new: Tensor) -> dict[nn.Module, Edit]:
        """Return the edit that puts (batch, pos, d_head) in the place of what a head hands on."""
        writer = self.writer(head[0])

        def edit(args: tuple[Any, ...], out: Any) -> Any:
            z = args[0].clone()
            own = z.shape[-1] // self.config.num_attention_heads
            z.view(*new.shape[:2], -1)[..., head[1] * own : (head[1] + 1) * own] = new
            return writer.forward(z, *args[1:])

        return {writer: edit}

    def z(self, tokens: Tensor, head: tuple[int, int]) -> Tensor:
        """Return what a head hands on to its output matrix: (batch, pos, d_head)."""
        ((given, _),) = self.watch(tokens, [self.writer(head[0])]).values()
        whole = given.view(*tokens.shape, self.config.num_attention_heads, -1)
        return whole[:, :, head[1]]

    def watch(
        self, tokens: Tensor, modules: Sequence[nn.Module], edits: Mapping[nn.Module, Edit] = {}
    ) -> dict[nn.Module, tuple[Tensor, Tensor]]:
        """Return what some modules are given and give on these tokens, in the order of calls."""
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

        def keep(module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
            value = out[0] if isinstance(out, tuple) else out
            if args and isinstance(value, Tensor):  # some blocks add to it in place
                seen[module] = args[0].clone(), value.clone()

        with _edited(edits):
            handles = [module.register_forward_hook(keep) for module in modules]
            self.network(tokens)
            for handle in handles:
                handle.remove()
        return seen

    def path(self, clean: Tensor, corrupt: Tensor, reader: nn.Module | None) -> Tensor:
        """Return log-probabilities of the clean sequences when what a head and the first MLP write
        on the corrupt ones reaches the module that ends with ``reader``, and nothing else; or, if
        None, what one head writes reaches the last norm."""
        writes = [part(la) for la in range(len(self.layers)) for part in (self.writer, self.mlp)]
        patch = self.with_z(HEAD_IN, self.z(corrupt, HEAD_IN))
        if reader is not None:
            ((_, other),) = self.watch(corrupt, [self.mlp(0)]).values()
            patch |= {self.mlp(0): _gives(other)}
        stored = {m: _gives(out) for m, (_, out) in self.watch(clean, writes).items()}
        held = {m: edit for m, edit in stored.items() if m is not reader} | patch
        if reader is None:
            return self(clean, edits=held)
        ((_, live),) = self.watch(clean, [reader], held).values()
        return self(clean, edits={reader: _gives(live)})  # from there on everything follows

    def direct(self, tokens: Tensor, answer: Tensor) -> Tensor:
        """Return what each head adds directly to the answer's logit over the mean of all, (head,
        batch), at the last token: norms and logits are linear at what they are in the run."""
        leaves = [m for m in self.network.modules() if not list(m.children())]
        calls, unembed = self.watch(tokens, leaves), self.network.get_output_embeddings()
        normal, plain = calls[unembed]
        final, (end, _) = next((m, x) for m, x in calls.items() if _same(x[1], normal))
        shift = (final.forward(end) + final.forward(-end)) / 2  # the bias
        layer_norm = bool((final.forward(end + 1) - normal).abs().max() < EXACT)

        def centred(stream: Tensor) -> Tensor:
            return stream - stream.mean(-1, keepdim=True) if layer_norm else stream

        gain, factor = (normal - shift) / centred(end), self.network(tokens).logits / plain
        unembedding, parts = unembed.weight * factor[0, -1, 0], []
        for layer in range(len(self.layers)):
            writer = self.writer(layer)
            given, wrote = calls[writer]
            reached = [out for x, out in calls.values() if _same(x, wrote)] or [wrote]
            passed = getattr(self.config, "residual_multiplier", 1.0) * reached[-1] / wrote
            weight = writer.weight if isinstance(writer, Conv1D) else writer.weight.T
            for z, w in zip(*(x.chunk(4, d) for x, d in ((given, -1), (weight, 0))), strict=True):
                added = (centred(z @ w * passed) * gain)[:, -1] @ unembedding.T
                parts.append(added.gather(1, answer)[:, 0] - added.mean(1))
        return torch.stack(parts)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _gives(value: Tensor) -> Edit:
    """Return the edit by which a module gives a value, whatever it is given."""
    return lambda args, out: (value.clone(), *out[1:]) if isinstance(out, tuple) else value.clone()


@contextmanager
def _edited(edits: Mapping[nn.Module, Edit]) -> Iterator[None]:
    """Let modules give what their edits make of what they are given and give."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return edits[module](args, out)

    handles = [module.register_forward_hook(hook) for module in edits]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Case:
    """One case: the network alone, its folder, and the model that the package makes of it."""

    folder: Path
    alone: Alone
    model: TransformerBridge

    @classmethod
    def of(cls, name: str, folder: Path) -> Case:
        """Save a case to a folder and load it from there; networks do without gradients."""
        alone = Alone(save(name, folder).requires_grad_(False))
        return cls(folder, alone, models.load(folder))

    @property
    def tokens(self) -> Tensor:
        """Return two sequences of random tokens twice over, each after BOS."""
        copy = torch.randint(0, BOS, (2, COPY), generator=torch.Generator().manual_seed(0))
        return torch.cat([torch.full((2, 1), BOS), copy, copy], 1)

    @property
    def task(self) -> CleanCorrupt:
        """Return them with others of other tokens; the answer is what followed the first copy."""
        clean = self.tokens
        corrupt = torch.cat([clean[:, :1], (clean[:, 1:] + 7) % BOS], 1)
        last = torch.full((2, 1), clean.shape[1] - 1)
        return CleanCorrupt(clean, corrupt, last, clean[:, COPY : COPY + 1])

    @property
    def prompts(self) -> Prompts:
        """Return them as prompts of two demonstrations, whose second label word comes last."""
        tokens, place = self.tokens.clone(), torch.tensor([[4, 8], [5, 9]])
        words = torch.tensor([[1, 2], [3, 4]])
        tokens = tokens.scatter(1, place, words)
        roles = torch.full_like(tokens, Role.TEXT)
        roles.scatter_(1, place, int(Role.LABEL))
        roles[:, 10:] = Role.QUERY
        target = torch.full((2,), tokens.shape[1] - 1)
        order, gold = torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 1])
        return Prompts(tokens, roles, target, place, place - 1, order, gold, words)

    @property
    def shown(self) -> Tensor:
        """Mark the first copy."""
        place = torch.arange(2 * COPY + 1)
        return ((place > 0) & (place <= COPY)).expand(2, -1)


def gap(ours: Tensor, alone: Tensor) -> float:
    """Return the largest difference; NaN counts as infinite."""
    largest = float((ours - alone).abs().max())
    return math.inf if math.isnan(largest) else largest


def predictions(case: Case) -> float:
    """Compare log p of every token."""
    ours = models.logits(case.model, case.tokens).log_softmax(-1)
    return gap(ours, case.alone(case.tokens))


def folded(case: Case) -> float:
    """Compare log p of every token, norms folded into the weights."""
    return predictions(replace(case, model=models.load(case.folder, fold=True)))


def with_a_cache(case: Case) -> float:
    """Compare log p of the last tokens, read one by one on what is stored of the others."""
    if "past_key_values" not in signature(case.alone.network.forward).parameters:
        raise IclError("In transformers this architecture stores no keys and values.")
    begun, last = case.tokens[:, :-4], case.tokens[:, -4:]
    _, past = case.model(begun, use_cache=True, return_type="logits_and_cache")
    out = case.alone.network(begun, use_cache=True)
    gaps = []
    for token in last.split(1, 1):
        logits, past = case.model(
            token, past_key_values=past, use_cache=True, return_type="logits_and_cache"
        )
        out = case.alone.network(token, past_key_values=out.past_key_values, use_cache=True)
        gaps.append(gap(logits.log_softmax(-1), out.logits.log_softmax(-1)))
    return max(gaps)


def prefix_scores(case: Case) -> float:
    """Compare the attention of the second copy to what followed the first."""
    ours = head_scores.score_heads(case.model, case.tokens, COPY)["prefix"]
    case.alone(case.tokens)
    rows = torch.arange(COPY + 1, 2 * COPY + 1)
    alone = [p[:, :, rows, rows - COPY + 1].mean(-1) for p in case.alone.patterns]
    return gap(ours, torch.stack(alone, 1))


def head_removed(case: Case, sweep: bool = False) -> float:
    """Compare log p without one head of the second layer, every token; in a ``sweep`` the layers
    below are run once for many heads."""
    zero = hooks.ablate_heads(case.model, case.tokens, [HEAD_OUT], "zero", case.tokens)
    if sweep:
        (out,) = hooks.logits_under(case.model, case.tokens, [zero])
    else:
        out, _ = hooks.run_with_hooks(case.model, case.tokens, zero)
    nothing = torch.zeros_like(case.alone.z(case.tokens, HEAD_OUT))
    edits = case.alone.with_z(HEAD_OUT, nothing)
    return gap(out.log_softmax(-1), case.alone(case.tokens, edits=edits))


def label_saliency(case: Case) -> float:
    """Compare the saliency of every edge, relative to the largest."""
    prompts = case.prompts
    ours = saliency.saliency(case.model, prompts)

    def differentiable(pattern: Tensor) -> Tensor:
        return pattern if pattern.requires_grad else pattern.requires_grad_()

    with torch.enable_grad():
        out = case.alone(prompts.tokens, change=differentiable)
        scores = out[:, -1].gather(1, prompts.label_words)
        loss = functional.cross_entropy(scores, prompts.gold, reduction="sum")
        slopes = torch.autograd.grad(loss, case.alone.patterns)
    size = prompts.tokens.shape[1]
    parts = [(s * p).sum(1)[..., :size] for s, p in zip(slopes, case.alone.patterns, strict=True)]
    alone = torch.stack(parts, 1).abs()
    return gap(ours, alone) / max(1.0, float(alone.max()))


def labels_cut(case: Case) -> float:
    """Compare log p at the target, label words cut off in the first layer."""
    prompts = case.prompts
    edges = isolation.cut_edges(prompts)
    cut = hooks.cut_attention(case.model, {0: edges})
    out, _ = hooks.run_with_hooks(case.model, prompts.tokens, cut)
    alone = case.alone(prompts.tokens, scores={0: edges})
    return gap(out[:, -1].log_softmax(-1), alone[:, -1])


def without_updates(case: Case) -> float:
    """Compare log p of the answer when no head takes its step on the first copy."""
    tokens, answer = case.tokens, case.task.answer
    query = at_query.read(case.model, tokens)
    found = ablation.ablations(query, case.shown, answer[:, 0], ways=["no update"])

    def change(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        last = pattern.view(len(tokens), -1, *pattern.shape[-2:])[:, :, -1]
        last[..., : tokens.shape[1]].masked_fill_(case.shown[:, None], 0.0)
        return pattern

    alone = case.alone(tokens, change=change)[:, -1].gather(1, answer)
    return gap(found["no update"].log_prob, alone[:, 0])


def learned(case: Case) -> float:
    """Compare what every head adds directly to the answer's logit, its start and its update."""
    query, everything = at_query.read(case.model, case.tokens), torch.arange(BOS + 1)[None]
    duals, answer = heads.dual_heads(query, case.shown), case.task.answer
    found = heads.direct_logit_attribution(query, duals, answer[:, 0], everything)
    ours = (found.start + found.update).flatten(1).T
    return gap(ours, case.alone.direct(case.tokens, answer))


def direct_effects(case: Case) -> float:
    """Compare what every head adds directly to the answer's logit."""
    every = graph.model_graph(case.model).writers
    own = torch.tensor([node.kind == "head" for node in every])
    ours = direct_logits(case.model, case.task)[own]
    return gap(ours, case.alone.direct(case.tokens, case.task.answer))


def edges(case: Case, kinds: str) -> float:
    """Compare log p of the answer when what a head and the first MLP write reaches the heads of the
    second layer (``qkv``) or its MLP (``mlp_in``) corrupt, or what the head writes the logits."""
    task, nodes = case.task, graph.model_graph(case.model)
    readers = [v for v in nodes.readers if v.kind in kinds and v.layer in (-1, 1)]
    writers = [graph.head(*HEAD_IN), graph.Node("mlp", 0)][: 1 if kinds == "logits" else 2]
    kept = nodes.exists & ~nodes.mask((u, v) for u in writers for v in readers)
    ours = circuit.scores(case.model, task, kept[None])[0]
    last = {"qkv": case.alone.writer, "mlp_in": case.alone.mlp}
    reader = last[kinds](1) if kinds in last else None
    alone = case.alone.path(task.clean, task.corrupt, reader)[:, -1].gather(1, task.answer)
    return gap(ours, alone[:, 0])


MEASURES: dict[str, Callable[[Case], float]] = {
    "predictions": predictions,
    "with a cache": with_a_cache,
    "folded": folded,
    "prefix scores (01)": prefix_scores,
    "a head removed (01)": head_removed,
    "in a sweep (06)": partial(head_removed, sweep=True),
    "saliency (02)": label_saliency,
    "labels cut (02)": labels_cut,
    "no updates (05)": without_updates,
    "what heads learn (05)": learned,
    "direct effects (06)": direct_effects,
    "edges to heads (06)": partial(edges, kinds="qkv"),
    "edges to an MLP (06)": partial(edges, kinds="mlp_in"),
    "edge to the logits (06)": partial(edges, kinds="logits"),
}


def measure(name: str) -> dict[str, float | str]:
    """Return the largest difference of each measure on a case, or the sentence that refuses it."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            case = Case.of(name, Path(folder))
        except IclError as error:
            return dict.fromkeys(MEASURES, _sentence(error, folder))
        row: dict[str, float | str] = {}
        for what, compare in MEASURES.items():
            try:
                row[what] = compare(case)
            except IclError as error:
                row[what] = _sentence(error, folder)
            except Exception as error:  # what should have been a sentence
                row[what] = f"{FAULT}{type(error).__name__}: {error}"
        return row


def _sentence(error: IclError, folder: str) -> str:
    """Return the sentence of a refusal, the same for every folder."""
    text = str(error).replace(repr(folder), "this model").replace(folder, "this model")
    return text[:1].upper() + text[1:]


def is_exact(value: float | str) -> bool:
    """Tell whether a cell is a refusal, or a difference that rounding explains."""
    return not value.startswith(FAULT) if isinstance(value, str) else value <= EXACT


def table(rows: dict[str, dict[str, float | str]]) -> str:
    """Return the rows as a table in Markdown, and the reasons of the refusals below it."""
    cells = [x for row in rows.values() for x in row.values()]
    reasons = list(dict.fromkeys(x for x in cells if isinstance(x, str)))
    lines = ["| architecture | " + " | ".join(MEASURES) + " |", "|---" * (len(MEASURES) + 1) + "|"]

    def written(x: float | str) -> str:
        if isinstance(x, str):
            return f"refused {reasons.index(x) + 1}"
        return f"{x:.0e}" if is_exact(x) else f"**wrong by {x:.2g}**"

    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(map(written, row.values())) + " |")
    numbered = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", "Refused, because:", "", *numbered, ""])


def main() -> int:
    """Measure the named cases, or all, and write the table; 1 if a difference is no rounding."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("cases", nargs="*", help="such as GPT-2; all if omitted")
    names = cli.parse_args().cases or list(CASES)
    path = PAGES / "table.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else {}
    for name in names:
        rows[name] = measure(name)
        wrong = {what: x for what, x in rows[name].items() if not is_exact(x)}
        print(f"{name:<32} {wrong or 'exact or refused'}", flush=True)
    rows = {name: rows[name] for name in CASES if name in rows}
    libraries = {x: version(x) for x in ("transformers", "transformer-lens", "torch")}
    path.write_text(json.dumps({"versions": libraries, "rows": rows}, indent=1) + "\n")
    (PAGES / "table.md").write_text(table(rows))
    return int(not all(is_exact(x) for row in rows.values() for x in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
