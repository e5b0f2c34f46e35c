"""Models: language models here, networks that read numbers in ``lsa`` and ``regressors``.

What is here is imported when it is first used: its libraries take seconds, and chapters about
networks that read numbers do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_lens import ActivationCache
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.utilities import get_act_name
    from transformers import PreTrainedModel

    from .language import (
        HUB,
        bos,
        check_parts,
        check_tokens,
        edit_weights,
        encode,
        kind,
        load,
        local_folder,
        logits,
        random_init,
        start_tokens,
        text_tokenizer,
        token_ids,
        word_tokenizer,
    )

_LIBRARIES = {
    "ActivationCache": "transformer_lens",
    "TransformerBridge": "transformer_lens.model_bridge",
    "get_act_name": "transformer_lens.utilities",
    "PreTrainedModel": "transformers",
}
_ROOMS = ("checkpoint", "language", "lsa", "regressors", "storage")


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LIBRARIES.get(name, f"{__name__}.language"))
    value = globals()[name] = getattr(module, name)
    return value
