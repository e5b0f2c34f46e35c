"""Check every measure on every architecture: python tools/architectures.py writes the table.

Each case is a small random network of an architecture, or of an option of one, that transformers
builds from its config. It is saved, loaded as a reader's folder is, and measured. What is measured
is computed once more with transformers alone. ``book/architectures.json`` has the largest
difference of each, or the sentence with which the package refuses.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from iclutils import IclError, models
from iclutils.chapters.contrastive_kernel import ablation
from iclutils.chapters.label_anchors import isolation, saliency
from iclutils.interp import at_query, graph, head_scores, hooks, patching
from iclutils.interp.clean_corrupt import CleanCorrupt
from iclutils.models import TransformerBridge
from iclutils.tasks.prompts import Prompts, Role

PAGES = Path(__file__).resolve().parents[1] / "book/architectures"  # table.json, table.md
FAULT = "traceback: "
EXACT = 1e-4  # nats: what rounding explains
COPY = 8  # random tokens of a sequence, which come twice
HEAD_OUT, EDGE_OUT = (1, 2), (0, 1)  # a head that is removed, and one whose edges are patched
MLPS = ("mlp.dense_4h_to_h", "ffn.down_proj", "mlp", "feed_forward", "block_sparse_moe", "fc2",
        "output.dense")  # fmt: skip
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "output.dense")
VOCAB, BOS = 61, 60
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
    "bos_token_id": BOS, "eos_token_id": BOS, "pad_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
HEAD = {"head_dim": 8}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip


def rotary(kind: str, **more: Any) -> dict[str, Any]:
    """Return the option of a scaling of rotary positions."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FACTOR = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
