"""Numbers of every chapter at the tier ``real``, computed again with transformers alone.

Nothing of iclutils is imported, nor TransformerLens: the network is Hugging Face's, attention is
edited in its own function, prompts are written anew from the tables of words and sentences. Where
a chapter's draws come from a seeded generator, the same are drawn here and the numbers must agree
to rounding; only words are drawn anew, and there two standard errors count.

    python benchmarks/independent.py  # against book/results/real; 01 05: these chapters alone
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

ROOT = Path(__file__).parents[1]
DATA = ROOT / "iclutils/tasks/data"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iclutils"
FOLDER = Path(os.environ.get("ICLUTILS_CACHE") or CACHE) / "smollm2"
ROUNDING = 0.01  # of numbers from the same draws
VOCAB, BOS, LAYERS = 49152, 1, 30
DRAWN_ANEW = (
    *("05.carry_functions", "06.function_told"),
    *("07.told", "07.one_vector", "07.vector_works"),
)
Values = dict[str, list[float]]  # by claim, one for each repetition
EDIT: list[Callable[[int, Tensor, Tensor], Tensor]] = []  # of (layer, attention, values)


def attention(module, query, key, value, mask, scaling, **_):  # type: ignore[no-untyped-def]
    """Hugging Face's eager attention, with ``EDIT`` between softmax and values."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scaling
    if mask is not None:
        scores = scores + mask[..., : key.shape[-2]]
    weights = scores.softmax(-1)
    for edit in EDIT:
        weights = edit(module.layer_idx, weights, value)
    return (weights @ value).transpose(1, 2).contiguous(), weights


modeling_llama.eager_attention_forward = attention
MODEL = AutoModelForCausalLM.from_pretrained(
    FOLDER, dtype=torch.float32, attn_implementation="eager"
).requires_grad_(False)
WORDS = AutoTokenizer.from_pretrained(FOLDER)


def ids(text: str) -> list[int]:
    """Tokens of a text, without any special ones."""
    return WORDS(text, add_special_tokens=False)["input_ids"]


def seeded(purpose: str) -> torch.Generator:
    """The book's generator for a purpose, at seed 0."""
    return torch.Generator().manual_seed(zlib.crc32(f"{purpose}/0/0".encode()))


def copies(generator: torch.Generator, count: int, length: int, distinct: bool) -> Tensor:
    """BOS and random tokens, twice."""
    if distinct:
        drawn = torch.rand(count, VOCAB - 1, generator=generator).argsort(-1)[:, :length]
    else:
        drawn = torch.randint(0, VOCAB - 1, (count, length), generator=generator)
    drawn = drawn + (drawn >= BOS).long()
    return torch.cat([torch.full((count, 1), BOS), drawn, drawn], 1)


