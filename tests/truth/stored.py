"""Numbers of a chapter, in the JSON beside the script that computed them."""

import json
from pathlib import Path

from torch import Tensor


def write(script, given, values):
    def plain(value):
        if isinstance(value, Tensor):
            value = value.tolist()
        if isinstance(value, list):
            return [plain(each) for each in value]
        return float(f"{value:.6g}") if isinstance(value, float) else value

    found = {
        part: {name: plain(value) for name, value in each.items()}
        for part, each in (("given", given), ("values", values))
    }
    Path(script).with_suffix(".json").write_text(lines(found), encoding="utf-8")
    for name, value in found["values"].items():
        print(name, value)


def lines(found):
    parts = []
    for part, each in found.items():
        rows = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in each.items())
        parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
