"""Models that run in the page: their engines against PyTorch and numpy, and each figure driven as a
reader would. The pages are built for these tests, with the figures alone.

Stills are rewritten by ``ICLUTILS_STILLS=write``, which is for a change of a figure's first state.
"""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from reader import soon
from small_book import Book
from transformers import GPT2LMHeadModel

from book._ext import live
from iclutils import models, zoo
from iclutils.interp import circuit, clean_corrupt, graph, patching
from iclutils.interp.at_query import scores
from iclutils.interp.hooks import cut_attention, run_with_hooks
from iclutils.models import lsa, regressors
from iclutils.session import generator
from iclutils.tasks import topics
from iclutils.tasks.repeated import RepeatedTokens

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "book/_static"
SCRIPTS = ROOT / "iclutils/plots/live"
CASES, CLOSE = 24, 1e-3  # random cases of each model; largest difference in a logit
SHOWN = [
    pytest.param(n, marks=() if n == "induction" else pytest.mark.nightly) for n in live.FIGURES
]
GPT2 = {key: parts[0] for key, parts in live.FIGURES["induction"].items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A page for each figure."""
    book = Book(
        tmp_path_factory.mktemp("figures"),
        extensions=["myst_parser", "sphinx_book_theme", "book._ext"],
        # Given, because what is registered here would stay in Sphinx's own default.
        source_suffix={".rst": "restructuredtext", ".md": "markdown"},
        html_theme="sphinx_book_theme",
        html_static_path=[str(STATIC)],
        html_css_files=["custom.css"],
        html_context={"default_mode": "auto"},
    )
    figures = {name: f"```{{live}} {name}\nA caption.\n```\n\n" for name in live.FIGURES}
    for name, figure in figures.items():
        book.write(f"{name}.md", f"# Figure\n\n{figure}")
    assert book.build("# Figures\n\n" + figures["step"] + figures["waves"]) == ""
    return book.out


def engine(tab, key, work, given):
    """What JavaScript makes of ``given`` with the engines of the page and the networks of a script
    of weights, ``parts``: ``work`` is the body of a function of both."""
    return tab.evaluate(
        """async ([key, work, given]) =>
            new Function("parts", "given", work)(await Live.load(key), given)""",
        [key, work, given],
    )


def gpt2_logits(net, case):
    """Logits by the modules of PyTorch's network, heads ablated and key paths cut between them."""
    body, heads, width, written = net.transformer, net.config.n_head, net.config.n_embd, []
    size = width // heads
    x = body.wte.weight[case["tokens"]] + body.wpe.weight[: len(case["tokens"])]
    later = torch.ones(len(x), len(x)).triu(1).bool()
    for layer, block in enumerate(body.h):

        def split(stream, block=block):
            parts = block.attn.c_attn(block.ln_1(stream)).split(width, -1)
            return [part.unflatten(-1, (heads, size)).transpose(0, 1) for part in parts]

        (q, k, v), edges = split(x), [e for e in case["keys"] if e["to"][0] == layer]
        for head in {edge["to"][1] for edge in edges}:
            stream = x.clone()
            for below, source, z in ((*e["from"], e["z"]) for e in edges if e["to"][1] == head):
                rows = body.h[below].attn.c_proj.weight[source * size : (source + 1) * size]
                stream += (torch.tensor(z) - written[below][source]) @ rows
            k[head] = split(stream)[1][head]
        z = (q @ k.mT / size**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
        for part in (part for part in case["ablate"] if part["layer"] == layer):
            z[part["head"]] = torch.tensor(part["z"] or 0.0)
        written.append(z)
        x = x + block.attn.c_proj(z.transpose(0, 1).flatten(1))
        x = x + block.mlp(block.ln_2(x))
    return net.lm_head(body.ln_f(x)).numpy()


def token_cases(count, seed):
    """Sequences, every other one with heads ablated, key paths cut, or both."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        n = int(draw.integers(2, 24))
        case = {"tokens": [511, *draw.integers(0, 511, n - 1).tolist()], "ablate": [], "keys": []}
        if number % 4 in (1, 3):
            layer, head = int(draw.integers(2)), int(draw.integers(4))
            z = [None, draw.normal(size=32).tolist(), draw.normal(size=(n, 32)).tolist()]
            case["ablate"] = [{"layer": layer, "head": head, "z": z[number % 3]}]
        if number % 4 in (2, 3):
            pairs = draw.choice(16, 3, replace=False)
            other = draw.normal(size=(3, n, 32)).tolist()
            case["keys"] = [
                {"from": [0, int(p // 4)], "to": [1, int(p % 4)], "z": z}
                for p, z in zip(pairs, other, strict=True)
            ]
        found.append(case)
    return found


TOKENS = """
const net = Transformer.network(parts[0]), flat = (z) => z && Float64Array.from(z.flat());
return given.map(({ tokens, ablate, keys }) => [...Gpt2.forward(net, tokens, {
  ablate: ablate.map((part) => ({ ...part, z: flat(part.z) })),
  keys: keys.map((edge) => ({ ...edge, z: flat(edge.z) })),
}).logits]);
"""


def same(reader, page, key, work, given, truth, close=CLOSE):
    """Assert that the engine gives these numbers."""
    found = engine(reader.open(page), key, work, given)
    for ours, theirs in zip(found, truth, strict=True):
        np.testing.assert_allclose(np.ravel(ours), np.ravel(theirs), rtol=0, atol=close)
    assert reader.left == reader.errors == []


BALANCED = "a1=2&b1=0&c1=0&d1=0&" + "&".join(
    f"c{i}={v}&d{i}=0&a{i}=2&b{i}=0" for i, v in ((2, -1), (3, 1), (4, -1))
)
QUICK = ("induction-3-4000",)  # the checkpoints before have the same shapes


@pytest.mark.parametrize(
    "key", [pytest.param(k, marks=() if k in QUICK else pytest.mark.nightly) for k in GPT2]
)
def test_tokens_are_read_as_by_pytorch(reader, key):
    folder, cases = zoo.folder(*GPT2[key]), token_cases(CASES, 1)
    net = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").float().eval()
    net.requires_grad_(False)
    same(reader, "induction", key, TOKENS, cases, [gpt2_logits(net, case) for case in cases])


def test_edges_of_attention_are_cut_as_in_the_package(reader):
    net, draw, cases, truth = models.load("anchors-3"), np.random.default_rng(5), [], []
    for number in range(CASES):
        n = int(draw.integers(4, 20))
        tokens = [topics.BOS, *draw.integers(0, topics.BOS, n - 1).tolist()]
        cut = {}
        if number % 2:
            for layer in draw.choice(4, 2, replace=False).tolist():
                cut[layer] = torch.tensor(draw.random((1, n, n)) < 0.3).tril(-1)
        edges = [{"layer": la, "edges": m[0].nonzero().tolist()} for la, m in cut.items()]
        cases.append([tokens, edges])
        out = run_with_hooks(net, torch.tensor([tokens]), cut_attention(net, cut))[0]
        truth.append(out[0].detach().numpy())
    work = """const net = Transformer.network(parts[0]);
        return given.map(([tokens, cut]) => [...Gpt2.forward(net, tokens, { cut }).logits]);"""
    same(reader, "labels", "anchors-3", work, cases, truth)


def test_saliency_is_that_of_pytorch(reader):
    """In double precision, for a certain answer has next to no gradient."""
    path = zoo.folder("anchors-3")
    net = GPT2LMHeadModel.from_pretrained(path, attn_implementation="eager").double().eval()
    asked = topics.sample(CASES // 4, torch.Generator().manual_seed(8), classes=2)
    cases, truth = [], []
    for i, end in enumerate((asked.target + 1).tolist()):
        tokens, words, gold = asked.tokens[i, :end], asked.label_words[i], asked.gold[i]
        out = net(tokens[None], output_attentions=True)
        loss = torch.nn.functional.cross_entropy(out.logits[0, -1, words], gold)
        slopes = torch.autograd.grad(loss, out.attentions)
        edges = torch.cat(
            [(a * s).sum(1).abs() for a, s in zip(out.attentions, slopes, strict=True)]
        )
        truth.append((edges / edges.max()).detach().numpy())
        cases.append([tokens.tolist(), words.tolist(), int(words[gold])])
    work = """const net = Transformer.network(parts[0]);
        return given.map(([tokens, ids, answer]) => {
          const found = Gpt2.saliency(net, Gpt2.forward(net, tokens), ids, answer);
          const edges = found.flatMap((layer) => [...layer]), top = Math.max(...edges);
          return edges.map((edge) => edge / top); });"""
    same(reader, "labels", "anchors-3", work, cases, truth)


def test_circuits_are_those_of_the_package(reader):
    net, draw = models.load("anchors-3"), torch.Generator().manual_seed(7)
    task, structure = clean_corrupt.copying(net, 4, 6, draw), graph.model_graph(net)
    kept = structure.exists & (
        torch.rand(CASES // 4, *structure.exists.shape, generator=draw) < 0.8
    )
    edges = structure.edges()
    names = [[f"{u}>{v}" for (u, v) in edges if not mask[structure.index((u, v))]] for mask in kept]
    work = """const net = Transformer.network(parts[0]), { edges } = Circuit.graph(net), found = [];
        for (const cut of given.cut) given.clean.forEach((clean, i) => {
          const { writes } = Circuit.forward(net, given.corrupt[i]);
          const { logits, vocab } = Circuit.forward(net, clean, new Set(cut), writes);
          const row = (at) => [...logits.subarray(at * vocab, (at + 1) * vocab)];
          found.push(given.at[i].map(row));
        });
        return { edges, found };"""
    sides = {k: getattr(task, k).tolist() for k in ("clean", "corrupt", "at")}
    told = engine(reader.open("edges"), "anchors-3", work, sides | {"cut": names})
    assert told["edges"] == [f"{u}>{v}" for u, v in edges]
    logits = torch.tensor(told["found"]).unflatten(0, (len(kept), -1))
    assert (task.score(logits) - circuit.scores(net, task, kept)).abs().max() < CLOSE


@pytest.mark.nightly
def test_the_letters_edges_and_sequences_shown_are_those_of_the_package():
    drawn = RepeatedTokens.draw(1, 16, 512, 511, generator("by hand", 0, 0), distinct=True)
    assert str(drawn.tokens[0, 1:17].tolist()) in (SCRIPTS / "induction.js").read_text()
    net, source = models.load("anchors-3"), (SCRIPTS / "edges.js").read_text()
    ranked, asked = (
        clean_corrupt.copying(net, count, 12, generator(purpose, 0, 0))
        for purpose, count in (("ranked", 16), ("asked", 8))
    )
    for side in (asked.clean, asked.corrupt):
        assert str(side[:4, 1:13].tolist()) in source
    effects = patching.path_patching(net, ranked).mean(-1)
    order = circuit.rank_edges(effects, graph.model_graph(net))[:80]
    found = re.findall(r"[\w. ]+>[\w. ]+", source.partition("RANKED")[2].partition("FIRST")[0])
    assert [edge.strip() for edge in found] == [f"{u}>{v}" for u, v in order]


def test_pairs_are_read_as_by_pytorch(reader):
    """At every place, and many queries at once after the same pairs."""
    draw = np.random.default_rng(2)
    cases = []
    for number in range(CASES):
        n = number % 4 + 2
        xs, ys = draw.normal(size=(n, 2)), draw.normal(size=n) * (10 if number % 3 == 0 else 1)
        cases.append(
            {"xs": xs.tolist(), "ys": ys.tolist(), "queries": draw.normal(size=(5, 2)).tolist()}
        )
    work = """
        const net = Transformer.network(parts[0]), flat = (x) => Float64Array.from(x.flat());
        return given.map(({ xs, ys, queries }) => [
          ...Regressor.forward(net, flat(xs), ys),
          ...Regressor.field(net, flat(xs.slice(0, -1)), ys.slice(0, -1), flat(queries))]);
    """
    net = regressors.load("regression-d2").select(0)
    truth = []
    for case in cases:
        xs, ys, queries = (torch.tensor(case[key]).float() for key in ("xs", "ys", "queries"))
        asked = torch.cat([xs[:-1].expand(5, -1, 2), queries[:, None]], 1)
        answers = net(xs[None], ys[None])[0, 0], net(asked, ys.expand(5, -1))[0, :, -1]
        truth.append(torch.cat(answers).numpy())
    same(reader, "points", "regression-d2", work, cases, truth)


@pytest.mark.parametrize("name", ["lsa-1", "lsa-waves"])
def test_linear_attention_answers_as_in_pytorch(reader, name):
    page, part = ("step", 9) if name == "lsa-1" else ("waves", 0)
    net, draw = lsa.load(name), np.random.default_rng(3)
    xs = draw.normal(size=(CASES, 11, net.shape.dim)) * (0.3 if name == "lsa-1" else 2)
    ys = draw.normal(size=(CASES, 11))
    truth = net(torch.tensor(xs).float(), torch.tensor(ys).float())[0]
    work = f"""const net = parts[{part}], flat = (x) => Float64Array.from(x.flat());
        return given.map(([xs, ys]) => [Lsa.answer(net, flat(xs), ys)]);"""
    pairs = [[x.tolist(), y[:-1].tolist()] for x, y in zip(xs, ys, strict=True)]
    same(reader, page, name, work, pairs, list(truth.numpy()))
    if name == "lsa-1":
        work = "return [[...Lsa.stepMatrix(parts[9], 10)]]"
        same(reader, page, name, work, 0, [step_matrix(net)])


def step_matrix(net):
    """A of an answer x_q A (1/n) sum_i x_i y_i, from the weights."""
    dim, n = net.shape.dim, net.shape.pairs
    query, key, value, out = (
        net.attention[k][0, 0, 0].double().numpy() for k in ("query", "key", "value", "out")
    )
    return -n * (value @ out)[dim, dim] * (query @ key.T)[:dim, :dim]


def test_attention_of_a_toy_head_is_softmax_attention(reader):
    draw, cases, truth = np.random.default_rng(6), [], []
    work = """return given.map(([q, k, v, sharp]) => {
        const flat = (x) => Float64Array.from(x.flat());
        const m = Softmax.steps(flat(q), flat(k), flat(v), sharp);
        return [...m.weights, ...m.answers]; });"""
    for _ in range(CASES):
        sharp, q = draw.uniform(0.1, 3), draw.normal(size=2)
        k, v = draw.normal(size=(2, 5, 2)) / 2
        cases.append([q.tolist(), k.tolist(), v.tolist(), sharp])
        query, keys = (torch.tensor(x * np.sqrt(sharp * np.sqrt(2))) for x in (q, k))  # over √2
        weights = scores(query[None], keys).softmax(-1)
        each = weights.T * torch.tensor(v)
        steps = torch.cat([each[4:], each[:4]]).cumsum(0)  # the own token is the start
        truth.append(np.concatenate([x.numpy().ravel() for x in (weights, steps)]))
    same(reader, "points", "regression-d2", work, cases, truth, 1e-9)


def test_algorithms_are_those_of_numpy(reader):
    draw, cases = np.random.default_rng(4), []
    for number in range(CASES):
        n = number % 5 + 1
        xs = draw.normal(size=(n, 2))
        if number % 4 == 0:
            xs[1:] = xs[:1] * draw.normal(size=(n - 1, 1))  # on one line
        cases.append([xs.tolist(), draw.normal(size=n).tolist(), float(draw.uniform(0.05, 3))])
    work = """return given.map(([x, ys, s]) => { const xs = Float64Array.from(x.flat());
        return ["ols", "ridge", "step"].map((name) => [...Algorithms[name](xs, ys, s)]); });"""
    truth = []
    for x, y, s in cases:
        xs, ys = np.array(x), np.array(y)
        ridge = np.linalg.solve(xs.T @ xs + s * np.eye(2), xs.T @ ys)
        gradient = sum(-(yi - 0) * xi for xi, yi in zip(xs, ys, strict=True)) / len(ys)
        truth.append([np.linalg.lstsq(xs, ys, rcond=1e-6)[0], ridge, -s * gradient])
    same(reader, "points", "regression-d2", work, cases, truth, 1e-9)


# The figures, as a reader uses them --------------------------------------------------------------


def opened(reader, name, state=""):
    """A page whose figure runs, in its first state or in one that the address holds."""
    tab = reader.tab
    tab.goto("about:blank")
    tab.goto((reader.site / f"{name}.html").as_uri() + f"#live-{name}?{state}")
    tab.locator(".live-on").wait_for()
    tab.evaluate("document.querySelector('.live-more').open = true")
    return tab


def shown(tab):
    parts = (tab.locator(f".live-{part}").inner_html() for part in ("numbers", "view", "detail"))
    return "".join(parts)


def after(tab, act, *given):
    """What the figure shows once it has answered to an act."""
    drawn = tab.locator(".live-figure").get_attribute("data-drawn")
    act(*given)
    tab.wait_for_function(f"document.querySelector('.live-figure').dataset.drawn !== '{drawn}'")
    return shown(tab)


def do(tab, label, value=None):
    """Set the control of this label as a reader would; without a value, press a button."""
    form = tab.locator(".live-form")
    group, one = form.get_by_role("group", name=label), form.get_by_label(label)
    if value is None:
        form.get_by_role("button", name=label).click()
    elif group.count():
        group.first.locator(f"input[value='{value}']").check()
    elif one.evaluate("x => x.tagName") == "SELECT":
        one.select_option(value)
    else:
        one.fill(value)


def solved(tab):
    found = tab.locator(".live-tasks li").evaluate_all(
        "all => all.map(x => x.classList.contains('live-solved'))"
    )
    return [i + 1 for i, done in enumerate(found) if done]


def controls(tab):
    """One act for every control: another option, the other end, other letters."""
    acts = []
    for box in tab.locator(".live-form .live-field").all():
        kind = box.get_attribute("class").split("live-")[-1]
        inside = box.locator("input, select")
        if kind == "select":
            values = inside.locator("option").evaluate_all("all => all.map(x => x.value)")
            acts.append(
                (inside.select_option, next(v for v in values if v != inside.input_value()))
            )
        elif kind == "range":
            end = "Home" if inside.input_value() != inside.get_attribute("min") else "End"
            acts.append((inside.press, end))
        else:
            letters = "Letters" in box.inner_text()
            acts.append((inside.fill, "ABCABD" if letters else "silk loom"))
    groups = tab.locator(".live-form fieldset").all()
    return acts + [(group.locator("input:not(:checked)").first.check,) for group in groups]


@pytest.mark.parametrize("name", SHOWN)
def test_every_control_changes_the_picture(reader, name):
    """Also from the address; *Reset* brings back the first state, which is that of the still."""
    tab = opened(reader, name)
    first = shown(tab)
    numbers, view = (tab.locator(f".live-{part}").inner_html() for part in ("numbers", "view"))
    drawn = f'<div class="live-view">{view}</div>\n<dl class="live-numbers">{numbers}</dl>\n'
    path = SCRIPTS / f"stills/{name}.html"
    if os.environ.get("ICLUTILS_STILLS") == "write":
        path.write_text(drawn, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == drawn, "set ICLUTILS_STILLS=write and look at it"
    acting = {
        "induction": "off=0.2&from=0.2",
        "copies": "off=1.1",
        "labels": "cut=labels&show=attention&from=2&q=cod",
    }
    acting |= {"smoother": "point=2&sharp=1", "edges": "size=20&sequence=2"}
    acting |= {"lenses": "set=match-and-read&way=bare"}
    state = acting.get(name, "point=2&at=4&rate=1")  # in which all controls act

    def follow(link):
        return after(tab, tab.evaluate, "link => { location.hash = link; }", link)

    for number in range(len(controls(tab))):
        before = follow(f"live-{name}?{state}")
        act = controls(tab)[number]
        changed = after(tab, *act)
        assert changed != before, (number, act)
        link = tab.url.partition("#")[2]
        assert after(tab, do, tab, "Reset") == first
        assert follow(link) == changed
    assert reader.left == reader.errors == []


SCALE, CUT, LAYER, WAY, OFF = "Labels times", "Cut off from", "How long", "They write", "Switch"
BETS = {  # of each figure: which choice is right, and what the reader does to find out
    "induction": (1, [("Head to look at", "0.2")]),
    "copies": (1, [(OFF, "0.2")]),
    "labels": (0, [(CUT, "labels"), (CUT, "random")]),
    "points": (2, [("Close together",)]),
    "step": (0, [(LAYER, "9")]),
    "waves": (2, [(SCALE, "5")]),
    "smoother": (1, [(f"key, {way}", value) for at in (("0.7", "0.5"), ("2", "1.5"))
                     for way, value in zip(("across", "up"), at, strict=True)]),
    "edges": (1, [("How many", "30")]),
    "lenses": (1, [("Replace", "match-and-read"), (WAY, "bare")]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_bet_is_answered_by_what_the_reader_does(reader, name):
    """Whatever the choice, not before, and not by a state that an address has brought."""
    right, deeds = BETS[name]
    for choice in range(3):
        reader.tab.goto("about:blank")
        reader.loads.clear()
        tab = reader.open(name)
        tab.evaluate("document.querySelector('.live-more').open = true")
        buttons, told = tab.locator(".live-bet button"), tab.locator(".live-told")
        buttons.nth(choice).click()
        assert told.inner_text().startswith("You bet on ")
        assert not any("weights" in url for url in reader.loads), "weights wait for a deed"
        for deed in deeds:
            assert told.inner_text().startswith(("You bet on ", "On the query, "))
            after(tab, do, tab, *deed)
        verdict = "right" if choice == right else "wrong"
        tab.locator(".live-told", has_text=f"Your bet was {verdict}. ").wait_for()
        assert "live-right" in buttons.nth(right).get_attribute("class")
        after(tab, do, tab, "Reset")
        assert told.inner_text() == ""
    assert reader.errors == []


def test_what_is_pressed_before_the_network_is_read_counts(reader):
    """For the bet, too. A page that is loaded again has neither a bet nor what was pressed."""
    tab = reader.open("labels")
    tab.evaluate("document.head.append = x => { window.late = () => document.head.prepend(x); }")
    told = tab.locator(".live-told")
    tab.locator(".live-bet button").first.click()
    for which in ("labels", "random"):
        do(tab, CUT, which)
        tab.evaluate("new Promise(requestAnimationFrame)")
    assert "is being read" in tab.locator(".live-news").inner_text()
    tab.evaluate("late()")
    told.filter(has_text="Your bet was right. ").wait_for()
    assert tab.locator(".live-cut").count() == 4
    assert tab.url.endswith("#live-labels?cut=random")
    tab.reload()
    assert tab.locator(".live-form input[value='none']").is_checked()
    assert told.inner_text() == ""
    assert "#" not in tab.url
    assert reader.errors == []


def test_a_second_copy_stands_below_the_first_and_says_what_can_be_known(reader):
    """Letter below letter, at every width; a dot where nothing can be known."""
    for name in ("copies", "induction"):
        tab = opened(reader, name)
        cells = tab.locator(".live-cell")
        for width in (1280, 390):
            tab.set_viewport_size({"width": width, "height": 900})
            left = cells.evaluate_all("all => all.map(x => x.getBoundingClientRect().left)")
            assert max(abs(a - b) for a, b in zip(left[1:17], left[17:], strict=True)) < 1
        said = cells.locator("i").all_inner_texts()
        assert {*said[:17]} == {"·"}
        assert all(word.endswith("✓") for word in said[17:-1])


def test_a_bet_says_what_else_the_reader_sees(reader):
    """Several heads at once are no answer; after it, four heads teach one thing more."""
    tab = reader.open("copies")
    tab.evaluate("document.querySelector('.live-more').open = true")
    told = tab.locator(".live-told")
    tab.locator(".live-bet button").first.click()
    switch = tab.locator(".live-heads")

    def off(*heads):
        for box in switch.locator("input").all():
            wanted = box.input_value() in heads
            if box.is_checked() != wanted:
                after(tab, box.set_checked, wanted)
        return told.inner_text()

    assert "15 of 15" in off("1.3")
    assert off("1.2", "1.3").startswith("2 heads are off at once.")
    assert off() == "Now switch off one head at a time."
    assert "all four heads of the second layer" in off("0.2")
    assert off("1.0", "1.1", "1.2", "1.3").startswith("Without all four, 0 of 15")
    after(tab, do, tab, "Reset")
    off("1.2", "1.3")
    assert told.inner_text() == "", "who has not bet is told nothing"
    assert reader.errors == []


TASKS = {  # of each figure: number of a task, a state in the address, then what the reader does
    "induction": (3, "model=detour", ("Head to look at", "1.0")),
    "points": (1, "", ("Labels times", "5")),
    "labels": (1, "", ("Label of the text", "Alpha"), ("Label of the text", "Ember")),
    "step": (1, "", ("Your step", "6.1"), (LAYER, "9")),
    "waves": (2, "point=6", ("label y", "-1")),
    "edges": (3, "keep=random&size=60", ("Draw", "7"), ("Cut as well", "1")),
    "lenses": (2, "set=match-and-read", (WAY, "bare")),
    "smoother": (2, BALANCED, ("its value, across", "1")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_can_be_solved(reader, name):
    """By what the reader does, not by a state that was sent; what was found stays in sight."""
    number, state, *deeds = TASKS[name]
    tab = opened(reader, name, state)
    tab.locator(".live-bet button").first.click()  # some controls wait for a bet
    for deed in deeds:
        assert solved(tab) == []
        after(tab, do, tab, *deed)
    assert solved(tab) == [number]
    assert solved(opened(reader, name, tab.url.partition("?")[2])) == []


def test_words_that_are_cut_off_are_marked(reader):
    """As many in each set; a reader who listens is told which."""
    tab = opened(reader, "labels")
    marked = tab.locator(".live-cut")
    assert marked.count() == 0
    for which in ("labels", "random"):
        after(tab, do, tab, CUT, which)
        assert marked.count() == 4
        assert marked.and_(tab.locator(".live-label")).count() == 4 * (which == "labels")
        words = "”, “".join(marked.all_inner_texts())
        soon(tab.locator(".live-status", has_text=f" “{words}”.").count, 1)


def test_an_edge_that_is_touched_says_what_it_costs(reader):
    """It costs what is lost once the list of edges to cut as well has it."""
    tab = opened(reader, "edges", "keep=all")
    line = tab.locator("[data-pick*='embed>v 0.2']")
    after(tab, line.dispatch_event, "click")
    cost = tab.locator(".live-note b", has_text="If we cut tokens → v 0.2 as well, ")
    told = cost.inner_text()
    after(tab, do, tab, "Cut as well", "1")
    left = tab.locator(".live-numbers b").nth(1).inner_text()
    assert f" {left} of the copying is left, not 100\xa0%." in told
    assert cost.count() == 0, "it is no longer there to be cut"


def test_the_address_may_hold_a_value_with_blanks(reader):
    tab = opened(reader, "edges", "focus=mlp+0")
    assert tab.locator(".live-news").inner_text() == ""
    assert tab.locator(".live-chosen").count() == 1


def test_the_address_holds_every_figure_of_a_page(reader):
    """The one that was touched last comes first, and is scrolled to."""
    states = "live-waves?scale=2", "live-step?rate=3"
    tab = reader.tab
    tab.goto((reader.site / "index.html").as_uri() + "#" + ";".join(states))
    soon(tab.locator(".live-on").count, 2)
    assert tab.url.endswith(";".join(states))
    soon(lambda: tab.locator("#live-waves").bounding_box()["y"] < 200, True)
    figure = tab.locator("#live-step")
    figure.locator("summary").click()
    figure.get_by_role("slider", name="Your step").fill("4")
    soon(lambda: tab.evaluate("location.hash"), "#live-step?rate=4;live-waves?scale=2")
    figure.get_by_role("button", name="Copy link").click()
    told = figure.locator(".live-news")
    soon(lambda: "copied" in told.inner_text() or "#live-step?rate=4" in told.inner_text(), True)
    assert tab.url.endswith("#live-step?rate=4;live-waves?scale=2"), "it changes nothing"


PHONE = pytest.mark.parametrize(
    "reader", [{"has_touch": True, "viewport": {"width": 390, "height": 844}}], indirect=True
)


def swiped(tab, x, y, across, down):
    """Swipe with a finger from a place."""
    touch = tab.context.new_cdp_session(tab)

    def send(kind, *place):
        points = [dict(zip("xy", place, strict=True))] if place else []
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    send("Start", x, y)
    for step in range(1, 11):
        send("Move", x + across * step / 10, y + down * step / 10)
    send("End")


@pytest.mark.nightly
@PHONE
@pytest.mark.parametrize("name", ["points", "waves", "smoother"])
def test_points_are_dragged_by_touch(reader, name):
    """The point of a still follows the finger at once, and the page stays."""
    tab = reader.open(name)
    point = tab.locator("svg[data-plane]").first.locator("[data-drag$='2'] .live-dot")
    point.evaluate("x => x.scrollIntoView({ block: 'center' })")

    def at():
        box = point.bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    (x, y), scrolled = at(), tab.evaluate("scrollY")
    swiped(tab, x, y, 20, -30)
    soon(lambda: max(abs(a - b) for a, b in zip(at(), (x + 20, y - 30), strict=True)) < 4, True)
    assert tab.evaluate("scrollY") == scrolled


@PHONE
def test_a_button_waits_for_the_bet_and_the_picture_comes_into_sight(reader):
    """Once the button is pressed, on a phone; after a reset it waits again."""
    tab = reader.open("points")
    button = tab.get_by_role("button", name="Close together")
    assert button.count() == 0
    bets = tab.locator(".live-bet button")
    bets.last.evaluate("x => x.scrollIntoView({ block: 'start' })")
    bets.last.click()
    plane = tab.locator("svg[data-plane]").first
    assert plane.bounding_box()["y"] < 0
    after(tab, button.click)
    tab.locator(".live-told", has_text="Your bet was right. ").wait_for()
    soon(lambda: plane.bounding_box()["y"] >= 0, True)
    tab.evaluate("document.querySelector('.live-more').open = true")
    after(tab, do, tab, "Reset")
    assert button.count() == 0


def test_a_key_on_the_query_can_be_dragged_away(reader):
    """The mouse takes key 1 there, exactly or nearly, not the query; and no label is selected."""
    tab = reader.open("smoother")
    keys, told = tab.locator("svg[data-plane]").first, tab.locator(".live-told")
    tab.locator(".live-bet button").first.click()
    keys.evaluate("x => x.scrollIntoView({ block: 'center' })")

    def at(token):
        box = keys.locator(f"[data-drag='k{token}'] .live-dot").bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def dragged(start, end):
        tab.mouse.move(*start)
        tab.mouse.down()
        tab.mouse.move(*end, steps=5)
        tab.mouse.up()

    query = at(5)
    for off in (0, 4):  # pixels
        dragged(at(1), (query[0] + off, query[1]))
        soon(lambda off=off: abs(at(1)[0] - query[0] - off) < 3, True)
        told.filter(has_text="On the query, key 1 has 28 %.").wait_for()
        dragged(query, (query[0] - 60, query[1] + 60))
        soon(lambda: at(1)[0] < query[0] - 50, True)
        assert at(5) == query
    box = keys.bounding_box()
    dragged(at(1), (box["x"] + box["width"] - 4, box["y"] + 4))
    told.filter(has_text="Your bet was wrong. ").wait_for()
    assert tab.evaluate("getSelection().toString()") == ""
    assert reader.errors == []


@pytest.mark.parametrize("reader", [{"java_script_enabled": False}], indirect=True)
@pytest.mark.parametrize("name", SHOWN)
def test_where_scripts_are_off_the_still_stands(reader, name):
    tab = reader.open(name)
    assert tab.locator(".live-view :is(svg, .live-strip)").first.is_visible()
    assert tab.get_by_text("A caption.").is_visible()
    assert tab.locator(".live-figure button").count() == 0


SCRIPT = Path(__file__).with_name("page.js")
SEEN = """x => { const { left, top, height } = x.getBoundingClientRect();
    return document.elementFromPoint(left + 5, top + height / 2) === x; }"""
TARGETS = ".live-figure :is(button, select, input, .live-pill, summary):visible"
COVERED = """form => {
    const figure = form.closest(".live-figure");
    figure.classList.add("live-on");
    form.scrollIntoView({ block: "start" });
    const numbers = figure.querySelector(".live-numbers").getBoundingClientRect();
    return numbers.bottom > form.getBoundingClientRect().top + 1;
}"""
SMALL = """all => all
    .filter((x) => { const r = x.getBoundingClientRect(); return r.height < 44 || r.width < 44; })
    .map((x) => x.outerHTML)"""


@pytest.mark.parametrize("name", SHOWN)
def test_a_figure_can_be_used_by_all(reader, name):
    """By eye in both themes, on a phone, by ear; and it is printed without controls."""
    axe = pytest.importorskip("axe_playwright_python.base").AXE_SCRIPT
    tab = opened(reader, name)
    tab.evaluate(axe)
    tab.add_script_tag(path=SCRIPT)
    for width in (1280, 390):
        tab.set_viewport_size({"width": width, "height": 900})
        rules = ".live-figure", {"rules": {"target-size": {"enabled": True}}}
        for theme in ("light", "dark"):
            tab.evaluate("theme => (document.documentElement.dataset.theme = theme)", theme)
            found = tab.evaluate("([where, how]) => axe.run(where, how)", rules)["violations"]
            assert [(x["id"], x["nodes"][0]["html"]) for x in found] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("cutOff()") == []
        assert tab.locator(TARGETS).evaluate_all(SMALL) == []
        beside = tab.locator(".live-beside").count() and width > 768  # then with the picture
        edge = "end" if beside else "start"
        tab.locator(".live-form > .live-controls").evaluate(
            "(x, block) => x.scrollIntoView({ block })", edge
        )
        assert tab.locator(".live-numbers dt").first.evaluate(SEEN), "the numbers stay in sight"
        if beside:
            controls = tab.locator(".live-form > .live-controls")
            assert not controls.evaluate(COVERED), "the numbers lie on the controls"
    soon(lambda: len(tab.locator(".live-status").text_content().split()) > 8, True)
    tab.emulate_media(media="print")
    assert tab.locator(".live-form:visible, .live-figure button:visible").count() == 0
    assert tab.locator(".live-view :is(svg, .live-strip):visible").count() > 0
