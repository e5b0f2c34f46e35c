"""Fixtures that several test modules share."""

import importlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before anything imports torch
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client
os.environ["ICLUTILS_QUIET"] = "1"  # as the runner does: bars depend on the machine's speed

# What our modules import first is compiled anew in each process, under the hook for their types.
for _library in ("transformer_lens", "sklearn.linear_model", "matplotlib.pyplot"):
    importlib.import_module(_library)

ROOT = Path(__file__).parents[1]
RUNS = json.loads((ROOT / "book/runs.json").read_text(encoding="utf-8"))["mini"]
TIMES = {name: run["seconds"] for name, run in RUNS.items()}
# Drawn tests do not time themselves, and draw the same every time: a failure is there to stay.
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("book", **quiet, derandomize=True, max_examples=50)
settings.load_profile("book")


def pytest_collection_modifyitems(items):
    """What takes longest begins first: the pages that others wait for, the largest notebooks."""
    notebooks = [f"{name}.ipynb" for name in sorted(TIMES, key=TIMES.get, reverse=True)]
    order = ["test_browser.py", *notebooks, "test_types.py", "pages"]
    places = {name: place for place, name in enumerate(order)}
    items.sort(key=lambda item: min(places.get(part, 99) for part in item.path.parts))


@pytest.fixture
def shared():
    """Offline stand-ins for the hub, optional: a folder beside the checkout."""
    folder = ROOT.parent / "shared" / "hub"
    if not folder.is_dir():
        pytest.skip("needs the offline stand-ins for the hub in ../shared/hub")
    return folder


def _small(kind):
    @pytest.fixture(scope="session")  # no test changes one
    def model(tmp_path_factory):
        from tiny import ARCHITECTURES, load  # it imports the hub's client

        ARCHITECTURES[kind](folder := tmp_path_factory.mktemp(kind))
        return load(folder)

    return model


gpt2, neox = _small("gpt2"), _small("neox")  # small and random; the second of rotary positions
llama, qwen2 = _small("llama"), _small("qwen2")  # heads share keys and values; with biases
wired = _small("wired")  # 0.0 writes the previous token, 1.0 is an induction head; others idle


@pytest.fixture(scope="session", params=["GPT-2", "Llama, grouped"])  # no test changes one
def case(request, tmp_path_factory):
    """A small random network as the package has it, and by transformers alone."""
    from tools.architectures import Case  # it imports the hub's client

    return Case.of(request.param, tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module", params=["gpt2", "smollm2"])
def tokenizer(request):
    """Of GPT-2, then of SmolLM2."""
    from tiny import real_tokenizer  # it imports the hub's client

    return real_tokenizer(request.param)


@pytest.fixture
def text_model(shared, tmp_path, monkeypatch):
    """A random checkpoint with the real tokenizer, in the hub's format, and the real rows."""
    from tiny import save_gpt2  # it imports the hub's client

    folder = tmp_path / "hub"
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_layer": 6, "n_head": 2, "n_embd": 32}
    save_gpt2(folder, **sizes, bos_token_id=50256, eos_token_id=50256)
    for path in (shared / "gpt2-tokenizer").iterdir():
        shutil.copy(path, folder / path.name)
    monkeypatch.setenv("ICLUTILS_DATA", str(shared / "datasets"))
    return folder


@pytest.fixture
def closed():
    """Figures that a test leaves open are closed."""
    from matplotlib import pyplot

    yield
    pyplot.close("all")


@pytest.fixture
def results_elsewhere(tmp_path, monkeypatch):
    """What claims are judged to be goes to a folder of the test, not to the checkout."""
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "results"))


@pytest.fixture
def make_ledger(tmp_path, monkeypatch):
    """``make_ledger("90_demo", text)`` writes a ledger; only such ledgers exist in the test."""
    from iclutils import claims

    folder = tmp_path / "package" / "claims"
    folder.mkdir(parents=True)
    monkeypatch.setattr(claims, "ROOT", folder)
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "results"))
    claims.ledger.cache_clear()

    def make(name, text):
        path = folder / f"{name}.yml"
        path.write_text(text, encoding="utf-8")
        claims.ledger.cache_clear()
        return path

    yield make
    claims.ledger.cache_clear()


@pytest.fixture(scope="session")
def site():
    """The pages, built from the committed outputs, which nbval compares; only what changed."""
    from filelock import FileLock

    from tools import build

    folder = ROOT / "_build" / "committed"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # one build, even where several processes test
        assert not build.render(folder / "src", folder / "html", {})
    return folder / "html"


@pytest.fixture(scope="module")
def browser():
    """An installed browser, without a network."""
    from reader import BROWSERS, FLAGS, PATIENCE

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser is installed: looked for {', '.join(BROWSERS)}")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=program, args=list(FLAGS), timeout=1000 * PATIENCE
        )
        yield started
        started.close()


@pytest.fixture
def reader(browser, site, request):
    """A tab with the options that the test gives as its parameter."""
    from reader import Reader

    context = browser.new_context(**getattr(request, "param", {}))
    yield Reader(context.new_page(), site)
    context.close()
