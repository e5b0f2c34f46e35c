"""Chapter 05: heads as models that learn from the first copy in one step, and without that step."""

import torch
from alone import BLOCKS, LAYERS, MODEL, SIZE, UNEMBED, copies, run, write

LENGTH, (LAYER, HEAD) = 12, (18, 6)
END = LENGTH + LENGTH // 2 + 1
whole = copies(2, LENGTH, 8)
tokens, answer = whole[:, :END], whole[:, END]
shown = torch.arange(END).clamp(max=LENGTH) == torch.arange(END)
shown[0] = False
logits, seen = run(tokens)


def log_p(edits):
    return run(tokens, edits)[0][:, -1].log_softmax(-1).gather(1, answer[:, None])[:, 0]


def rows(change, heads=range(9), layers=range(LAYERS)):
    def edit(weights):
        weights = weights.clone()
        weights[:, list(heads), -1] = change(weights[:, list(heads), -1])
        return weights

    return {("weights", la): edit for la in layers}


def moved(layer):
    """The mean update of every head in place of each prompt's own, which is taken out."""
    row = seen["weights", layer][:, :, -1] * shown
    mean = torch.einsum("bhp,bhpe->he", row, seen["v", layer]) / len(tokens)
    return lambda z: torch.cat([z[:, :, :-1], z[:, :, -1:] + mean[:, None]], 2)


no_update, no_query = rows(lambda w: w * ~shown), rows(lambda w: w * shown)
weights, values = seen["weights", LAYER][:, HEAD, -1], seen["v", LAYER][:, HEAD]
update = (weights[..., None] * values * shown[:, None]).sum(1)

final = seen["resid", LAYERS - 1][:, -1]
scale = (final.square().mean(-1) + MODEL.config.rms_norm_eps).sqrt()
towards = UNEMBED[answer] * MODEL.model.norm.weight / scale[:, None]
out = BLOCKS[LAYER].self_attn.o_proj.weight[:, HEAD * SIZE : (HEAD + 1) * SIZE]

given = {"tokens": tokens, "answer": answer, "shown": shown.expand_as(tokens).long()}
expected = {
    "log p": log_p({}),
    "what 18.6 learns, to the logit": (update @ out.T * towards).sum(1),
    "MLP 20 to the logit": (seen["mlp", 20][:, -1] * towards).sum(1),
    "embedding to the logit": (seen["resid", -1][:, -1] * towards).sum(1),
    "logit": logits[:, -1].gather(1, answer[:, None])[:, 0],
    "log p without updates": log_p(no_update),
    "log p without starts": log_p(no_query),
    "log p with the mean update": log_p(
        {**no_update, **{("z", la): moved(la) for la in range(LAYERS)}}
    ),
    "log p without the update of 18.6": log_p(
        rows(lambda w: w * ~shown, [HEAD], range(LAYER, LAYER + 1))
    ),
}
write(__file__, given, expected)
