"""Numbers of a chapter, in the JSON beside the script that computed them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor


def write(script: str, given: dict[str, Any], values: dict[str, Any]) -> None:
    """Prompts and numbers into the JSON beside the script."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.tolist()
        if isinstance(value, list):
            return [plain(each) for each in value]
        return float(f"{value:.6g}") if isinstance(value, float) else value

    found = {
        part: {k: plain(v) for k, v in d.items()}
        for part, d in (("given", given), ("values", values))
    }
    path = Path(script).with_suffix(".json")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, value in found["values"].items():
        print(name, value)
