"""Language models: one way in, whatever their source.

``load`` gives a TransformerLens ``TransformerBridge`` in float32, eager attention, frozen, whose
activations can be read, and edited where the model uses them, under TransformerLens' hook names.
Every head has a query, key and value of its own (``checkpoint.write_out``).
"""

import inspect
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from huggingface_hub import snapshot_download
from jaxtyping import Float, Int
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, Whitespace
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import (
    NormalizationBridge,
    RMSNormalizationBridge,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    logging,
)

from .. import zoo
from ..errors import IclError, unknown
from ..files import read_json, sha256
from ..zoo import smollm2
from . import checkpoint
from .checkpoint import start_tokens as start_tokens

logging.disable_progress_bar()

Tokens = PreTrainedTokenizerBase | Literal["numbers"] | None
NUMBERS = ("in-context regressors", "solvers")  # networks that read no tokens, see ``storage``
CACHE_ROUNDING = 1e-2  # of the largest logit: float32 gives 1e-6 to 1e-4, an empty cache .1 to 1
ROUNDING = 1e-4  # of the largest log-probability: float32 gives 1e-6, another network 1e-3 to 1
PROBE = 16  # tokens that a loaded network is compared on


@dataclass(frozen=True)
class HubModel:
    """A published model, pinned: repository, 40-hex commit, SHA-256 of the files we read."""

    repo: str
    revision: str
    sha256: dict[str, str]


_HUB = read_json(Path(__file__).with_name("hub.json"))
HUB = {name: HubModel(**pins) for name, pins in _HUB.items()}

# GPT-J is no entry, because the SHA-256 of its safetensors weights could not be confirmed; they
# are at load("EleutherAI/gpt-j-6b@f3f428825b6fc4c087af475ea729ac652edeee33").


def load(
    name_or_path: str | Path,
    *,
    step: int | None = None,
    device: str | torch.device = "cpu",
    tokenizer: Tokens = None,
    fold: bool = False,
    read: Callable[[Path, str], PreTrainedModel] = checkpoint.read,
) -> TransformerBridge:
    """Load a model, frozen, in evaluation mode, with its attention in sight.

    Args:
        name_or_path: a zoo name (``"induction-0"``), ``"smollm2"`` (see ``zoo.smollm2``), a name in
            ``HUB`` (``"gpt2"``), any ``owner/name`` of the hub with its full 40-hex commit,
            ``owner/name@commit``, or a Hugging Face folder on disk; one that has the name of a
            model is written as a path, ``./gpt2``.
        step: for a zoo model, one of its training checkpoints; the final one if omitted.
        device: where to put it.
        tokenizer: in place of the one beside the weights; ``"numbers"`` writes token 7 as
            ``"7"``, as zoo models do. A folder without a tokenizer gives a model without one.
        fold: fold LayerNorm scales into the weights and centre what writes to the residual
            stream (same predictions, other weights), for measures that read weights.
        read: what makes the Hugging Face network of a folder, where other weights than those
            on disk are wanted (``edit_weights``, ``random_init``).

    On a few tokens the result is compared with transformers alone, again after folding. A network
    that TransformerLens runs differently, or whose attention it does not show, is refused.

    Example:
        >>> from iclutils import models
        >>> net = models.load("induction-0")
        >>> net.cfg.n_layers, net.cfg.n_heads
        (2, 4)
    """
    name = str(name_or_path)
    folder = _folder(name, step)
    stored = sum(path.stat().st_size for path in folder.glob("model*.safetensors")) / 2**30
    if stored > (free := psutil.virtual_memory().available / 2**30):
        raise IclError(
            f"The weights of {name!r} take {stored:.1f} GiB of memory, and {free:.1f} are free. "
            "Close other programs, or take a machine with more memory."
        )
    network = read(folder, name)
    if network.config.get_text_config() is not network.config:
        # TransformerLens would install torchvision for it, and another torch with that.
        raise IclError(
            f"{name!r} ({network.config.model_type}) reads more than text, such as images. Use a "
            "model that reads text alone, such as GPT-2."
        )
    if tokenizer is None:
        tokenizer = checkpoint.tokenizer(folder, name)
    words = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
    size = network.config.vocab_size
    first = checkpoint.bos(folder, size, words)
    network = network.to(device).eval()
    length = min(PROBE, getattr(network.config, "max_position_embeddings", None) or PROBE)
    tokens = (torch.arange(1, length + 1, device=device) * 7919 % size)[None]
    try:
        with torch.no_grad():
            expected = network(tokens).logits.log_softmax(-1)
        network = checkpoint.fuse_gelu(checkpoint.write_out(network))
        bridge = TransformerBridge.boot_transformers(
            str(folder), hf_model=network, tokenizer=_numbers(size, first), device=device
        )
        bridge.eval().requires_grad_(False)
        _fuse_norms(bridge)
        bridge.cfg.bos_token_id = first
        bridge.cfg.n_ctx = checkpoint.turned_alike(network.config, bridge.cfg.n_ctx)
        if words is not None:
            _give_words(bridge, words)
        elif tokenizer is None and not zoo.has(name):
            bridge.tokenizer = None
        _examine(bridge, name, tokens, expected)
        if fold:
            _fold(bridge, name, tokens, expected)
    except IclError:
        raise
    except Exception as error:  # the libraries raise many types
        kind = network.config.model_type
        reason = checkpoint.first_line(error).split(" Available")[0].rstrip(".")  # a long list
        raise IclError(
            f"{name!r} could not be loaded: TransformerLens does not support this architecture "
            f"({kind}), or one of its options ({reason})."
        ) from error
    return bridge


