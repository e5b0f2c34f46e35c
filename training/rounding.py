"""Round the matrices of SmolLM2 in another way, to see which findings lean on its four bits.

    python -m training.rounding "three bits" FOLDER
    python tools/run.py 01 --tier real-part --model FOLDER

The package has every 32 entries of a row on 16 levels from their least to their largest. Eight bits
of these give the same numbers, and the unrounded network cannot be had, so both ways here are
coarser: what changes with them may change with finer ones, too. The embedding stays.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from iclutils.zoo import smollm2

Matrix = Float[Tensor, "out in"]


def around_zero(matrix: Matrix) -> Matrix:
    """Round to four bits of one scale each 32 entries, zero among the levels (llama.cpp's Q4_0)."""
    levels = gguf.GGMLQuantizationType.Q4_0
    return torch.from_numpy(gguf.dequantize(gguf.quantize(matrix.numpy(), levels), levels))


def three_bits(matrix: Matrix) -> Matrix:
    """Round each 32 entries to eight levels, evenly from the least to the largest."""
    blocks = matrix.reshape(len(matrix), -1, 32)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = ((high - low) / 7).clamp(min=1e-12)
    return (low + step * ((blocks - low) / step).round()).reshape(matrix.shape)


WAYS: dict[str, Callable[[Matrix], Matrix]] = {"around zero": around_zero, "three bits": three_bits}


def main() -> None:
    """Read the command line and write the folder."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    cli.add_argument("way", choices=WAYS)
    cli.add_argument("folder", type=Path)
    options = cli.parse_args()
    source = smollm2.folder()
    options.folder.mkdir(parents=True)
    weights = load_file(source / "model.safetensors")
    for name, value in weights.items():
        if value.ndim == 2 and "embed" not in name:
            weights[name] = WAYS[options.way](value.float()).half()
    save_file(weights, options.folder / "model.safetensors", {"format": "pt"})
    for path in source.glob("*.json"):
        shutil.copy(path, options.folder)


if __name__ == "__main__":
    main()
