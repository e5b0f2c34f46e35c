"""Chapter 02's gathering and reading on six sets of texts, three of others, against wrong tokens.

SmolLM2, one example of each class. For every set of texts: the lead of S_wp in layer 0, and the
share at the target in the deeper half, of the label words and of each wrong token that is taken
for them (``isolation.wrong_positions``). Rows of SST-2, TREC and AG News are read from
``ICLUTILS_DATA`` or the hub.

    ICLUTILS_DATA=folder python benchmarks/label_words.py
"""

import torch
from common import options

from iclutils import models
from iclutils.chapters.label_anchors import isolation, saliency
from iclutils.interp.statistics import mean_se
from iclutils.tasks import generator
from iclutils.tasks.sources import open_source

SETS = "sentiment,subjects,questions,sst2,trec,ag_news"


def measured(flow):
    """Lead of S_wp in layer 0, and the mean share at the target in the deeper half."""
    into, *others = flow.relative[0].tolist()
    deep = flow.at_target[len(flow.at_target) // 2 :]
    return [into - max(others), deep.mean().item()]


def main():
    """Measure, set by set."""
    given = options(__doc__, sets=(SETS, "text sets"), prompts=(20, "of each set"))
    model, found = models.load("smollm2"), dict[str, list[list[float]]]()
    for name in given.sets.split(","):
        prompts = open_source(name, model).varied(given.prompts)
        places = {"label word": prompts.label_pos}
        places |= isolation.wrong_positions(prompts, generator("wrong tokens", 0, 0))
        for token, flow in saliency.flows(model, prompts, places, batch_size=5).items():
            found.setdefault(token, []).append(measured(flow))
            print(f"{name:10} {token:12} {found[token][-1][0]:6.2f} {found[token][-1][1]:6.2f}")
    values = {token: torch.tensor(each) for token, each in found.items()}  # (set, measure)
    label = values.pop("label word")
    most = torch.stack([*values.values()]).amax(0)
    for what, of in (("label word", label), ("less the most of a wrong token", label - most)):
        shown = ["{:.2f} ± {:.2f}".format(*mean_se(column)) for column in of.T]
        print(f"{what}: {', '.join(shown)} ({len(of)} sets)")


if __name__ == "__main__":
    main()