LLAMA = "llama"
# Name: type of transformers, and options beyond SIZES (None takes one away).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", {}),
    "GPT-2, untied": ("gpt2", {"tie_word_embeddings": False}),
    "GPT-2, unscaled attention": ("gpt2", {"scale_attn_weights": False}),
    "GPT-2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "GPT-2, ReLU": ("gpt2", {"activation_function": "relu"}),
    "GPT-2, cross-attention": ("gpt2", {"add_cross_attention": True}),
    "GPT-1": ("openai-gpt", {}),
    "GPT-Neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 6,
                            "num_layers": 2, "num_heads": 4}),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-NeoX, sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "GPT-NeoX, no bias of attention": ("gpt_neox", {"attention_bias": False}),
    "GPT-J": ("gptj", {"rotary_dim": 4}),
    "CodeGen": ("codegen", {"rotary_dim": 4, }),
    "GPT-BigCode": ("gpt_bigcode", {}),
    "GPT-BigCode, many keys": ("gpt_bigcode", {"multi_query": False}),
    "GPT-OSS": ("gpt_oss", GROUPED | HEAD | EXPERTS | {"sliding_window": 6}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "OPT, post-norm": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32,
                               "do_layer_norm_before": False}),
    "BLOOM": ("bloom", {"n_layer": 2, "n_head": 4}),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "Falcon": ("falcon", {"multi_query": False, "new_decoder_architecture": False}),
    "Falcon, one key": ("falcon", {"new_decoder_architecture": False}),
    "Falcon, ALiBi": ("falcon", {"multi_query": False, "new_decoder_architecture": False,
                                 "alibi": True}),
    "Falcon, sequential": ("falcon", {"multi_query": False, "new_decoder_architecture": False,
                                      "parallel_attn": False, "bias": True}),
    "Falcon-40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "XGLM": ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    "Llama": (LLAMA, {}),
    "Llama, grouped": (LLAMA, GROUPED),
    "Llama, one key": (LLAMA, {"num_key_value_heads": 1}),
    "Llama, tied": (LLAMA, GROUPED | {"tie_word_embeddings": True}),
    "Llama, biases": (LLAMA, GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "Llama, wide heads": (LLAMA, GROUPED | {"head_dim": 16}),
    "Llama, linear": (LLAMA, GROUPED | rotary("linear", factor=4.0)),
    "Llama, dynamic": (LLAMA, GROUPED | rotary("dynamic", **FACTOR)),
    "Llama, YaRN": (LLAMA, GROUPED | rotary("yarn", **FACTOR)),
    "Llama-3": (LLAMA, GROUPED | rotary("llama3", **FACTOR, **LLAMA3)),
    "Llama, LongRoPE": (LLAMA, GROUPED | rotary("longrope", **FACTOR, **LONG)),
    "Llama-4": ("llama4_text", GROUPED | HEAD | EXPERTS | {"intermediate_size_mlp": 48}),
    "Mistral": ("mistral", GROUPED | {"sliding_window": None}),
    "Mistral, window": ("mistral", GROUPED | {"sliding_window": 6}),
    "Ministral-3": ("ministral3", GROUPED | HEAD),
    "Mixtral": ("mixtral", GROUPED | EXPERTS),
    "Qwen-2": ("qwen2", GROUPED),
    "Qwen-2, window": ("qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 6,
                                           "max_window_layers": 1}),
    "Qwen-2 MoE": ("qwen2_moe", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "Qwen-3": ("qwen3", GROUPED | HEAD),
    "Qwen-3 MoE": ("qwen3_moe", GROUPED | HEAD | EXPERTS),
    "Qwen-3.5": ("qwen3_5_text", GROUPED | HEAD | {
        "layer_types": ["linear_attention", "full_attention"]}),
    "Gemma": ("gemma", GROUPED | HEAD),
    "Gemma-2": ("gemma2", GROUPED | HEAD | {"sliding_window": 6, "query_pre_attn_scalar": 8,
                                            "attn_logit_softcapping": 2.0,
                                            "final_logit_softcapping": 3.0}),
    "Gemma-3": ("gemma3_text", GROUPED | HEAD | {"sliding_window": 6}),
    "Gemma-3, linear": ("gemma3_text", GROUPED | HEAD | {"sliding_window": 6, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}}),
    "VaultGemma": ("vaultgemma", GROUPED | HEAD | {"sliding_window": 6}),
    "Phi": ("phi", {}),
    "Phi, qk-norm": ("phi", {"qk_layernorm": True}),
    "Phi-3": ("phi3", {}),
    "Phi-3, grouped": ("phi3", GROUPED),
    "Phi-3, LongRoPE": ("phi3", {"original_max_position_embeddings": 16} | rotary(
        "longrope", **LONG, partial_rotary_factor=1.0, original_max_position_embeddings=16)),
    "Phi MoE": ("phimoe", GROUPED | EXPERTS),
    "OLMo": ("olmo", {}),
    "OLMo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "OLMo-2": ("olmo2", {}),
    "OLMo-2, grouped": ("olmo2", GROUPED),
    "OLMo-3": ("olmo3", {"sliding_window": 6}),
    "OLMoE": ("olmoe", EXPERTS),
    "StableLM": ("stablelm", {}),
    "StableLM, parallel": ("stablelm", {"use_parallel_residual": True}),
    "StableLM, qk-norm": ("stablelm", {"qk_layernorm": True}),
    "StarCoder-2": ("starcoder2", GROUPED),
    "Cohere": ("cohere", GROUPED | {"logit_scale": 0.25}),
    "Cohere, qk-norm": ("cohere", {"use_qk_norm": True}),
    "Cohere-2": ("cohere2", GROUPED | HEAD | {"sliding_window": 6}),
    "GLM": ("glm", GROUPED | HEAD),
    "GLM-4": ("glm4", GROUPED | HEAD),
    "GLM-4 MoE": ("glm4_moe", GROUPED | HEAD | EXPERTS | {"n_routed_experts": 4, "n_group": 1,
                                                         "topk_group": 1}),
    "Granite": ("granite", GROUPED | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                                      "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "Granite MoE": ("granitemoe", GROUPED | EXPERTS | {"residual_multiplier": 0.4}),
    "EXAONE-4": ("exaone4", GROUPED | HEAD | {"sliding_window": 6, "sliding_window_pattern": 2}),
    "Nemotron": ("nemotron", GROUPED | HEAD),
    "SmolLM-3": ("smollm3", GROUPED),
    "Seed-OSS": ("seed_oss", GROUPED | HEAD),
    "Arcee": ("arcee", GROUPED),
    "Apertus": ("apertus", GROUPED),
    "HunYuan": ("hunyuan_v1_dense", GROUPED | HEAD),
    "ERNIE-4.5": ("ernie4_5", GROUPED | HEAD),
    "Jais-2": ("jais2", {}),
    "nanochat": ("nanochat", GROUPED),
    "BitNet": ("bitnet", GROUPED),
    "DeepSeek-V3": ("deepseek_v3", EXPERTS | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1}),
    "MiniMax-M2": ("minimax_m2", HEAD | EXPERTS),
    "ERNIE-4.5 MoE": ("ernie4_5_moe", GROUPED | HEAD | EXPERTS),
    "AFMoE": ("afmoe", GROUPED | HEAD | EXPERTS),
    "Laguna": ("laguna", GROUPED | HEAD | EXPERTS),
    "FlexOLMo": ("flex_olmo", EXPERTS),
    "JetMoE": ("jetmoe", {}),
    "InternLM-3": ("internlm3", GROUPED),
    "Persimmon": ("persimmon", {}),
    "LFM-2": ("lfm2", GROUPED),
    "Jamba": ("jamba", GROUPED | EXPERTS | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "Mamba": ("mamba", {}),
    "Mamba-2": ("mamba2", {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1}),
    "Falcon-H1": ("falcon_h1", GROUPED | {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 8}),
    "RecurrentGemma": ("recurrent_gemma", {"num_hidden_layers": 3}),
    "RWKV": ("rwkv", {}),
    "BERT": ("bert", {}),
    "RoBERTa": ("roberta", {"is_decoder": False, "pad_token_id": 1}),
    "BERT, causal": ("bert", {"is_decoder": True}),
}  # fmt: skip


