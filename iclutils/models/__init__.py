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
    check_name,
    check_tokens,
    edit_weights,
    editable,
    load,
    logits,
    random_init,
    tokenizer,
    word_tokenizer,
    words,
)