def _fuse_norms(bridge: TransformerBridge) -> None:
    """Let norms be computed by the network's own module, one kernel of torch in place of eight
    steps, wherever nothing watches or edits their scale; equal up to rounding."""

    def forward(norm: Any, states: Tensor) -> Tensor:
        points = norm.hook_scale, norm.hook_normalized
        if any(point.fwd_hooks or point.bwd_hooks for point in points):
            return type(norm).forward(norm, states)
        return norm.hook_out(norm.original_component(norm.hook_in(states)))

    for part in bridge.modules():
        is_norm = type(part) in (NormalizationBridge, RMSNormalizationBridge)
        if is_norm and part.original_component is not None:
            part.__dict__["forward"] = partial(forward, part)


def _give_words(bridge: TransformerBridge, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set a tokenizer, unchanged, as TransformerLens wants it: with something to pad with.

    Its own way would read the folder once more, and replace the tokenizer by that of a class.
    """
    first = getattr(bridge.cfg, "bos_token_id", None)
    if tokenizer.bos_token is None and first is not None:
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(first)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
    bridge.tokenizer = None  # a second one it would set up in its own way
    bridge.tokenizer = tokenizer
    whole, bare = (tokenizer("a", add_special_tokens=x)["input_ids"] for x in (True, False))
    more = len(whole) > len(bare)
    bridge.cfg.tokenizer_prepends_bos = more and whole[0] == tokenizer.bos_token_id
    bridge.cfg.tokenizer_appends_eos = more and whole[-1] == tokenizer.eos_token_id


def _is_of_heads(name: str) -> bool:
    return name.endswith(("attn.hook_pattern", "attn.hook_z"))


def _examine(bridge: TransformerBridge, name: str, tokens: Tensor, expected: Tensor) -> None:
    """Refuse a network whose attention cannot be seen, or that is not the one on disk."""
    if not bool(expected.isfinite().all()):
        raise IclError(f"{name!r} predicts NaN or infinite numbers: take an earlier checkpoint.")
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(tokens, names_filter=_is_of_heads)
    seen, heads = cache.cache_dict, bridge.cfg.n_heads
    for layer in range(bridge.cfg.n_layers):
        pattern, z = (seen.get(f"blocks.{layer}.attn.hook_{x}") for x in ("pattern", "z"))
        if pattern is None or z is None or z.shape[:-1] != (*tokens.shape, heads):
            raise IclError(
                f"{name!r} does not show in every layer to what each of its heads attends and what "
                "it writes, so this package cannot look into it. Use a decoder model with as many "
                "heads of queries, keys and values in every layer, such as GPT-2."
            )
        if bool(pattern[..., 0, 1].any()):
            raise IclError(
                f"{name!r} reads in both directions, as BERT does: its first token attends to the "
                "second. Use a decoder model, such as GPT-2."
            )
    shared = getattr(bridge.cfg, "n_key_value_heads", None) or heads
    if shared != heads:
        raise IclError(
            f"In {name!r} {heads} heads share keys and values ({shared} in all) in a "
            "way that this package cannot write out for each head. Use a model with separate "
            "projections, such as Llama, Mistral or Qwen, or one without grouped heads."
        )
    if gap := _gap(logits, expected):
        raise IclError(
            f"{name!r} becomes another network in TransformerLens: its log-probabilities are up to "
            f"{gap:.2g} nats away from those of transformers, so that some option in its "
            "config.json must be ignored. Numbers would not be about your model: use another."
        )
    _check_cache(bridge, name, tokens[:, :3], logits[0, 2])


def _gap(logits: Float[Tensor, "1 pos vocab"], expected: Float[Tensor, "1 pos vocab"]) -> float:
    """Return the largest difference of log-probabilities, in nats; 0 where rounding explains it,
    which grows with the logits: they reach a hundred in large models."""
    gap = float((logits.log_softmax(-1) - expected).abs().max())
    return 0.0 if gap <= ROUNDING * max(1.0, float(expected.abs().max())) else gap


def _fold(bridge: TransformerBridge, name: str, tokens: Tensor, expected: Tensor) -> None:
    """Fold norms into the weights; refuse a network that predicts otherwise afterwards."""
    if not getattr(bridge.adapter, "supports_fold_ln", True):
        raise IclError(
            f"TransformerLens cannot fold the norms of {name!r} into its weights, so that measures "
            "that read weights would leave them out. Load it with fold=False."
        )
    # A sink takes a share of the attention, so that a value bias counts less than once.
    sinks = any("sinks" in parameter for parameter, _ in bridge.named_parameters())
    capped = (getattr(bridge.cfg, "output_logits_soft_cap", None) or 0.0) > 0  # logits that count
    options = {"fold_value_biases": not sinks, "center_unembed": not capped}
    bridge.enable_compatibility_mode(disable_warnings=True, **options)
    if gap := _gap(logits(bridge.requires_grad_(False), tokens), expected):
        raise IclError(
            f"With its norms folded into its weights {name!r} is another network: its "
            f"log-probabilities are up to {gap:.2g} nats away. Load it with fold=False."
        )


def _check_cache(bridge: Any, name: str, tokens: Tensor, whole: Tensor) -> None:
    """Refuse a network that forgets what it has read into a cache of keys and values, as where
    one of two libraries hands it on by a name that the other does not know. ``whole`` are the
    logits of the last of three ``tokens``, read without one."""
    if "past_key_values" not in inspect.signature(bridge.original_model.forward).parameters:
        return
    with torch.no_grad():
        _, past = bridge(tokens[:, :2], use_cache=True, return_type="logits_and_cache")
        again = bridge(tokens[:, 2:], past_key_values=past)[0, -1]
    gap, scale = float((whole - again).abs().max()), float(whole.abs().max())
    if gap > CACHE_ROUNDING * max(scale, 1.0):
        raise IclError(
            f"{name!r} gives other logits with a cache of keys and values than without ({gap:.2g}, "
            f"of logits up to {scale:.2g}). Install the versions of transformers and "
            "transformer-lens that pyproject.toml admits; if you have them, use another model."
        )


def edit_weights(
    name_or_path: str | Path, edit: Callable[[PreTrainedModel], None], **options: Any
) -> TransformerBridge:
    """Load a model with other weights: ``edit`` changes its Hugging Face network in place.

    ``options`` are those of ``load``. For weights drawn anew, see ``random_init``.
    """

    def edited(folder: Path, name: str) -> PreTrainedModel:
        network = checkpoint.read(folder, name)
        with torch.no_grad():
            edit(network)
        return network

    return load(name_or_path, read=edited, **options)


def random_init(
    name_or_path: str | Path,
    seed: int,
    edit: Callable[[PreTrainedModel], None] = lambda network: None,
    **options: Any,
) -> TransformerBridge:
    """Load a model of the same architecture with random weights, the baseline without training.

    Like TransformerLens' ``random_init_bridge``, with the ``options`` of ``load``; ``edit`` changes
    its network in place. Of the folder, the config alone is read.
    """

    def untrained(folder: Path, name: str) -> PreTrainedModel:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            network = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
            edit(network)
            return network

    return load(name_or_path, read=untrained, **options)


def local_folder(name: str) -> Path | None:
    """Return the folder on disk that a name stands for, if it is none of a model of the book.

    A name is a name, whatever lies in the current folder: ``gpt2`` is the published model,
    ``./gpt2`` a folder.
    """
    known = zoo.has(name) or name == smollm2.NAME or name in HUB
    folder = Path(name).expanduser()
    return folder if name and not known and folder.is_dir() else None


def kind(name: str) -> str:
    """Return what a name or folder holds: ``in-context regressors``, ``solvers`` or, for anything
    that reads tokens, ``transformer``."""
    folder = zoo.folder(name) if zoo.has(name) else local_folder(name)
    config = folder / "config.json" if folder else Path()
    found = read_json(config).get("model_type") if config.is_file() else None
    return found if found in NUMBERS else "transformer"


def _folder(name: str, step: int | None) -> Path:
    """Return the folder that holds a model; a published one is fetched."""
    if zoo.has(name):
        folder = zoo.folder(name, step)
        if kind(name) != "transformer":
            raise IclError(
                f"{name!r} reads no tokens: load it with iclutils.models.regressors.load or "
                "iclutils.models.lsa.load."
            )
        return folder
    if step is not None:
        raise IclError(f"Only zoo models have training steps, and {name!r} is not one of them.")
    if own := local_folder(name):
        return own
    return smollm2.folder() if name == smollm2.NAME else _fetch(name)


def bos(model: TransformerBridge) -> int:
    """Return the id of the beginning-of-sequence token; refuse a model that names none."""
    token = getattr(model.cfg, "bos_token_id", None)
    if token is None:
        raise IclError(
            "This model names no BOS token among its tokens, with which its texts could begin: "
            "write bos_token_id into its config.json, or bos_token into tokenizer_config.json."
        )
    return int(token)


def text_tokenizer(model: TransformerBridge) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model that reads text; refuse one whose tokens are numbers. To
    encode text with it, see ``encode``."""
    reader = model.tokenizer
    if reader is None:
        raise IclError(
            "This model has no tokenizer: put its tokenizer.json beside its weights, or give one "
            "to iclutils.models.load as tokenizer=."
        )
    if all(word == str(token) for word, token in reader.get_vocab().items()):
        raise IclError("This model reads no text: its tokens are numbers. Choose one with words.")
    return reader


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any
) -> BatchEncoding:
    """Tokenize texts as text alone: without BOS, and with ``</s>`` in a text as four characters.

    A newline is text, too, where a tokenizer of whole words has it among its special tokens.
    """
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    whole = "\n".join(texts)
    written = {i for i, token in special.items() if token.strip() and token in whole}
    settings = {"add_special_tokens": False, "split_special_tokens": bool(written)}
    encoded = tokenizer(list(texts), verbose=False, **settings, **options)
    if kept := written & set().union(*encoded["input_ids"]):
        raise IclError(f"This tokenizer cannot read {special[min(kept)]!r} as text: leave it out.")
    return encoded


