"""Parts of networks of many architectures, beside Hugging Face's own modules with plain hooks of
torch, in float64: what they write is patched, and its change reaches one reader alone."""

from dataclasses import dataclass
from functools import partial
from inspect import signature

import pytest
import torch
import transformers as hf
from tiny import CONTEXT, VOCAB, a_task

from iclutils import models
from iclutils.chapters import gpt2_induction
from iclutils.chapters.attention_circuits.interactions import direct_logits
from iclutils.chapters.contrastive_kernel import heads
from iclutils.errors import IclError
from iclutils.interp import at_query, attribution, circuit, hooks, invariants, patching
from iclutils.interp.clean_corrupt import CleanCorrupt
from iclutils.interp.graph import Node, all_heads, head, of
from iclutils.tasks.repeated import repeated_tokens

pytestmark = pytest.mark.slow
HEADS, WIDTH, TARGET = 4, 8, 2
TOKENS = {"vocab_size": VOCAB, "bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1}
BODY = {**TOKENS, "hidden_size": HEADS * WIDTH}
SIZES = {
    **BODY,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
}
OLD = {
    **TOKENS,
    "n_embd": HEADS * WIDTH,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": CONTEXT,
}
EVERY = {**SIZES, "num_key_value_heads": HEADS}  # no groups of heads
SQUARE = {**EVERY, "head_dim": WIDTH}


@dataclass
class Kind:
    """Where the parts of an architecture are. ``qkv``: three matrices, or one, whose rows are cut
    as its name says. ``norms``: before heads and MLP; ``after``: whose output reaches the stream.
    """

    config: object
    blocks: str = "model.layers"
    attn: str = "self_attn"
    out: str = "o_proj"
    qkv: str = "q_proj k_proj v_proj"
    norms: tuple = ("input_layernorm", "post_attention_layernorm")
    mlp: str = "mlp"
    after: str = ""
    final: str = "model.norm"
    factor: float = 1.0
    parallel: bool = False


GPT = partial(Kind, blocks="transformer.h", attn="attn", final="transformer.ln_f")
FALCON = partial(
    GPT,
    attn="self_attention",
    out="dense",
    qkv="query_key_value: head part",
    norms=(
        "input_layernorm",
        "input_layernorm",
    ),
)
NEOX = partial(
    Kind,
    blocks="gpt_neox.layers",
    attn="attention",
    out="dense",
    qkv="query_key_value: head part",
    final="gpt_neox.final_layer_norm",
)
SANDWICH = ("input_layernorm", "pre_feedforward_layernorm")
AFTER = "post_attention_layernorm"
COHERE = {"norms": ("input_layernorm",) * 2, "parallel": True}
KINDS = {
    "gpt2": GPT(
        hf.GPT2Config(**OLD), out="c_proj", qkv="c_attn: part head", norms=("ln_1", "ln_2")
    ),
    "llama": Kind(hf.LlamaConfig(**EVERY)),
    "mistral": Kind(hf.MistralConfig(**SQUARE, sliding_window=None)),
    "qwen3": Kind(hf.Qwen3Config(**SQUARE)),
    "granite": Kind(
        hf.GraniteConfig(
            **EVERY,
            residual_multiplier=0.3,
            attention_multiplier=0.4,
            logits_scaling=2.0,
            embedding_multiplier=3.0,
        ),
        factor=0.3,
    ),
    "gemma2": Kind(
        hf.Gemma2Config(**SQUARE, query_pre_attn_scalar=6, final_logit_softcapping=5.0),
        norms=SANDWICH,
        after=AFTER,
    ),
    "gemma3": Kind(
        hf.Gemma3TextConfig(**SQUARE, query_pre_attn_scalar=WIDTH), norms=SANDWICH, after=AFTER
    ),
    "glm4": Kind(hf.Glm4Config(**SQUARE), after="post_self_attn_layernorm"),
    "olmo": Kind(hf.OlmoConfig(**EVERY)),
    "olmo2": Kind(hf.Olmo2Config(**EVERY), norms=("", ""), after=AFTER),
    "exaone4": Kind(
        hf.Exaone4Config(**EVERY, sliding_window=None, layer_types=["full_attention"] * 2),
        norms=("", ""),
        after=AFTER,
    ),
    "phi": Kind(hf.PhiConfig(**SIZES), out="dense", final="model.final_layernorm", **COHERE),
    "cohere": Kind(hf.CohereConfig(**EVERY, logit_scale=0.25), **COHERE),
    "cohere2": Kind(hf.Cohere2Config(**EVERY, logit_scale=0.25), **COHERE),
    "stablelm": Kind(hf.StableLmConfig(**EVERY)),
    "stablelm, parallel": Kind(hf.StableLmConfig(**EVERY, use_parallel_residual=True), **COHERE),
    "stablelm, normed": Kind(hf.StableLmConfig(**EVERY, qk_layernorm=True, use_qkv_bias=True)),
    "falcon, alibi": FALCON(
        hf.FalconConfig(**SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True),
        norms=("input_layernorm", "post_attention_layernorm"),
    ),
    "falcon": FALCON(
        hf.FalconConfig(**SIZES, multi_query=False, parallel_attn=True, bias=True), parallel=True
    ),
    "codegen": GPT(
        hf.CodeGenConfig(**OLD, rotary_dim=4),
        out="out_proj",
        qkv="qkv_proj: codegen",
        norms=("ln_1",) * 2,
        parallel=True,
    ),
    "gptj": GPT(
        hf.GPTJConfig(**OLD, rotary_dim=4), out="out_proj", norms=("ln_1",) * 2, parallel=True
    ),
    "gpt_neo": GPT(
        hf.GPTNeoConfig(**BODY, num_layers=2, num_heads=HEADS, attention_types=[[["global"], 2]]),
        attn="attn.attention",
        out="out_proj",
        norms=("ln_1", "ln_2"),
    ),
    "bloom": FALCON(
        hf.BloomConfig(**BODY, n_layer=2, n_head=HEADS),
        norms=("input_layernorm", "post_attention_layernorm"),
    ),
    "gpt_oss": Kind(
        hf.GptOssConfig(
            **SQUARE,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["full_attention"] * 2,
        )
    ),
    "mixtral": Kind(
        hf.MixtralConfig(**EVERY, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "opt": Kind(
        hf.OPTConfig(**{**SIZES, "pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=HEADS * WIDTH),
        blocks="model.decoder.layers",
        out="out_proj",
        mlp="fc1",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        final="model.decoder.final_layer_norm",
    ),
    "gpt_neox": NEOX(hf.GPTNeoXConfig(**SIZES, use_parallel_residual=False)),
    "gpt_neox, parallel": NEOX(hf.GPTNeoXConfig(**SIZES), parallel=True),
    "mpt": Kind(
        hf.MptConfig(
            vocab_size=VOCAB,
            d_model=HEADS * WIDTH,
            n_layers=2,
            n_heads=HEADS,
            expansion_ratio=2,
            max_seq_len=CONTEXT,
            bos_token_id=VOCAB - 1,
        ),
        blocks="transformer.blocks",
        attn="attn",
        out="out_proj",
        qkv="Wqkv: part head",
        norms=("norm_1", "norm_2"),
        mlp="ffn",
        final="transformer.norm_f",
    ),
}
EVERY_DAY = {"gpt2", "granite", "gemma2", "exaone4", "phi", "falcon, alibi", "bloom"}
CAPPED = {"gemma2"}  # no part of a logit is due to one head
OTHER_SCORES = {  # no dual models: rotated in pairs, other factors or caps, slopes, windows, sinks
    *(
        "granite",
        "gemma2",
        "gemma3",
        "glm4",
        "olmo2",
        "cohere",
        "cohere2",
        "stablelm, normed",
        "mpt",
    ),
    *("falcon, alibi", "codegen", "gptj", "gpt_neo", "bloom", "gpt_oss", "opt"),
}
parametrized = pytest.mark.parametrize(
    "both",
    [pytest.param(k, marks=() if k in EVERY_DAY else pytest.mark.nightly) for k in KINDS],
    indirect=True,
)


def part(owner, path):
    return owner.get_submodule(path) if path else None


class Truth:
    """A network in float64: what its parts write, and what a change of one reader's input does."""

    def __init__(self, network, kind, folder):
        self.network, self.kind = network.eval().requires_grad_(False), kind
        self.folder = folder
        if not hasattr(network.config, "num_local_experts"):  # routers are float32
            self.network.double()
        self.blocks = part(network, kind.blocks)
        self.attn = [part(block, kind.attn) for block in self.blocks]

    def run(self, tokens, edits=(), record=()):
        """Logits, and inputs and outputs of the modules to record, under (module, edit) pairs: an
        edit gets input and output and returns a new output."""
        seen, handles = {}, []
        for module, edit in edits:
            hook = partial(self._edit, edit)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        for module in record:
            handles.append(module.register_forward_hook(partial(self._store, seen)))
        logits = self.network(tokens, use_cache=False).logits
        for handle in handles:
            handle.remove()
        return logits, seen

    @staticmethod
    def _edit(edit, module, args, named, out):
        return edit(args[0] if args else named["hidden_states"], out)

    @staticmethod
    def _store(seen, module, args, out):
        seen[module] = args[0] if args else None, out[0] if isinstance(out, tuple) else out

    def out(self, layer):
        return getattr(self.attn[layer], self.kind.out)

    def norm(self, layer, which):
        return part(self.blocks[layer], self.kind.norms[which])

    def z(self, tokens, layer):
        return self.run(tokens, record=[self.out(layer)])[1][self.out(layer)][0]

    def with_z(self, corrupt, nodes):
        """The edits that put corrupt z into heads."""
        edits = []
        for node in nodes:
            module, own = self.out(node.layer), slice(node.head * WIDTH, (node.head + 1) * WIDTH)
            new = self.z(corrupt, node.layer)[..., own]
            edits.append((module, own, new))

        def put(value, out, module):
            value = value.clone()
            for _, own, new in (edit for edit in edits if edit[0] is module):
                value[..., own] = new
            return module.forward(value)

        return [(m, partial(put, module=m)) for m in {edit[0]: None for edit in edits}]

    def reaches(self, layer):
        """The module whose output, times the factor, is what the heads add to the stream."""
        return part(self.blocks[layer], self.kind.after) or self.out(layer)

    def written(self, tokens, node, edits=()):
        if node.kind == "embed":
            return self.run(tokens, edits, [self.blocks[0]])[1][self.blocks[0]][0]
        reach = self.reaches(node.layer)
        _, seen = self.run(tokens, edits, [self.blocks[node.layer], reach])
        heads_add = self.kind.factor * seen[reach][1]
        if node.kind == "head":
            return heads_add
        start, end = seen[self.blocks[node.layer]]
        return end - start - heads_add

    def change(self, task, nodes):
        """By how much the stream changes when nodes of one kind and layer are corrupt."""
        first = nodes[0]
        edits = self.with_z(task.corrupt, nodes) if first.kind == "head" else ()
        other = task.clean if first.kind == "head" else task.corrupt
        return self.written(other, first, edits) - self.written(task.clean, first)

    def at_reader(self, tokens, reader, shift):
        """The edits by which one reader reads the stream with a shift."""
        if reader.kind == "logits":
            final = part(self.network, self.kind.final)
            return [(final, lambda value, _: final.forward(value + shift))]
        block, which = self.blocks[reader.layer], int(reader.kind == "mlp_in")
        norm = self.norm(reader.layer, which)
        stream = self.run(tokens, record=[block])[1][block][0]
        if which and not self.kind.parallel:
            stream = stream + self.written(tokens, head(reader.layer, 0))
        read = stream + shift if norm is None else norm.forward(stream + shift)
        if which:
            mlp = part(block, self.kind.mlp)
            if "residual" in signature(mlp.forward).parameters:  # it adds the stream itself
                return [(mlp, lambda value, out: mlp.forward(read, stream))]
            return [(mlp, lambda value, out: mlp.forward(read.view_as(value)))]  # OPT's is flat
        module, rows = self.rows(reader)

        def put(value, out):
            new = out.clone()
            new[..., rows] = module.forward(read)[..., rows]
            return new

        return [(module, put)]

    def rows(self, reader):
        """The matrix of queries, keys or values, and the rows of one head."""
        names, _, order = self.kind.qkv.partition(": ")
        which, own = "qkv".index(reader.kind), torch.arange(WIDTH)
        attn = self.attn[reader.layer]
        if not order:
            return getattr(attn, names.split()[which]), own + reader.head * WIDTH
        if order == "codegen":  # queries, values, keys, in four groups
            which = (0, 2, 1)[which]
        first = which * HEADS + reader.head if order == "part head" else reader.head * 3 + which
        return getattr(attn, names), own + first * WIDTH

    def score(self, task, edits=()):
        logits, _ = self.run(task.clean, edits)
        return task.score(logits[torch.arange(len(task))[:, None], task.at])

    def lost(self, task, nodes, reader, share=1.0):
        shift = share * self.change(task, nodes)
        return self.score(task) - self.score(task, self.at_reader(task.clean, reader, shift))

    def slope(self, task, nodes, reader):
        """How fast the score is lost, by sequence, as the change begins to reach the reader."""
        share = torch.zeros((), requires_grad=True)
        lost = self.lost(task, nodes, reader, share)
        return torch.stack([torch.autograd.grad(x, share, retain_graph=True)[0] for x in lost])

    def direct(self, task):
        """What each head adds directly to the answer's logit over the mean of all, (head, batch):
        norms and logits are linear at what they are in the run."""
        final, head_out = part(self.network, self.kind.final), self.network.get_output_embeddings()
        logits, seen = self.run(task.clean, record=[final, head_out])
        end, normal = seen[final]
        (zero,) = (final.forward(torch.zeros_like(end[:1, :1])),)
        layer_norm = (normal - zero - final.forward(end + 1) + zero).abs().max() < 1e-6
        centred = end - end.mean(-1, keepdim=True) if layer_norm else end
        gain, factor = (normal - zero) / centred, (logits / seen[head_out][1])[..., :1]
        rows, parts = torch.arange(len(task))[:, None], []
        for layer in range(len(self.blocks)):
            out, reach = self.out(layer), self.reaches(layer)
            _, seen = self.run(task.clean, record=[out, reach])
            weight = out.weight if isinstance(out, hf.pytorch_utils.Conv1D) else out.weight.T
            passed = self.kind.factor * seen[reach][1] / seen[out][1]
            for h in range(HEADS):
                own = slice(h * WIDTH, (h + 1) * WIDTH)
                write = seen[out][0][..., own] @ weight[own] * passed
                write = write - write.mean(-1, keepdim=True) if layer_norm else write
                added = factor * (write * gain) @ head_out.weight.T
                added = added[rows, task.at] - added[rows, task.at].mean(-1, keepdim=True)
                parts.append(added.gather(-1, task.answer[..., None]).mean((1, 2)))
        return torch.stack(parts)


@pytest.fixture(scope="module")
def both(request, tmp_path_factory):
    """A random network, its norms and biases too, as the package loads it and in float64."""
    kind = KINDS[request.param]
    torch.manual_seed(0)
    network = hf.AutoModelForCausalLM.from_config(kind.config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in network.named_parameters():
            near_one = "norm" in name.lower() or "ln_" in name
            weight.add_(0.3 * torch.randn_like(weight)) if near_one else weight.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("network")
    network.save_pretrained(folder)
    return models.load(folder), Truth(network, kind, folder), request.param


def close(got, expected):
    torch.testing.assert_close(got.double(), expected.double(), atol=1e-4, rtol=1e-4)


def some_edges(graph):
    """Edges of every kind: from below, within a layer, and into the logits."""
    later = [Node(c, 1, TARGET) for c in "qkv"]
    first = [(Node("embed"), Node(c, 0, 1)) for c in "qkv"]
    pairs = [(u, v) for u in (head(0, 1), Node("mlp", 0)) for v in later]
    pairs += [(Node("embed"), Node("mlp_in", 0)), (head(0, 3), Node("mlp_in", 1))]
    pairs += [(head(0, 0), Node("mlp_in", 0)), (head(1, 0), Node("mlp_in", 1))]
    pairs += [(u, Node("logits")) for u in (head(0, 2), head(1, 1), Node("mlp", 1))]
    return [edge for edge in [*first, *pairs] if bool(graph.exists[place(graph, edge)])]


def place(graph, edge):
    return graph.writers.index(edge[0]), graph.readers.index(edge[1])


# Would catch what a head writes read before a norm or a factor, a norm whose scale is frozen where
# it is computed anew, and a reader whose hook never fires (its edges are exactly 0).
@parametrized
def test_edges(both):
    model, truth, _ = both
    task, graph = a_task(model, 2, 5), of(model)
    assert graph.parallel == truth.kind.parallel
    edges = some_edges(graph)
    expected = torch.stack([truth.lost(task, [u], v) for u, v in edges])
    assert (expected.abs().amax(1) > 1e-3).double().mean() > 0.8, "nothing to compare"
    places = tuple(zip(*map(graph.index, edges), strict=True))
    close(patching.path_patching(model, task, edges)[places], expected)
    pair, keys = [head(0, 1), head(0, TARGET)], Node("k", 1, TARGET)
    cuts = [[edge] for edge in edges] + [[(u, keys) for u in pair]]
    kept = torch.stack([graph.exists & ~graph.mask(cut) for cut in cuts])
    lost = truth.score(task) - circuit.scores(model, task, kept)
    close(lost, torch.cat([expected, truth.lost(task, pair, keys)[None]]))
    slopes = torch.stack([truth.slope(task, [u], v) for u, v in edges])
    close(attribution.edge_attribution(model, task)[places], slopes)


# Would catch a restart above a layer that the architecture ignores (BLOOM).
@parametrized
def test_heads_removed_and_layers(both):
    model, truth, _ = both
    task, nodes = a_task(model, 2, 5), [head(0, 1), head(1, TARGET)]
    edits = [truth.with_z(task.corrupt, some) for some in ([nodes[1]], nodes)]
    expected = torch.stack([truth.score(task, some) for some in edits])
    close(patching.ablate(model, task, [[nodes[1]], nodes]), expected)
    sets = [[n[1:] for n in some] for some in ([nodes[1]], nodes)]
    ways = hooks.ablate_sets(model, task.clean, sets, "resample", task.corrupt)
    logits = hooks.logits_under(model, task.clean, ways, task.at)
    close(torch.stack([task.score(each) for each in logits]), expected)
    everything = [head(0, h) for h in range(HEADS)]
    flow, shift = patching.layer_flow(model, task), truth.change(task, everything)
    shift = shift + truth.change(task, [Node("mlp", 0)])
    shifted = truth.at_reader(task.clean, Node("logits"), shift)
    close(flow[1, 2], truth.score(task) - truth.score(task, shifted))


# Would catch Gemma's 1 + weight left out, a logit scale (Cohere, Granite), a part before its norm.
@parametrized
def test_direct_effects(both):
    model, truth, name = both
    task = a_task(model, 2, 5)
    if name in CAPPED:
        with pytest.raises(IclError, match=rf"\({name}\).* not linear .*soft cap.* off by"):
            direct_logits(model, task)
        return
    every, expected = of(model).writers, truth.direct(task)
    own = torch.tensor([node.kind == "head" for node in every])
    close(direct_logits(model, task)[own], expected)
    at = task.at[:, -1]
    try:
        query = at_query.read(model, task.clean, at)
    except IclError:
        assert name in OTHER_SCORES
        return
    assert name not in OTHER_SCORES
    shown = torch.zeros_like(task.clean, dtype=torch.bool)
    shown[:, 1:6] = True
    answer, everything = task.answer[:, -1], torch.arange(VOCAB)[None]
    duals = heads.dual_heads(query, shown)
    found = heads.direct_logit_attribution(query, duals, answer, everything)
    last = CleanCorrupt(task.clean, task.corrupt, task.at[:, -1:], task.answer[:, -1:])
    got = (found.start + found.update).flatten(1)
    close(got.T, truth.direct(last))


# Folding moves what values add by their bias out of the heads; these have none.
@pytest.mark.nightly
@pytest.mark.parametrize("both", ["llama", "granite", "gemma3", "cohere"], indirect=True)
def test_direct_effects_after_folding(both):
    _, truth, _ = both
    model = models.load(truth.folder, fold=True)
    batch = repeated_tokens(model, 2, 6, torch.Generator().manual_seed(0))
    tokens, half = batch.tokens, batch.clean_half.indices(batch.tokens.shape[1])
    at = torch.arange(*half).expand(2, -1)
    task = CleanCorrupt(tokens, tokens, at, tokens.gather(1, at + 1))
    close(gpt2_induction.direct_effects(model, batch).flatten(1).T, truth.direct(task))


def test_a_model_that_fits_no_known_way_is_refused(tmp_path, monkeypatch):
    hf.PhiForCausalLM(hf.PhiConfig(**SIZES)).save_pretrained(tmp_path)
    model = models.load(tmp_path)
    task = a_task(model)
    monkeypatch.setattr(model.cfg, "parallel_attn_mlp", False)
    with pytest.raises(IclError, match=r"\(phi\).* what the MLP reads is no norm .* off by 0\.\d"):
        patching.path_patching(model, task)
    monkeypatch.undo()
    model.set_use_hook_mlp_in(True)
    monkeypatch.setattr(invariants, "EDITED", (*invariants.EDITED, "hook_mlp_in"))
    with pytest.raises(IclError, match="nothing ever passes hook_mlp_in of layer 0"):
        attribution.edge_attribution(model, task)
    assert len(all_heads(model)) == 2 * HEADS
