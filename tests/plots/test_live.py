"""The live figure of a reader's own network: what a cell hands over, what the browser shows."""

import numpy as np
import pytest
import torch
from reader import Reader, soon
from transformers import GPT2Config, GPT2LMHeadModel

from iclutils.errors import IclError
from iclutils.plots import live

anywidget = pytest.importorskip("anywidget")

TOKENS = [1, 5, 9, 7, 5, 9, 7]
NAMES = [f"<{i}>" for i in range(20)]


def tiny(**changes):
    torch.manual_seed(3)
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 20}
    return GPT2LMHeadModel(GPT2Config(**sizes | changes)).eval()


def test_the_weights_of_a_network_are_handed_over():
    net = tiny()
    figure = live.heads(net, TOKENS, NAMES)
    assert (figure.part["config"]["tokens"], figure.part["config"]["names"]) == (TOKENS, NAMES)
    numbers, state = np.frombuffer(figure.weights, np.float32), net.state_dict()
    at = {}
    for name, *shape in figure.part["tensors"]:
        at[name], numbers = numbers[: np.prod(shape)].reshape(shape), numbers[np.prod(shape) :]
    assert len(numbers) == 0
    assert len(at) == len(state) - 1, "all but the logits' weights, which are the embedding's"
    assert (at["blocks.2.qkv.weight"] == state["transformer.h.2.attn.c_attn.weight"].numpy()).all()


@pytest.mark.parametrize(
    ("net", "tokens", "says"),
    [
        (lambda: tiny(n_embd=512, vocab_size=6000), TOKENS, "million weights"),
        (lambda: tiny(activation_function="relu"), TOKENS, "with gelu_new"),
        (lambda: torch.nn.Linear(2, 2), TOKENS, "not a Linear"),
        (tiny, [1], "There are 1 tokens; the figure shows 2 to 12"),
        (tiny, [1, 20], "ids from 0 to 19"),
    ],
)
def test_what_the_figure_cannot_show_is_refused_in_a_sentence(net, tokens, says):
    with pytest.raises(IclError, match=says):
        live.heads(net(), tokens)


PAGE = """<!doctype html><html lang="en"><style>{css}</style><body><div id="cell"></div>
<script type="module">{module}</script></body></html>"""
CALL = """
const bytes = Uint8Array.from(atob("{data}"), (c) => c.charCodeAt(0));
const held = {{ part: {part}, weights: new DataView(bytes.buffer) }};
figure.render({{ model: {{ get: (name) => held[name] }}, el: document.getElementById("cell") }});
"""


@pytest.mark.browser
def test_a_notebook_shows_the_network_and_its_heads_can_be_switched_off(browser, tmp_path):
    """The module is called as anywidget calls it, with a network of 3 layers of 2 heads."""
    import base64
    import json

    net = tiny()
    figure = live.heads(net, TOKENS, NAMES)
    module = figure._esm.replace("export default {", "const figure = {")
    data = base64.b64encode(figure.weights).decode()
    call = CALL.format(data=data, part=json.dumps(figure.part))
    (tmp_path / "page.html").write_text(PAGE.format(css=figure._css, module=module + call))
    reader = Reader(browser.new_page(), tmp_path)
    tab = reader.open("page")
    tab.locator(".live-on").wait_for()
    heads = tab.get_by_role("group", name="Switch heads off")
    assert heads.locator("input").count() == 6

    def guesses():
        return [text.split(" ")[0] for text in tab.locator(".live-cell i").all_inner_texts()]

    def by_pytorch(head=None):
        def off(module, inputs):
            z = inputs[0].clone()
            z[..., 8:] = 0  # the second of two heads
            return (z,)

        layer = net.transformer.h[1].attn.c_proj
        handle = layer.register_forward_pre_hook(off) if head else None
        with torch.no_grad():
            likely = net(torch.tensor([TOKENS])).logits[0].argmax(-1)
        if handle:
            handle.remove()
        return [NAMES[i] for i in likely]

    assert guesses() == by_pytorch()
    heads.get_by_label("1.1").check()
    soon(guesses, by_pytorch("1.1"))
    assert (reader.left, reader.errors) == ([], [])