def token_ids(model: TransformerBridge) -> Int[Tensor, "token"]:
    """Return the ids that a text can have: those of the tokenizer, or all if there is none.

    Many embeddings are padded beyond their tokenizer; such rows were never trained.
    """
    size = model.cfg.d_vocab
    if model.tokenizer is None:
        return torch.arange(size)
    return torch.tensor(sorted({i for i in model.tokenizer.get_vocab().values() if i < size}))


def check_tokens(model: TransformerBridge, tokens: Int[Tensor, "batch pos"]) -> None:
    """Refuse token ids the model cannot read."""
    length, limit = tokens.shape[1], model.cfg.n_ctx
    if length > limit:
        raise IclError(
            f"The sequence has {length} tokens and the model reads at most {limit}: "
            "use shorter segments or a model with a longer context."
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < model.cfg.d_vocab:
        raise IclError(
            f"Token ids must lie in 0..{model.cfg.d_vocab - 1}; got "
            f"{int(tokens.min())}..{int(tokens.max())}. Was another model's tokenizer used?"
        )


def logits(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos vocab"]:
    """Return next-token logits, without gradients."""
    check_tokens(model, tokens)
    with torch.no_grad():
        return model(tokens)


def check_parts(model: TransformerBridge, names: Iterable[str], parts: Container[str]) -> None:
    """Refuse a model that lacks what a measure reads or changes: ``names`` beyond its ``parts``."""
    if lacking := sorted(name for name in names if name not in parts):
        kind = getattr(model.original_model.config, "model_type", "unknown")
        raise IclError(
            f"This model ({kind}) has no {lacking[0]}, which is read or changed here. Its "
            "predictions and its attention can be measured all the same."
        )


def _pinned(name: str) -> HubModel:
    """Return the pins of a hub repository; refuse a name that is neither known nor pinned."""
    if name in HUB:
        return HUB[name]
    if "/" not in name:
        known = [*zoo.names(), smollm2.NAME, *HUB, "a folder on disk", "owner/name"]
        raise unknown("model", name, known)
    repo, _, revision = name.partition("@")
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise IclError(
            f"There is no folder {name!r} on disk, and a hub model must be pinned: write "
            f"{repo}@COMMIT with the full 40-hex commit, which its page shows under 'Files and "
            "versions'."
        )
    return HubModel(repo, revision, {})


def _fetch(name: str) -> Path:
    """Download (or find in the cache) one pinned hub repository and verify it."""
    spec = _pinned(name)
    patterns = list(spec.sha256) or ["*.json", "*.safetensors", "*.txt", "*.model"]
    try:
        folder = Path(snapshot_download(spec.repo, revision=spec.revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types
        raise IclError(
            f"Could not fetch {spec.repo} at {spec.revision[:12]} from the hub "
            f"({type(error).__name__}). Connect to the network and run again, or pass a folder "
            "that holds the model (./gpt2, not gpt2), or stay with the mini tier."
        ) from error
    for file, digest in spec.sha256.items():
        path = folder / file
        if not path.is_file() or sha256(path) != digest:
            raise IclError(
                f"{path} is missing or does not match its pinned SHA-256. "
                "Delete that file and run again to download it anew."
            )
    return folder


def _numbers(size: int, bos: int | None) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a model without words: token i is written ``"i"``."""
    words = Tokenizer(WordLevel({str(i): i for i in range(size)}, unk_token=str(bos or 0)))
    words.pre_tokenizer = Whitespace()
    # TransformerLens takes BOS from EOS; a BOS given here it would look for on disk.
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(bos or 0))


def word_tokenizer(name: str, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer that gives words to a zoo model, which reads numbers: each word of the
    texts, with the space before it, is one of them, and any other word is BOS."""
    config = read_json(zoo.folder(name) / "config.json")
    split = Split(Regex(r"\n| ?\w+| ?[^\w\s]+"), "isolated")
    met = dict.fromkeys(word for text in texts for word, _ in split.pre_tokenize_str(text))
    free = (token for token in range(config["vocab_size"]) if token != config["bos_token_id"])
    vocabulary = dict(zip(met, free, strict=False)) | {"<bos>": config["bos_token_id"]}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<bos>"))
    words.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<bos>")
