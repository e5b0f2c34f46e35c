"""Chapter 07: lenses on a function between words, and the heads they mark removed."""

import torch
from alone import BLOCKS, MODEL, SIZE, UNEMBED, ids, instead, run, write, write_of

LINES = "walk walked walking,play played playing,call called calling,help helped helping,"
LINES += "open opened opening,jump jumped jumping,start started starting,look looked looking"
VERBS = [line.split() for line in LINES.split(",")]
SHOWN, ASKED = ((0, 1, 2), (3, 4, 1), (5, 2, 0)), (6, 7, 3)
READER, SET, DEEP, EARLY = (18, 6), [(17, 3), (17, 4), (17, 5), (18, 6)], 20, 14
COUNT, LINE = 3, 4  # examples; tokens of ``word -> answer \n``


def sequence(shown, asked, column):
    lines = [f"{VERBS[i][0]} -> {VERBS[i][column]}\n" for i in shown]
    tokens = ids("".join(lines) + f"{VERBS[asked][0]} ->")
    assert len(tokens) == COUNT * LINE + 2
    return tokens


clean, corrupt = (
    torch.tensor([sequence(s, a, column) for s, a in zip(SHOWN, ASKED, strict=True)])
    for column in (1, 2)
)
choices = torch.tensor([[ids(f" {VERBS[a][c]}")[0] for c in (1, 2)] for a in ASKED])
cues = 1 + LINE * torch.arange(COUNT)
example = (torch.arange(clean.shape[1])[:, None] > cues + 1).sum(1)
shown = example < COUNT


def margin(logits):
    found = logits[:, -1].gather(1, choices)
    return found[:, 0] - found[:, 1]


def taken_out(gone):
    return clean[:, ~gone]


logits, seen = run(clean)
others, before = run(corrupt)
layer, head = READER

# the circuit lens: slopes of the margin, halfway from the corrupt embedding and at the clean one
slopes = torch.zeros_like(seen["z", layer])
for part in (0.5, 1.0):
    start = torch.lerp(before["resid", -1], seen["resid", -1], part).requires_grad_()
    out, held = run(clean, {("resid", -1): lambda x, start=start: start})
    slopes += torch.autograd.grad(margin(out).sum(), held["z", layer])[0] / 2
felt = (slopes * (seen["z", layer] - before["z", layer])).sum((2, 3))[:, head]

anchors = seen["weights", layer][:, head, -1, cues + 1].sum(-1)
bare, plain = run(taken_out(shown))  # without examples
change = seen["resid", DEEP][:, -1] - plain["resid", DEEP][:, -1]
common = change.mean(0)
wrote = write_of(seen, *READER)[:, -1] - write_of(plain, *READER)[:, -1]
inner = change.double() @ change.double().T

scale = (seen["resid", 29][:, -1].square().mean(-1) + MODEL.config.rms_norm_eps).sqrt()
towards = (UNEMBED[choices[:, 0]] - UNEMBED[choices[:, 1]]) * MODEL.model.norm.weight
towards = towards / scale[:, None]
columns = BLOCKS[layer].self_attn.o_proj.weight[:, head * SIZE : (head + 1) * SIZE]
moved = seen["weights", layer][:, head, -1, :, None] * seen["v", layer][:, head] @ columns.T
steps = (moved * towards[:, None]).sum(-1)


left_out = torch.stack([margin(run(taken_out(example == i))[0]) for i in range(COUNT)], 1)
vector = (seen["resid", EARLY][:, -1] - plain["resid", EARLY][:, -1]).mean(0)


def added(state):
    state = state.clone()
    state[:, -1] += vector
    return state


steered = run(taken_out(shown), {("resid", EARLY): added})[0]


def at_last(layer, head):  # their mean on the other side, at the last token alone
    z, other = (x["z", layer][:, head] for x in (seen, before))
    return torch.cat([z[:, :-1], other[:, -1:].mean(0, keepdim=True).expand_as(z[:, -1:])], 1)


ways = {
    "resample": instead(SET, lambda la, h: before["z", la][:, h]),
    "zero": instead(SET, lambda la, h: torch.zeros(SIZE)),
    "mean": instead(SET, lambda la, h: before["z", la][:, h].mean((0, 1))),
    "mlp": {("mlp", DEEP): lambda x: before["mlp", DEEP]},
    "last": instead(SET, at_last),
}
without = {name: run(clean, edits)[0] for name, edits in ways.items()}
removed = {name: margin(logits) for name, logits in without.items()}
of_mean = without["mean"][:, -1].softmax(-1).gather(1, choices[:, :1])[:, 0]


given = {"clean": clean, "corrupt": corrupt, "choices": choices}
given |= {"example": example.expand_as(clean), "cues": cues.expand(len(clean), -1)}
given |= {"heads": [list(each) for each in SET]}
expected = {
    "margin": margin(logits),
    "margin of the corrupt side": margin(others),
    "circuit 18.6": felt,
    "anchors 18.6": anchors,
    "vector 18.6": wrote @ (common / common.square().sum()),
    "dual 18.6": (steps * shown).sum(1),
    "common share after layer 20": ((inner.sum() - inner.trace()) / 2 / inner.trace()).item(),
    "lost without each example": margin(logits)[:, None] - left_out,
    "task vector after layer 14": vector[:4],
    "margin with the vector": margin(steered),
    "margin of the bare prompt": margin(bare),
    "margin without four heads, resampled": removed["resample"],
    "margin without four heads, zero": removed["zero"],
    "margin without four heads, mean over the other side": removed["mean"],
    "probability without four heads, mean over the other side": of_mean,
    "margin without MLP 20": removed["mlp"],
    "margin with the other side's mean of four heads at the last token": removed["last"],
}
write(__file__, given, expected)
