"""Give prompts of one function the updates or starts of another, and see whose answer comes.

Functions of one word list can be asked of the same words: *play* has a past tense and an *-ing*
form. So an answer that is wrong for a prompt's own examples may be right for the other function."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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


def _families(
    cases: Mapping[Asked, Case], prompts: Mapping[Asked, Prompts]
) -> Iterator[tuple[Asked, list[str], dict[Asked, list[str]], PreTrainedTokenizerBase]]:
    """Yield each case whose function shares its word list with others: its name, these others, the
    words that the prompts of each case ask, and the tokenizer."""
    readers = {key: text_tokenizer(case.query.model) for key, case in cases.items()}
    words = {key: asked(prompts[key], readers[key]) for key in cases}
    for model, own in cases:
        alike = [f for m, f in cases if m == model and FUNCTIONS[f][0] == FUNCTIONS[own][0]]
        if family := [f for f in alike if f != own]:
            yield (model, own), family, words, readers[model, own]


def exchange_updates(
    cases: Mapping[Asked, Case], duals: Mapping[Asked, DualHeads], prompts: Mapping[Asked, Prompts]
) -> list[dict[str, Any]]:
    """Put the mean update of every function into prompts of every other, and return the counts of
    ``count_answers`` for all functions that share a word list. The mean is over prompts that ask
    another word, so it cannot hold the answer; no prompt shows a word that another asks. For the
    word that is asked, see ``exchange_starts``."""
    rows = []
    for (model, own), family, words, tokenizer in _families(cases, prompts):
        query, demos, *_ = cases[model, own]
        mine, said = words[model, own], {}
        for there in ((m, f) for m, f in cases if m == model and f != own):
            mean = mean_elsewhere(duals[there].update, words[there], mine)
            said[there[1]] = query.reread(replace_part(query, demos, "update", mean)).argmax(-1)
        right = {name: answers(name, mine, tokenizer).to(query.at) for name in (own, *family)}
        rows += count_answers(said, own, right, query.logits.argmax(-1))
    return rows


def exchange_starts(
    cases: Mapping[Asked, Case], duals: Mapping[Asked, DualHeads], prompts: Mapping[Asked, Prompts]
) -> list[dict[str, Any]]:
    """Put into every prompt the start of a prompt of another function that asks another word, and
    count the answers, for all functions that share a word list.

    Of each pair of functions: the prompts that count (``of``: the own answers to both words, and
    the other prompt's answer, are three), the own answers to the other word (``word``; without an
    exchange ``unchanged``), to the own word (``kept``), and the answers of the other prompt
    (``both``: word and form)."""
    rows = []
    for (model, own), family, words, tokenizer in _families(cases, prompts):
        query, demos, *_ = cases[model, own]
        mine, whole = words[model, own], query.logits.argmax(-1)
        for name in family:
            theirs = words[model, name]
            n = len(theirs)
            givers = [  # of each prompt, the next one that asks another word
                next(k % n for k in range(i + 1, i + 1 + n) if theirs[k % n] != word)
                for i, word in enumerate(mine)
            ]
            given = [theirs[k] for k in givers]
            starts = duals[model, name].start[givers]
            said = query.reread(replace_part(query, demos, "start", starts)).argmax(-1)
            pairs = (own, mine), (own, given), (name, given)
            old, word, both = (answers(f, of, tokenizer).to(query.at) for f, of in pairs)
            can = (word >= 0) & (word != old) & (word != both) & (both != old)
            row = {"prompts": own, "start": name, "of": int(can.sum())}
            counted = {"word": word, "both": both, "kept": old}
            row |= {k: int((said == one)[can].sum()) for k, one in counted.items()}
            rows.append(row | {"unchanged": int((whole == word)[can].sum())})
    return rows


def told(rows: Sequence[Mapping[str, Any]], *counts: str) -> dict[str, Any]:
    """Return what is stored of an exchange: its rows, and the sums of their ``counts`` in words."""
    asked_in_all = sum(row["of"] for row in rows)
    sums = {name: sum(row[name] for row in rows) for name in counts}
    words = {f"{name}_in_all": f"{n:.0f} of {asked_in_all}" for name, n in sums.items()}
    return {"exchanged": rows} | words