def build(case: str) -> PreTrainedModel:
    """Build the random network of a case, its norms, biases and scales not trivial."""
    kind, options = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **options})
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
    """A network of transformers without our code, its attention seen and changed at the softmax."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.network = network
        named = [m for m in network.modules() if "Attention" in type(m).__name__]
        self.layers = [m for m in named if not any(x in named for x in list(m.modules())[1:])]
        self.patterns: list[Tensor] = []  # of the last run, by layer: (batch, head, dest, src)

    def __call__(
        self,
        tokens: Tensor,
        scores: dict[int, Tensor] | None = None,
        change: Callable[[Tensor], Tensor] = lambda pattern: pattern,
        head: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return log-probabilities. ``scores``: by layer, edges (batch, dest, src) whose score is
        -10,000; ``change``: what to make of each pattern; ``head``: one that writes nothing."""
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

        def silent(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            width = args[0].shape[-1] // module.heads
            z = args[0].clone()
            z[..., module.index * width : (module.index + 1) * width] = 0
            return (z, *args[1:])

        def leave(*_: Any) -> None:
            now.pop()

        handles = []
        for layer, module in enumerate(self.layers):
            enter = partial(lambda layer, *_: now.append(layer), layer)
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
        if head is not None:
            out = self._projection(self.layers[head[0]])
            config = self.network.config.get_text_config()
            out.heads, out.index = config.num_attention_heads, head[1]
            handles.append(out.register_forward_pre_hook(silent))
        functional.softmax = torch.softmax = seen
        try:
            return self.network(tokens).logits.log_softmax(-1)
        finally:
            functional.softmax = torch.softmax = softmax
            for handle in handles:
                handle.remove()

    def _projection(self, attention: nn.Module) -> nn.Module:
        """Return the matrix with which the heads of a layer write; BERT has it one module up."""
        for part in self.network.modules():
            if part is attention or attention in part.children():
                parts = dict(part.named_modules())
                found = [parts[name] for name in OUTPUTS if name in parts]
                if found:
                    return found[0]
        raise ValueError(f"no output matrix in {type(attention).__name__}")

    def edge(
        self, clean: Tensor, corrupt: Tensor, head: tuple[int, int], mlp: int | None
    ) -> Tensor:
        """Return log-probabilities of the clean sequences when what a head writes on the corrupt
        ones reaches the MLP of one layer and nothing else, or, if None, the last norm."""
        writes = [self._projection(layer) for layer in self.layers]
        mlps = [self._mlp(layer) for layer in self.layers]
        (other,) = self._watched([writes[head[0]]], corrupt, inputs=True)
        stored = dict(zip([*writes, *mlps], self._watched([*writes, *mlps], clean), strict=True))
        width = other.shape[-1] // self.network.config.get_text_config().num_attention_heads
        channels = slice(head[1] * width, (head[1] + 1) * width)

        def patched(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            z = args[0].clone()
            z.view(*other.shape)[..., channels] = other[..., channels]
            return (z, *args[1:])

        reader = None if mlp is None else mlps[mlp]
        frozen = {m: out for m, out in stored.items() if m not in (writes[head[0]], reader)}
        change = writes[head[0]].register_forward_pre_hook(patched)
        with _replaced(frozen):
            if reader is None:
                out = self(clean)
            else:
                (live,) = self._watched([reader], clean)
        change.remove()
        if reader is not None:  # from there on everything follows
            with _replaced({reader: live}):
                out = self(clean)
        return out

    def _watched(
        self, modules: list[nn.Module], tokens: Tensor, inputs: bool = False
    ) -> list[Tensor]:
        """Return what some modules give, or are given, on these tokens."""
        seen: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
            value = args[0] if inputs else out[0] if isinstance(out, tuple) else out
            seen[module] = value.clone()  # some blocks add to it in place

        handles = [module.register_forward_hook(keep) for module in modules]
        self.network(tokens)
        for handle in handles:
            handle.remove()
        return [seen[module] for module in modules]

    def _mlp(self, attention: nn.Module) -> nn.Module:
        """Return what the MLP of a layer ends with, before a norm, a factor and the residual."""
        for part in self.network.modules():
            inside = dict(part.named_modules())
            if attention in inside.values() and (names := [n for n in MLPS if n in inside]):
                layer = inside[names[0]]
        return layer


@contextmanager
def _replaced(outputs: dict[nn.Module, Tensor]) -> Iterator[None]:
    """Let modules give what they are told to."""

    def told(module: nn.Module, args: Any, out: Any) -> Any:
        new = outputs[module].clone()
        return (new, *out[1:]) if isinstance(out, tuple) else new

    handles = [module.register_forward_hook(told) for module in outputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Case:
    """One case: the network alone, its folder, and the model that the package makes of it."""

    name: str
    folder: Path
    alone: Alone
    model: TransformerBridge

    @property
    def tokens(self) -> Tensor:
        """Return two sequences of random tokens twice over, each after BOS."""
        copy = torch.randint(0, BOS, (2, COPY), generator=torch.Generator().manual_seed(0))
        return torch.cat([torch.full((2, 1), BOS), copy, copy], 1)

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


def _gap(ours: Tensor, alone: Tensor) -> float:
    """Return the largest difference; NaN counts as infinite."""
    gap = float((ours - alone).abs().max())
    return math.inf if math.isnan(gap) else gap


def predictions(case: Case) -> float:
    """Compare log p of every token."""
    ours = models.logits(case.model, case.tokens).log_softmax(-1)
    return _gap(ours, case.alone(case.tokens))


def folded(case: Case) -> float:
    """Compare log p of every token, norms folded into the weights."""
    model = models.load(case.folder, fold=True)
    return _gap(models.logits(model, case.tokens).log_softmax(-1), case.alone(case.tokens))


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
        gaps.append(_gap(logits.log_softmax(-1), out.logits.log_softmax(-1)))
    return max(gaps)


def prefix_scores(case: Case) -> float:
    """Compare the attention of the second copy to what followed the first."""
    ours = head_scores.score_heads(case.model, case.tokens, COPY)["prefix"]
    case.alone(case.tokens)
    rows = torch.arange(COPY + 1, 2 * COPY + 1)
    alone = [p[:, :, rows, rows - COPY + 1].mean(-1) for p in case.alone.patterns]
    return _gap(ours, torch.stack(alone, 1))


def head_removed(case: Case) -> float:
    """Compare log p without one head of the second layer, every token."""
    out, _ = hooks.run_with_hooks(case.model, case.tokens, _silent(case))
    return _gap(out.log_softmax(-1), case.alone(case.tokens, head=HEAD_OUT))


def head_removed_in_a_sweep(case: Case) -> float:
    """Compare the same where the layers below are run once for many heads."""
    (out,) = hooks.logits_under(case.model, case.tokens, [_silent(case)])
    return _gap(out.log_softmax(-1), case.alone(case.tokens, head=HEAD_OUT))


def _silent(case: Case) -> list[hooks.Hook]:
    return hooks.ablate_heads(case.model, case.tokens, [HEAD_OUT], "zero", case.tokens)


def label_saliency(case: Case) -> float:
    """Compare the saliency of every edge, relative to the largest."""
    prompts = case.prompts
    ours = saliency.saliency(case.model, prompts)
    with torch.enable_grad():
        out = case.alone(prompts.tokens, change=_differentiable)
        scores = out[:, -1].gather(1, prompts.label_words)
        loss = functional.cross_entropy(scores, prompts.gold, reduction="sum")
        slopes = torch.autograd.grad(loss, case.alone.patterns)
    size = prompts.tokens.shape[1]
    parts = [(s * p).sum(1)[..., :size] for s, p in zip(slopes, case.alone.patterns, strict=True)]
    alone = torch.stack(parts, 1).abs()
    return _gap(ours, alone) / max(1.0, float(alone.max()))


def _differentiable(pattern: Tensor) -> Tensor:
    return pattern if pattern.requires_grad else pattern.requires_grad_()


def labels_cut(case: Case) -> float:
    """Compare log p at the target, label words cut off in the first layer."""
    prompts = case.prompts
    edges = isolation.cut_edges(prompts)
    cut = hooks.cut_attention(case.model, {0: edges})
    out, _ = hooks.run_with_hooks(case.model, prompts.tokens, cut)
    alone = case.alone(prompts.tokens, scores={0: edges})
    return _gap(out[:, -1].log_softmax(-1), alone[:, -1])


def without_updates(case: Case) -> float:
    """Compare log p of the answer when no head takes its step on the first copy."""
    tokens, shown = case.tokens, torch.zeros(case.tokens.shape, dtype=torch.bool)
    shown[:, 1 : COPY + 1] = True
    query = at_query.read(case.model, tokens)
    answer = tokens[:, COPY]
    ours = ablation.ablations(query, shown, answer, ways=["no update"])["no update"].log_prob

    def change(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        last = pattern.view(len(tokens), -1, *pattern.shape[-2:])[:, :, -1]
        last[..., : tokens.shape[1]].masked_fill_(shown[:, None], 0.0)
        return pattern

    return _gap(ours, case.alone(tokens, change=change)[:, -1].gather(1, answer[:, None])[:, 0])


def edge_to_mlp(case: Case) -> float:
    """Compare the nats lost when what a head writes reaches one MLP corrupt."""
    return _edge(case, graph.Node("mlp_in", 1))


def edge_to_logits(case: Case) -> float:
    """Compare the nats lost when what a head writes reaches the unembedding corrupt."""
    return _edge(case, graph.Node("logits"))


def _edge(case: Case, reader: graph.Node) -> float:
    clean, at = case.tokens, case.tokens.shape[1] - 1
    corrupt = torch.cat([clean[:, :1], (clean[:, 1:] + 7) % BOS], 1)
    answer = clean[:, COPY : COPY + 1]
    task = CleanCorrupt(clean, corrupt, torch.full((2, 1), at), answer)
    edge = graph.head(*EDGE_OUT), reader
    ours = patching.path_patching(case.model, task, [edge])[graph.of(case.model).index(edge)]
    layer = None if reader.layer < 0 else reader.layer
    runs = case.alone(clean), case.alone.edge(clean, corrupt, EDGE_OUT, layer)
    whole, without = (run[:, -1].gather(1, answer)[:, 0] for run in runs)
    return _gap(ours, whole - without)


MEASURES: dict[str, Callable[[Case], float]] = {
    "predictions": predictions,
    "with a cache": with_a_cache,
    "folded": folded,
    "prefix scores (01)": prefix_scores,
    "a head removed (01)": head_removed,
    "in a sweep (06)": head_removed_in_a_sweep,
    "saliency (02)": label_saliency,
    "labels cut (02)": labels_cut,
    "no updates (05)": without_updates,
    "edge to an MLP (06)": edge_to_mlp,
    "edge to the logits (06)": edge_to_logits,
}


def measure(name: str) -> dict[str, float | str]:
    """Return the largest difference of each measure on a case, or the sentence that refuses it."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        alone = Alone(save(name, Path(folder)))
        try:
            case = Case(name, Path(folder), alone, models.load(folder))
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
    """Whether a cell is a refusal, or a difference that rounding explains."""
    return not value.startswith(FAULT) if isinstance(value, str) else value <= EXACT


def table(rows: dict[str, dict[str, float | str]]) -> str:
    """Return the rows as a table in Markdown, and the reasons of the refusals below it."""
    reasons = list(dict.fromkeys(x for row in rows.values() for x in row.values() if _is_text(x)))
    lines = ["| architecture | " + " | ".join(MEASURES) + " |", "|---" * (len(MEASURES) + 1) + "|"]
    for name, row in rows.items():
        cells = [
            f"refused {reasons.index(x) + 1}" if _is_text(x) else _shown(x) for x in row.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    numbered = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", "Refused, because:", "", *numbered, ""])


def _shown(gap: float) -> str:
    return f"{gap:.0e}" if is_exact(gap) else f"**wrong by {gap:.2g}**"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def main() -> int:
    """Measure the named cases, or all, and write the table; 1 if a difference is no rounding."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("cases", nargs="*", help="such as GPT-2; all if omitted")
    names = cli.parse_args().cases or list(CASES)
    path = PAGES / "table.json"
    stored = json.loads(path.read_text())["rows"] if path.is_file() else {}
    for name in names:
        stored[name] = measure(name)
        wrong = {what: x for what, x in stored[name].items() if not is_exact(x)}
        print(f"{name:<32} {wrong or 'exact or refused'}", flush=True)
    rows = {name: stored[name] for name in CASES if name in stored}
    libraries = {x: version(x) for x in ("transformers", "transformer-lens", "torch")}
    PAGES.mkdir(exist_ok=True)
    stored = {"versions": libraries, "rows": rows}
    (PAGES / "table.json").write_text(json.dumps(stored, indent=1) + "\n")
    (PAGES / "table.md").write_text(table(rows))
    return int(not all(is_exact(x) for row in rows.values() for x in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
