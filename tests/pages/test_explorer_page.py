"""Explorers answer on the page, to the pointer and to the keyboard."""

import json
from pathlib import Path
from urllib.parse import urlparse

import pytest
from reader import soon

from book._ext.explorer import OURS

pytestmark = pytest.mark.browser

PAGES = ("01_gpt2_induction", "02_label_anchors", "06_attention_circuits")
CHART = ".explorer .explorer-chart"


def opened(reader, name):
    tab = reader.open(f"notebooks/{name}")
    tab.locator(".explorer button").click()
    tab.wait_for_selector(f"{CHART} svg")
    return tab


def spec(tab):
    return json.loads(tab.locator(".explorer script").first.text_content())


def opacities(tab, marks):
    script = "all => all.map(x => Number(x.getAttribute('fill-opacity')))"
    return tab.locator(f"{CHART} g.{marks}_marks path").evaluate_all(script)


def lines(tab):
    return tab.locator(f"{CHART} g.mark-rule line").count()


def test_each_head_shows_its_own_weights(reader):
    tab = opened(reader, PAGES[0])
    params = {p["name"]: p.get("value") for p in spec(tab)["params"]}
    token = params["token"][0]["i"]
    for layer, of_layer in enumerate(params["weights"]):
        tab.locator(f".explorer input[name=layer][value='{layer}']").check()
        for head, rows in enumerate(of_layer):
            tab.locator(f".explorer input[name=head][value='{head}']").check()
            looked = [*rows[token], *(row[token] for row in rows[token + 1 :])]
            cells = pytest.approx([0.06 + 0.64 * w for w in looked])
            soon(lambda: opacities(tab, "cells"), cells)
            every = pytest.approx([0.06 + 0.94 * w for row in rows for w in row])
            soon(lambda: opacities(tab, "map"), every)
    assert reader.left == reader.errors == []


def test_a_token_is_chosen_by_pointing_or_by_keyboard(reader):
    tab = opened(reader, PAGES[0])
    chosen, title = tab.locator(".explorer select"), tab.locator(f"{CHART} svg .role-title-text")
    tab.locator(f"{CHART} g.cells_marks path").nth(4).hover()
    tab.wait_for_function("document.querySelector('.explorer select').value === '4'")
    soon(lambda: "“D” at position 4" in title.text_content(), True)
    soon(lambda: "0." in tab.locator("#vg-tooltip-element").text_content(), True)
    chosen.focus()
    tab.keyboard.press("ArrowDown")
    soon(lambda: "“E” at position 5" in title.text_content(), True)
    before = opacities(tab, "cells")
    heads = tab.locator(".explorer input[name=head]")
    shown = heads.evaluate_all("all => all.findIndex(x => x.checked)")
    heads.nth(shown).focus()
    tab.keyboard.press("ArrowRight")
    soon(lambda: f"head {(shown + 1) % heads.count()}" in title.text_content(), True)
    soon(lambda: opacities(tab, "cells") != before, True)


def test_a_flow_is_followed_by_a_click(reader):
    tab = opened(reader, PAGES[1])
    found = spec(tab)
    kept, n = found["layer"][1]["data"]["values"], len(found["params"][0]["value"])
    strong = [edge for edge in kept if edge["w"] >= 0.1]
    tab.locator(".explorer select").select_option("all")
    soon(lambda: lines(tab), len(strong))
    assert len(strong) > 20
    member = found["layer"][3]["data"]["values"][0]["i"]
    column = tab.locator(f"{CHART} g.columns_marks path").nth(member)
    column.click(position={"x": 3, "y": 3}, force=True)
    into = sum(e["into"].get(str(member), 0) >= 0.1 for e in strong)
    soon(lambda: lines(tab), into)
    assert 0 < into < len(strong)
    tab.locator(".explorer input[value='out of']").check()
    soon(lambda: lines(tab), sum(e["out"].get(str(member), 0) >= 0.1 for e in strong))
    tab.locator(".explorer input[type=range]").focus()
    tab.keyboard.press("End")
    soon(lambda: lines(tab) < len(strong), True)
    assert tab.locator(f"{CHART} g.columns_marks path").count() == n
    assert reader.left == reader.errors == []


@pytest.mark.parametrize("reader", [{"java_script_enabled": False}], indirect=True)
def test_where_scripts_are_off_the_picture_stands(reader):
    for name in PAGES:
        picture = reader.open(f"notebooks/{name}").locator(".explorer img")
        assert picture.is_visible()
        assert picture.bounding_box()["width"] > 250
        assert len(picture.get_attribute("alt").split()) > 10


def test_the_library_is_loaded_for_who_asks(reader):
    asked = []
    reader.tab.on("request", lambda request: asked.append(Path(urlparse(request.url).path).name))
    reader.open("book/notation")
    assert not any(name in OURS or name.startswith("vega") for name in asked)
    tab = reader.open(f"notebooks/{PAGES[0]}")
    assert set(OURS) <= set(asked)
    assert not any(name.startswith("vega") for name in asked)
    button = tab.locator(".explorer button")
    button.focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f"{CHART} svg")
    assert sum(name.startswith("vega") for name in asked) == 1
    assert tab.evaluate("document.activeElement.closest('.explorer form') !== null")
    assert button.count() == 0


@pytest.mark.parametrize("reader", [{"java_script_enabled": False}], indirect=True)
def test_steps_are_gone_through_without_scripts(reader):
    tab = reader.open("notebooks/00_tour")
    steps, shown = tab.locator(".stepped input"), tab.locator(".stepped figure:visible img")
    assert shown.count() == 1
    for i in range(steps.count()):
        steps.nth(i).check()
        assert shown.count() == 1
        assert f"{i + 1} " in shown.get_attribute("alt")
