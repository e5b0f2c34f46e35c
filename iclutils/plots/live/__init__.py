"""Figures that run a small network: in the pages of the book, and in a notebook on yours."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import IclError

FOLDER = Path(__file__).parent  # of the scripts
MOST_WEIGHTS = 3_000_000  # then a picture of 65 tokens takes about half a second
MOST_TOKENS = 96
NAMES = {  # of GPT-2's parts, in Hugging Face's files and in the scripts
    **{"transformer.": "", "h.": "blocks.", "ln_1": "norm_1", "ln_2": "norm_2", "ln_f": "norm"},
    **{"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"},
}
PARTS = re.compile(r"(wte|wpe|norm|blocks\.\d+\.(norm_1|norm_2|qkv|out|up|down))\.(weight|bias)")


def gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a GPT-2's weights by the names of the scripts, without other entries of its state."""
    renamed = {}
    for name, weight in weights.items():
        name = name.replace("_original_component.", "")  # TransformerLens wraps the modules
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if PARTS.fullmatch(name):
            renamed[name] = weight
    return renamed


def heads(model: Any, tokens: Sequence[int] | Tensor, names: Sequence[str] = ()) -> Any:
    """Open a figure of a GPT-2's heads below the cell of a notebook, to switch them off by hand.

    It is the figure that opens chapter 01, on your own network: a Hugging Face ``GPT2LMHeadModel``,
    or a bridge of one, with at most ``MOST_WEIGHTS`` weights, which runs in the browser. Of
    ``tokens``, at most ``MOST_TOKENS`` ids, such that repeat show the induction heads; ``names``
    has the text of each id. For larger networks take ``iclutils.interp.hooks``.

    Example:
        >>> from iclutils import models
        >>> from iclutils.plots import live
        >>> live.heads(models.load("induction-3"), [511, 5, 9, 7, 5, 9, 7])  # doctest: +SKIP
    """
    network = getattr(model, "original_model", model)
    config: Any = getattr(network, "config", None)
    if getattr(config, "model_type", "") != "gpt2" or config.activation_function != "gelu_new":
        raise IclError(
            f"This figure runs a GPT-2 (transformers.GPT2LMHeadModel with gelu_new), not a "
            f"{type(network).__name__}. Measure this model with iclutils.interp."
        )
    weights = gpt2_weights(network.state_dict())
    count = sum(weight.numel() for weight in weights.values())
    if count > MOST_WEIGHTS:
        raise IclError(
            f"This network has {count / 1e6:.1f} million weights; a figure in the browser runs at "
            f"most {MOST_WEIGHTS / 1e6:.0f} million. Measure it with iclutils.interp."
        )
    ids = torch.as_tensor(tokens).flatten().tolist()
    most = min(MOST_TOKENS, config.n_positions)
    if not 2 <= len(ids) <= most:
        raise IclError(f"There are {len(ids)} tokens; the figure shows 2 to {most}.")
    if not all(0 <= i < config.vocab_size for i in ids):
        raise IclError(f"Tokens are ids from 0 to {config.vocab_size - 1}; these are not: {ids}.")
    raw = [weight.detach().float().cpu().contiguous() for weight in weights.values()]
    sizes = {"width": config.n_embd, "heads": config.n_head, "pos": most}
    part = {
        "name": type(network).__name__,
        "config": {**sizes, "tokens": ids, "names": [str(name) for name in names]},
        "dtype": "f4",
        "tensors": [[name, *weight.shape] for name, weight in weights.items()],
    }
    return _widget(part, b"".join(weight.numpy().tobytes() for weight in raw))


def _widget(part: dict[str, Any], weights: bytes) -> Any:
    """Return the widget of a figure: what it shows, and the weights as they lie in memory."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        message = "The figure needs anywidget: pip install anywidget, then run again."
        raise IclError(message) from error

    scripts = (FOLDER / f"{name}.js" for name in ("transformer", "live", "induction", "notebook"))
    module = "\n".join(path.read_text(encoding="utf-8") for path in scripts)

    class Figure(anywidget.AnyWidget):
        _esm = module
        _css = (FOLDER / "live.css").read_text(encoding="utf-8")
        part = traitlets.Dict().tag(sync=True)
        weights = traitlets.Bytes().tag(sync=True)

    return Figure(part=part, weights=weights)
