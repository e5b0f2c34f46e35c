"""The flow from token to token: the prompt across, depth upwards, and paths through it.

Example:
    >>> import torch
    >>> from iclutils.plots import explorer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ..figures import BLUE, GREEN, GREY, ORANGE, PINK
from . import _parts as parts
from ._parts import INK, Explorer, Spec, across, named, sequence, tips, when

TOKENS, DOTS = 1000, 2000  # more of them make a page slow
STEP, RISE, HEIGHT = 11, 62, 1200  # pixels per token, per layer, and of all layers at most
OTHER = "other tokens"


def flow(
    tokens: Sequence[str],
    edges: Float[Tensor, "layer dest src"],
    groups: Mapping[str, Sequence[int]] | None = None,
    strongest: int = 16,
    token: int | None = None,
) -> Explorer:
    """What flows from token to token through the layers: the prompt across, depth upwards.

    A weight is shown as a share of the strongest edge of its layer. A chosen token keeps what
    flows into it, or out of it, through however many layers: an edge stays if a path of edges
    over the threshold joins it to the token, where every token also keeps what it has.

    Args:
        tokens: the prompt, token by token.
        edges: weight of every edge, for example its saliency; the diagonal is left out.
        groups: sets of positions by name; edges into them have a colour of their own.
        strongest: how many edges of each layer are kept.
        token: the token chosen at first, all if omitted.

    Example:
        >>> edges = torch.rand(2, 3, 3).tril()
        >>> explorer.flow(["A", "B", "A"], edges, {"target": [2]})
        Flow over 3 tokens through 2 layers, to explore
    """
    n, layers = parts.check(tokens, edges, TOKENS), len(edges)
    groups = groups or {}
    colours = dict(zip(groups, (BLUE, ORANGE, GREEN, PINK), strict=False))
    group = {i: name for name, members in groups.items() for i in members}
    if len(groups) > 4 or not {*group, token or 0} <= set(range(n)):
        raise IclError(f"At most four groups, of positions 0 to {n - 1}; got {groups}, {token}.")
    room, height = parts.room(tokens), min(RISE * layers, HEIGHT)
    reach = "t === null ? 1 : (direction === 'into' ? datum.into : datum.out)['' + t] || 0"
    level = parts.size([0, layers], [height, 0])
    middles = {"values": [i + 0.5 for i in range(layers)], "labelExpr": "floor(datum.value)"}
    colour: Spec = {
        "field": "group",
        "type": "nominal",
        "scale": {"domain": [*colours, OTHER], "range": [*colours.values(), GREY]},
        "legend": {"orient": "top", "title": "edges into", "symbolType": "stroke"}
        if groups
        else None,
    }
    lines: Spec = {
        "data": {"name": "edges", "values": _strongest(edges, strongest, group)},
        "transform": [
            {"filter": f"datum.w >= threshold && ({reach}) >= threshold"},
            {"calculate": "datum.layer + 1", "as": "above"},
            *named("datum.dest", "datum.src"),
        ],
        "mark": {"type": "rule", "strokeCap": "round", "opacity": 0.8},
        "encoding": {
            "x": across("src", n),
            "x2": {"field": "dest"},
            "y": {"field": "layer", **level, "axis": parts.axis(**middles, title="layer")},
            "y2": {"field": "above"},
            "strokeWidth": parts.width(6),
            "color": colour,
            "tooltip": [*tips("reads from"), {"field": "layer"}],
        },
    }
    dots: Spec = {
        "data": sequence(min(n * (layers + 1), DOTS)),
        "transform": parts.table("level", "i", n),
        "mark": {"type": "point", "filled": True, "size": 7, "color": INK, "opacity": 0.6},
        "encoding": {"x": across("i", n), "y": {"field": "level", **level}},
    }
    members: Spec = {
        "data": {"values": [{"i": i, "group": name} for i, name in group.items()]},
        "mark": {"type": "point", "filled": True, "size": 50, "opacity": 1, "y": height},
        "encoding": {"x": across("i", n), "color": colour},
    }
    columns = parts.cells(n, 0, height + room, "columns")
    columns["encoding"]["fillOpacity"] = when("datum.i === t", 0.25, 0)
    words = parts.words(n, {"y": height + 10, "angle": 270, "align": "right"})
    spec = parts.frame(
        "t === null ? 'What flows where' : "
        "'What flows ' + direction + ' “' + words[t] + '” at position ' + t",
        "layers upwards, wide is strong; click a token to follow its paths",
        [
            {"name": "words", "value": list(tokens)},
            parts.picked("click", ["columns"], tokens, token, all_too=True),
            {
                "name": "direction",
                "value": "into",
                "bind": parts.choice("what flows", ["into", "out of"]),
            },
            {
                "name": "threshold",
                "value": 0.1,
                "bind": {"input": "range", "min": 0, "max": 1, "step": 0.02, "name": "at least"},
            },
            {"name": "t", "expr": "isValid(token.i) ? token.i[0] : null"},
        ],
    )
    spec |= {"width": STEP * n, "height": height + room}
    spec |= {"layer": [columns, lines, dots, members, words]}
    return Explorer(spec, f"Flow over {n} tokens through {layers} layers, to explore")


def _strongest(
    edges: Float[Tensor, "layer dest src"], count: int, group: Mapping[int, str]
) -> list[Spec]:
    """The strongest edges of each layer, with the tokens that their paths join.

    ``into[p]`` is the weight of the weakest edge on the best path through this edge to p at the
    top, ``out[p]`` that on the best path to it from p at the bottom.
    """
    kept: list[list[Spec]] = []
    for depth, layer in enumerate(edges.detach().cpu().float().tril(-1)):
        best = (layer / (layer.max().item() or 1.0)).flatten().topk(min(count, layer.numel()))
        shares = zip(parts.rounded(best.values), best.indices.tolist(), strict=True)
        found = [(share, *divmod(place, len(layer))) for share, place in shares if share]
        kept.append(
            [
                {"layer": depth, "dest": i, "src": j, "w": w, "group": group.get(i, OTHER)}
                for w, i, j in found
            ]
        )
    _follow(kept[::-1], "into", "dest", "src")
    _follow(kept, "out", "src", "dest")
    return [edge for layer in kept for edge in layer]


def _follow(layers: Sequence[list[Spec]], name: str, ahead: str, behind: str) -> None:
    """Note at each edge how well it is joined to every end, walking away from the ends."""
    joined: dict[int, dict[str, float]] = {}  # position: end: weakest edge of the best path
    for layer in layers:
        for edge in layer:
            place = edge[ahead]
            beyond = {str(place): 1.0} | joined.get(place, {})
            edge[name] = {end: min(edge["w"], width) for end, width in beyond.items()}
        for edge in layer:
            known = joined.setdefault(edge[behind], {})
            for end, width in edge[name].items():
                known[end] = max(width, known.get(end, 0.0))
