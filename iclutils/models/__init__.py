"""Models: language models here, networks that read numbers in ``lsa`` and ``regressors``."""

from __future__ import annotations

from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.logit_lens import logit_lens
from transformer_lens.utilities import get_act_name

from .language import (
    HUB,
    bos,
    cached,
    check_tokens,
    edit_weights,
    encode,
    kind,
    load,
    local_folder,
    logits,
    random_init,
    start_tokens,
    token_ids,
    tokenizer,
    word_tokenizer,
    words,
)
