"""iclutils: the measurements behind *In-Context Learning, Taken Apart*.

Each notebook has a module of its name in ``iclutils.chapters``:

- 01 ``gpt2_induction``: find the induction circuit, cut it, watch it grow.
- 02 ``label_anchors``: how label words collect what demonstrations say, and the target reads it.
- 03 ``ridge_ols``: which algorithm in-context regression is, and a transformer that runs it.
- 04 ``gradient_step``: linear self-attention as a step of gradient descent.
- 05 ``contrastive_kernel``: softmax attention as a kernel, and its dual model.
- 06 ``attention_circuits``: which parts do one thing, how they connect, and what happens if not.
- 07 ``every_lens``: one prompt, and what each of these ways of looking marks.

The names below are imported when they are first used, so that an import takes milliseconds.
"""

import os
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before torch is imported: a thread that waits sleeps, so that other programs are not in its way.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if os.environ.get("ICLUTILS_QUIET"):  # also the bars of the libraries below
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
# Without ipywidgets bars are lines of text, and that is no mistake.
warnings.filterwarnings("ignore", "IProgress not found")
# A norm that is frozen is computed from its hook, and only rounding may differ.
warnings.filterwarnings("ignore", "A forward hook edited hook_scale")

if TYPE_CHECKING:
    from .errors import IclError
    from .session import Session, begin

__all__ = ["IclError", "Session", "begin"]

_MODULES = {"IclError": "errors", "Session": "session", "begin": "session"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # takes longer than all the rest

        return metadata.version("iclutils")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