def logits(tokens: Tensor, *edits: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """Logits of all positions, sequence by sequence."""
    EDIT[:] = edits
    try:
        return torch.cat([MODEL(row[None]).logits for row in tokens])
    finally:
        EDIT.clear()


def patterns(tokens: Tensor) -> Iterator[Tensor]:
    """Attention of each sequence: (layer, head, dest, src)."""
    for row in tokens:
        yield torch.cat(MODEL(row[None], output_attentions=True).attentions)


# Chapter 01: repeated tokens


def repeated() -> Values:
    """Accuracy on the second copy, and the best heads of two kinds."""
    size = 50
    tokens = copies(seeded("doubled"), 8, size, distinct=False)
    right = logits(tokens).argmax(-1)[:, :-1] == tokens[:, 1:]
    second = range(size + 1, 2 * size + 1)
    prefix, previous = [], []
    for pattern in patterns(tokens):
        prefix.append(torch.stack([pattern[..., q, q - size + 1] for q in second]).mean(0))
        previous.append(pattern.diagonal(-1, -2, -1).mean(-1))
    matching, before = torch.stack(prefix), torch.stack(previous)
    best = divmod(int(matching.mean(0).argmax()), 9)
    below = divmod(int(before.mean(0)[: best[0]].argmax()), 9)
    return {
        "01.second_half_accuracy": right[:, size : 2 * size].double().mean(1).tolist(),
        "01.prefix_best": matching[:, best[0], best[1]].tolist(),
        "01.previous_best": before[:, below[0], below[1]].tolist(),
    }


# Chapter 02: our own sentences

TEXTS = {  # cue of a text, of an answer
    "sentiment": ("Review:", "Sentiment:", "Negative Positive"),
    "subjects": ("Text:", "Subject:", "Sports Food Music Money"),
}
NONSENSE = ["foo", "bar", "lum", "vel", "mur", "tam"]


def sentences(task: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Rows to show and rows to ask about: of every class in turn."""
    names, parts, seen = TEXTS[task][2].split(), ([], []), {}
    for line in (DATA / f"texts/{task}.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        label, text = line.split("\t")
        number = seen[label] = seen.get(label, -1) + 1
        parts[number % 2].append((text, names.index(label)))
    return parts


def written(task: str, shown: list[tuple[str, int]], query: str, labels: list[str]) -> str:
    """A prompt."""
    cue, answer, _ = TEXTS[task]
    lines = [f"{cue} {text}\n{answer} {labels[label]}\n" for text, label in shown]
    return "".join([*lines, f"{cue} {query}\n{answer}"])


def shuffled(rows: list[tuple[str, int]], classes: int, shots: int, seed: int) -> list:
    """The demonstrations of a set: the first of each class in a shuffled order."""
    order, taken, shown = list(range(len(rows))), [0] * classes, []
    np.random.RandomState(seed).shuffle(order)
    for text, label in (rows[i] for i in order):
        if taken[label] < shots:
            taken[label] += 1
            shown.append((text, label))
    return shown


def labelled(kind: str, queries: int = 8, shots: int = 4) -> list[float]:
    """Over five sets: accuracy less chance with meaningless labels, or for swapped ones the share
    of answers by the words' meaning less that by the context; logits centred in every set."""
    found = []
    for task in TEXTS:
        show, ask = sentences(task)
        own = TEXTS[task][2].split()
        count = len(own)
        labels = [*own[1:], own[0]] if kind == "swapped" else NONSENSE[:count]
        first = torch.tensor([ids(f" {word}")[0] for word in labels])
        sets = []
        for seed in range(42, 47):
            shown = shuffled(show, count, shots, seed)
            asked = [ask[i] for i in np.random.default_rng(seed).permutation(len(ask))[:queries]]
            scores = after([written(task, shown, text, labels) for text, _ in asked])[:, first]
            gold = torch.tensor([label for _, label in asked])
            guess = (scores - scores.mean(0)).argmax(-1)
            right = (guess == gold).double().mean()
            meant = (guess == (gold - 1) % count).double().mean()
            sets.append(float(meant - right if kind == "swapped" else right - 1 / count))
        found.append(sets)
    return np.mean(found, 0).tolist()


def after(prompts: list[str]) -> Tensor:
    """Logits after prompts that begin alike, whose beginning is read once."""
    tokens = [ids(text) for text in prompts]
    same = next(i for i, column in enumerate(zip(*tokens, strict=False)) if len(set(column)) > 1)
    cache = MODEL(torch.tensor([tokens[0][:same]]), use_cache=True).past_key_values
    found = []
    for row in tokens:
        held = copy.deepcopy(cache)
        found.append(MODEL(torch.tensor([row[same:]]), past_key_values=held).logits[0, -1])
    return torch.stack(found)


def gathering(prompts: int = 10) -> list[float]:
    """By how much S_wp leads in the first layer, over fifths of the prompts of each set."""
    leads = []
    for task in TEXTS:
        show, ask = sentences(task)
        labels = TEXTS[task][2].split()
        first = torch.tensor([ids(f" {word}")[0] for word in labels])
        kinds = []
        for seed in range(42, 47):
            rows = np.random.default_rng(seed).permutation(len(ask))[: math.ceil(prompts / 5)]
            order = np.random.default_rng(seed).permutation(len(labels))
            draw = np.random.RandomState(seed)
            of_class = [[i for i, (_, c) in enumerate(show) if c == k] for k in range(len(labels))]
            for row in rows:
                drawn = np.concatenate([draw.choice(same, 1) for same in of_class])
                text, gold = ask[row]
                shown = [show[i] for i in drawn[order]]
                kinds.append(first_layer(written(task, shown, text, labels), first, gold))
        fifths = [np.mean(part, 0) for part in np.array_split(np.array(kinds), 5)]
        leads.append([(k[0] - max(k[1:])) / k.sum() for k in fifths])
    return np.mean(leads, 0).tolist()


def first_layer(text: str, labels: Tensor, gold: int) -> tuple[float, ...]:
    """Saliency per edge in layer 0: into label words, from them to the target, all others."""
    tokens = torch.tensor([ids(text)])
    held: list[Tensor] = []

    def watch(layer: int, weights: Tensor, value: Tensor) -> Tensor:
        if layer == 0:
            held.append(weights.detach().requires_grad_())
            return held[0]
        return weights

    EDIT[:] = [watch]
    with torch.enable_grad():
        scores = MODEL(tokens).logits[0, -1, labels]
        (gradient,) = torch.autograd.grad(-scores.log_softmax(-1)[gold], held)
    EDIT.clear()
    flow = (held[0].detach() * gradient)[0].sum(0).abs().tril(-1)
    size = len(flow)
    label = torch.isin(tokens[0], labels)
    label[-1] = False
    below = torch.ones(size, size).tril(-1).bool()
    into = below & label[:, None]
    read = torch.zeros_like(below)
    read[-1] = label
    return tuple(float(flow[k].mean()) for k in (into, read, below & ~into & ~read))


def anchors() -> Values:
    """Gathering in the first layer, labels without a meaning, and swapped ones."""
    return {
        "02.swp_shallow": gathering(),
        "02.meaningless_learned": labelled("meaningless"),
        "02.prior_wins": labelled("swapped"),
    }


# Chapter 03: numbers as text


def numbers(count: int = 64, pairs: int = 25) -> Values:
    """The share of the variance of y that is missed, and how sure a number comes."""
    draw, digits = seeded("told"), [ids(str(i))[0] for i in range(10)]
    drawn = (torch.rand(count, pairs, 1, generator=draw) - 0.5) * math.sqrt(12)
    slopes = torch.rand(count, 1, generator=draw) * 2 - 1
    places = [-math.sqrt(3) + i * 2 * math.sqrt(3) / 9 for i in range(10)]

    def nearest(value: float) -> int:
        return min(range(10), key=lambda i: abs(places[i] - value))

    said, sure, truth = [], [], []
    for slope, row in zip(slopes[:, 0].tolist(), drawn[..., 0].tolist(), strict=True):
        text, ys = "", []
        for number in row:
            x = nearest(number)
            ys.append(nearest(slope * places[x]))
            text += f"{x} -> {ys[-1]}\n"
        tokens = ids(text)
        arrow = ids(" -> ")
        at = [i for i in range(len(tokens)) if tokens[max(0, i - len(arrow) + 1) : i + 1] == arrow]
        p = logits(torch.tensor([tokens]))[0, at].double().softmax(-1)[:, digits]
        sure.append(p.sum(-1))
        said.append((p / p.sum(-1, keepdim=True)) @ torch.tensor(places, dtype=torch.double))
        truth.append(torch.tensor([places[y] for y in ys], dtype=torch.double))
    y = torch.stack(truth)
    spread = (y - y.mean()).square().mean()
    missed = (torch.stack(said) - y).square() / spread
    return {
        "03.text_regresses": missed[:, 9:13].mean(1).tolist(),
        "03.text_constant": (missed - y.square() / spread)[:, 1:3].mean(1).tolist(),
        "03.text_number": torch.stack(sure)[:, 1:13].mean(1).tolist(),
    }


# Functions between words

TABLES = {
    "verbs": ("past", "gerund", "third-person"),
    "nouns": ("plural", "kind", "first-letter"),
    "adjectives": ("comparative", "superlative"),
    "countries": ("capital", "language"),
    "opposites": ("opposite",),
}


def pairs(function: str) -> tuple[dict[str, str], dict[str, str]]:
    """Words and answers of a function: those to show, and every third, held out."""
    table = next(name for name, columns in TABLES.items() if function in columns)
    lines = (DATA / f"words/{table}.tsv").read_text(encoding="utf-8").splitlines()
    head, *rows = [line.split("\t") for line in lines]
    found = [(r[0], r[head.index(function)] if function in head else r[0][0]) for r in rows]
    found = [pair for pair in found if pair[1] != "-"]
    held = [i % 3 == 2 for i in range(len(found))]
    parts = [[p for p, out in zip(found, held, strict=True) if out == asked] for asked in (0, 1)]
    return dict(parts[0]), dict(parts[1])


# Chapter 05: steps of heads

FUNCTIONS = (
    *("third-person", "gerund", "plural", "past", "first-letter"),
    *("capital", "opposite", "language", "kind"),
)


def without(cut: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    """All heads at the last position without what some tokens give them."""

    def edit(layer: int, weights: Tensor, value: Tensor) -> Tensor:
        weights = weights.clone()
        weights[:, :, -1, cut] = 0
        return weights

    return edit


def carried(function: str, count: int = 16) -> tuple[bool, float]:
    """Whether five examples teach a function to within two standard errors, and of right answers
    (their first tokens) the share that is right without what the examples give to the arrow."""
    shown, held = (list(part.items()) for part in pairs(function))
    draw, found = random.Random(function), []
    for query, answer in draw.choices(held, k=count):
        fitting = [p for p in shown if p[1] != answer and query not in p and p[0] != answer]
        examples: dict[int, tuple[str, str]] = {}
        for pair in draw.sample(fitting, len(fitting)):
            if len(examples) < 5:
                examples.setdefault(ids(f" {pair[1]}")[0], pair)
        before = ids("".join(f"{word} -> {what}\n" for word, what in examples.values()))
        tokens = torch.tensor([before + ids(f"{query} ->")])
        cut = torch.arange(tokens.shape[1]) < len(before)
        wanted = ids(f" {answer}")[0]
        found.append(
            [int(logits(tokens, *e)[0, -1].argmax()) == wanted for e in ((), (without(cut),))]
        )
    whole, left = torch.tensor(found).double().unbind(1)
    error = whole.std() / math.sqrt(count)
    return bool(whole.mean() > 2 * error), float((whole * left).sum() / whole.sum())


def steps() -> Values:
    """Of right answers when copying, those right without the examples, or without all else."""
    size = 50
    tokens = copies(seeded("copying"), 40, size, distinct=True)
    end = size + size // 2 + 1
    shown = torch.zeros(end, dtype=torch.bool)
    shown[1 : size + 1] = True
    answers = tokens[:, end]

    def right(*edits: Callable) -> Tensor:
        found = [logits(row[None], *edits)[0, -1].argmax() for row in tokens[:, :end]]
        return torch.stack(found) == answers

    whole = right()
    kept = {name: carried(name) for name in FUNCTIONS}
    able = [left for sure, left in kept.values() if sure]
    return {
        "05.carry_functions": able,
        "05.carry_copying": right(without(shown))[whole].double().tolist(),
        "05.start_idle_copying": right(without(~shown))[whole].double().tolist(),
    }


# Chapter 06: the circuit of copying, and functions between words

PAIRS = (  # of functions on the same words
    *(("past", "gerund"), ("gerund", "third-person"), ("third-person", "past")),
    *(("plural", "kind"), ("kind", "first-letter"), ("first-letter", "plural")),
    *(("comparative", "superlative"), ("superlative", "comparative")),
)


def told(function: str, partner: str, count: int = 12) -> float:
    """How often five examples of each of two functions decide which of both answers is likelier."""
    decided = []
    for *both, word, mine, other in asked(
        function, partner, count, random.Random(f"{function} {partner}")
    ):
        first = [ids(answer)[0] for answer in (mine, other)]
        scores = [logits(torch.tensor([ids(f"{text}{word} ->")]))[0, -1, first] for text in both]
        decided.append([bool(a > b) for a, b in scores] == [True, False])
    return statistics.fmean(decided)


def circuits() -> Values:
    """The behaviour, and where heads look."""
    size, draw = 12, seeded("sequences")
    clean, other = copies(draw, 6, size, distinct=True), copies(draw, 6, size, distinct=True)
    corrupt = clean.clone()
    corrupt[:, 1 : size + 1] = other[:, 1 : size + 1]
    at, choices = range(size + 1, 2 * size), clean[:, size + 1 :]

    def score(tokens: Tensor) -> Tensor:
        found = logits(tokens).gather(-1, choices[:, None].expand(-1, tokens.shape[1], -1))
        log_p = found.log_softmax(-1)
        return torch.stack([log_p[:, t, t - size] for t in at]).mean(0)

    tokens = copies(seeded("patterns"), 30, size, distinct=True)
    far, place = [], torch.arange(2 * size)
    back = (place[:, None] - place).clamp(min=0)
    for pattern in patterns(tokens):
        rest = pattern[..., 1:, 1:]
        far.append((rest * back).sum((-2, -1)) / rest.sum((-2, -1)))
    layer = torch.arange(LAYERS)[:, None].expand(LAYERS, 9)
    ranks = [spearmanr(layer.flatten(), row.flatten()).statistic for row in far]
    return {
        "06.behaviour_gap": (score(clean) - score(corrupt)).tolist(),
        "06.low_is_local": ranks,
        "06.function_told": [told(*pair) for pair in PAIRS],
    }


# Chapter 07: functions between words, and the vector that carries them

RIVALS = (  # functions, each with another one on the same words
    *(("past", "gerund"), ("gerund", "third-person"), ("third-person", "past")),
    *(("comparative", "superlative"), ("superlative", "comparative")),
)
DEEP = 20  # layer after which the vector is read


def asked(function: str, rival: str, count: int, draw: random.Random) -> list[tuple[str, ...]]:
    """Prompts of a function and of its rival without the last word; that word; both answers."""
    parts = []
    for mine, theirs in zip(pairs(function), pairs(rival), strict=True):
        rows = [(w, f" {mine[w]}", f" {theirs[w]}") for w in mine if w in theirs]
        parts.append([r for r in rows if r[1] != r[2] and all(len(ids(x)) == 1 for x in r)])
    found = []
    for _ in range(count):
        shown, query = draw.sample(parts[0], 5), draw.choice(parts[1])
        both = ("".join(f"{row[0]} ->{row[c]}\n" for row in shown) for c in (1, 2))
        found.append((*both, *query))
    return found


def at_arrow(text: str, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The state after ``DEEP`` at the last token, and its logits; with a vector added there."""

    def add(module, inputs, output):  # type: ignore[no-untyped-def]
        state = output[0] if isinstance(output, tuple) else output
        if added is not None:
            state[:, -1] += added
        seen.append(state[0, -1].clone())

    seen: list[Tensor] = []
    handle = MODEL.model.layers[DEEP].register_forward_hook(add)
    try:
        out = MODEL(torch.tensor([ids(text)])).logits[0, -1]
    finally:
        handle.remove()
    return seen[0], out


def vector(function: str, rival: str, count: int = 12) -> tuple[float, float, float]:
    """How often examples decide; the common share of what they change; accuracy with the vector,
    over that with examples, on other prompts."""
    draw, decided, changes, shift = random.Random(f"{function} {rival} 07"), [], [], []
    for clean, corrupt, word, *answers in asked(function, rival, count, draw):
        first = [ids(answer)[0] for answer in answers]
        state, mine = at_arrow(f"{clean}{word} ->")
        other, theirs = at_arrow(f"{corrupt}{word} ->")
        decided.append(
            bool(mine[first[0]] > mine[first[1]] and theirs[first[0]] < theirs[first[1]])
        )
        changes.append((state - other).double())
        shift.append(state - at_arrow(f"\n{word} ->")[0])
    inner = torch.stack(changes) @ torch.stack(changes).T
    share = (inner.sum() - inner.trace()) / (count - 1) / inner.trace()
    full, right = torch.stack(shift).mean(0), []
    for clean, _, word, answer, _ in asked(function, rival, count, draw):
        gold = ids(answer)[0]
        both = at_arrow(f"\n{word} ->", full)[1], at_arrow(f"{clean}{word} ->")[1]
        right.append([int(x.argmax()) == gold for x in both])
    added, shown = (sum(column) for column in zip(*right, strict=True))
    return statistics.fmean(decided), float(share), added / shown


def lenses() -> Values:
    """The prompt and its vector."""
    names = "07.told", "07.one_vector", "07.vector_works"
    found = zip(*(vector(*both) for both in RIVALS), strict=True)
    return {name: list(values) for name, values in zip(names, found, strict=True)}


CHAPTERS = {"01": repeated, "02": anchors, "03": numbers, "05": steps, "06": circuits, "07": lenses}


def main() -> None:
    """Compute, compare and say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", default=list(CHAPTERS))
    failed = 0
    with torch.no_grad():
        for chapter in parser.parse_args().chapters:
            for claim, values in CHAPTERS[chapter]().items():
                mean = statistics.fmean(values)
                error = statistics.stdev(values) / math.sqrt(len(values))
                path = ROOT / f"book/results/real/{claim}.json"
                if not path.is_file():
                    print(f"no result  {claim}: here {mean:.4g} ± {error:.2g}", flush=True)
                    continue
                there = json.loads(path.read_text(encoding="utf-8"))
                allowed = ROUNDING
                if claim in DRAWN_ANEW:
                    allowed += 2 * math.hypot(error, there["spread"])
                far = abs(mean - there["value"]) > allowed
                failed += far
                print(
                    f"{'DIFFERS' if far else 'agrees':<10} {claim}: here {mean:.4g} ± {error:.2g}, "
                    f"there {there['value']:.4g} ± {there['spread']:.2g}",
                    flush=True,
                )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
