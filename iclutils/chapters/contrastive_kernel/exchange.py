"""Give prompts of one function the updates of another, and see whose answer comes.

Functions of one word list can be asked of the same words: *play* has a past tense and an *-ing*
form. So an answer that is wrong for a prompt's own examples may be right for the other function."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...models import text_tokenizer
from ...tasks.prompts import Prompts
from ...tasks.words import FUNCTIONS, answers, asked
from .ablation import replace_part
from .heads import Case, DualHeads, Ids

Asked = tuple[str, str]  # a model and a function that it is asked for


def mean_elsewhere(
    parts: Float[Tensor, "other *shape"], theirs: Sequence[str], words: Sequence[str]
) -> Float[Tensor, "batch *shape"]:
    """Return for each of ``words`` the mean of the parts of prompts that ask another word
    (``theirs``: the word of each part); NaN where no prompt does. Where all ask
    different words, ``ablation.mean_of_others`` is the same and simpler."""
    is_other = torch.tensor([[word != one for one in theirs] for word in words]).to(parts)
    shares = is_other / is_other.sum(1, keepdim=True)
    return torch.einsum("bo,o...->b...", shares, parts)


def count_answers(
    said: Mapping[str, Ids], own: str, right: Mapping[str, Ids], whole: Ids
) -> list[dict[str, Any]]:
    """Count on prompts of the function ``own`` how often another function's answer is likeliest.

    ``said`` is the likeliest token with the mean update of each other function, ``whole`` without
    an exchange, ``right`` the first token of each function's answer, -1 where there is none. Of
    each other function: the prompts on which its answer begins otherwise than the own (``of``), its
    answers there with its own update (``exchanged``), without an exchange (``unchanged``), and with
    the update of one of the remaining functions, a mean over these (``third``)."""
    rows = []
    for other in right.keys() - {own}:
        can = (right[other] >= 0) & (right[other] != right[own])
        count = {name: int((x == right[other])[can].sum()) for name, x in said.items()}
        third = [n for name, n in count.items() if name != other]
        row = {"prompts": own, "update": other, "of": int(can.sum()), "exchanged": count[other]}
        row["unchanged"] = int((whole == right[other])[can].sum())
        rows.append(row | {"third": sum(third) / len(third)})
    return sorted(rows, key=lambda row: row["update"])


def exchange_updates(
    cases: Mapping[Asked, Case], duals: Mapping[Asked, DualHeads], prompts: Mapping[Asked, Prompts]
) -> list[dict[str, Any]]:
    """Put the mean update of every function into prompts of every other, and return the counts of
    ``count_answers`` for all functions that share a word list. The mean is over prompts that ask
    another word, so it cannot hold the answer; no prompt shows a word that another asks."""
    rows = []
    read = {key: text_tokenizer(case.query.model) for key, case in cases.items()}
    words = {key: asked(prompts[key], read[key]) for key in cases}
    for key, (query, demos, *_) in cases.items():
        model, own = key
        others = [name for reader, name in cases if reader == model and name != own]
        family = [name for name in others if FUNCTIONS[name][0] == FUNCTIONS[own][0]]
        if not family:
            continue
        said = {}
        for name in others:
            there = model, name
            mean = mean_elsewhere(duals[there].update, words[there], words[key])
            said[name] = query.reread(replace_part(query, demos, "update", mean)).argmax(-1)
        right = {name: answers(name, words[key], read[key]).to(query.at) for name in (own, *family)}
        rows += count_answers(said, own, right, query.logits.argmax(-1))
    return rows


def told(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is stored of ``exchange_updates``: its rows, and their sums in words."""
    asked_in_all = sum(row["of"] for row in rows)
    sums = {name: sum(row[name] for row in rows) for name in ("exchanged", "unchanged", "third")}
    words = {f"{name}_in_all": f"{n:.0f} of {asked_in_all}" for name, n in sums.items()}
    return {"exchanged": rows} | words
