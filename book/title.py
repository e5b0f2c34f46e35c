"""Draw the title picture, ``_static/title.svg``: python book/title.py; SmolLM2 must be at hand.

It is the prompt of the tour. An arc leads from the last line to each answer, as wide as the
attention that one head of SmolLM2 pays to it there: 17.5, which looks most at the answers. The same
share stands at the right.
"""

from pathlib import Path

import torch

from iclutils import models

PAIRS = {"walk": "walking", "play": "playing", "help": "helping", "jump": "jumping"}
PAIRS |= {"look": "looking", "swim": "swimming"}
HEAD = 17, 5
LINE, LEFT, ANSWER, WIDEST = 30, 8, 178, 18  # a line's height, where words begin, the widest arc
ARROW = 94  # where the last one ends, from which the head looks
TOP, RIGHT = 58, 392  # of the first line, and the right edge


def looks() -> tuple[list[float], float]:
    """Return the attention from the last arrow to each answer (5), and the chance of *swimming*."""
    net = models.load("smollm2")
    prompt = "\n".join(f"{verb} -> {form}" for verb, form in PAIRS.items())
    tokens = net.to_tokens(prompt.removesuffix(" swimming"))
    answer = net.to_tokens(prompt)[0, tokens.shape[1]]
    words = net.to_str_tokens(tokens)
    _, cache = net.run_with_cache(tokens, names_filter=f"blocks.{HEAD[0]}.attn.hook_pattern")
    row = cache["pattern", HEAD[0]][0, HEAD[1], -1]
    answers = [i + 1 for i, word in enumerate(words[:-1]) if "->" in word]
    chance = torch.softmax(models.logits(net, tokens)[0, -1], -1)[answer]
    return [float(row[i]) for i in answers], float(chance)


def picture(attention: list[float], chance: float) -> str:
    """Return the drawing: words are text, colours are those of the page."""
    end = TOP + 5 * LINE
    head = ".".join(map(str, HEAD))
    rows = [
        f'<text class="title-small" x="{RIGHT}" y="{y}">{words}</text>'
        for y, words in ((16, f"where head {head} looks"), (32, "from the last arrow"))
    ]
    for i, (verb, form) in enumerate(PAIRS.items()):
        y = TOP + i * LINE
        last = i == len(attention)
        rows.append(f'<text x="{LEFT}" y="{y}">{verb}</text><text x="68" y="{y}">→</text>')
        colour = ' class="title-answer"' if last else ""
        rows.append(f'<text x="{ANSWER}" y="{y}"{colour}>{form}</text>')
        share = f"said: {100 * chance:.0f} % sure" if last else f"{100 * attention[i]:.0f} %"
        kind = "title-answer" if last else "title-look"
        rows.append(f'<text class="title-small {kind}" x="{RIGHT}" y="{y}">{share}</text>')
    for i, weight in enumerate(attention):
        y, foot = TOP - 5 + i * LINE, end - 5
        curve = f"M{ANSWER - 8} {y}C{ANSWER - 60} {y} {ARROW} {(y + foot) // 2} {ARROW} {foot}"
        width = WIDEST * weight / max(attention)
        rows.append(f'<path d="{curve}" stroke-width="{width:.1f}"/>')
    said = (
        "Five verbs with their forms in -ing, and swim with an arrow. From the arrow, arcs lead to "
        "the answers of the five examples, as wide as the attention of one head of SmolLM2. It "
        f"says swimming, with a probability of {chance:.2f}."
    )
    drawn = "\n".join(rows)
    return (
        f'<svg class="title" viewBox="0 0 400 {end + 16}" role="img" aria-label="{said}">\n'
        f"{drawn}\n</svg>\n"
    )


if __name__ == "__main__":
    path = Path(__file__).with_name("_static") / "title.svg"
    path.write_text(picture(*looks()), encoding="utf-8")
