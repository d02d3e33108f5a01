"""The pages for whoever has no mouse, hears them, needs contrast, or has a small screen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.app.conftest import Tab

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("app")]  # one server for all

PALE = """() => {  // texts of less contrast than WCAG's bound for their size, but for what lies on a colour of its own
  const inks = ".ls-label, .ls-lit, .ls-doing, .ls-held, .ls-number";  // tests/viz/test_theme.py holds these
  const other = `[disabled], [aria-disabled=true], [data-testid=stIconMaterial], ${inks}`;
  const parts = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = (top, ground, share) => ground.map((g, i) => top[i] * share + g * (1 - share));
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (colour) => colour.reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const up = (element) => { const all = []; for (let e = element; e; e = e.parentElement) all.push(e); return all; };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let node; (node = texts.nextNode());) {
    const element = node.parentElement, { width, height } = element.getBoundingClientRect();
    const words = node.textContent.trim(), shown = element.checkVisibility({ visibilityProperty: true });
    if (!words || width <= 1 || height <= 1 || !shown || element.closest(other)) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    const [r, g, b, a] = parts(drawn ? style.fill : style.color);
    const grounds = up(element).map((e) => parts(getComputedStyle(e).backgroundColor)).reverse();
    const ground = grounds.reduce((below, top) => over(top, below, top[3]), [255, 255, 255]);
    const share = up(element).reduce((share, e) => share * getComputedStyle(e).opacity, a);
    const [low, high] = [light(over([r, g, b], ground, share)), light(ground)].sort((x, y) => x - y);
    const size = parseFloat(style.fontSize), ratio = (high + 0.05) / (low + 0.05);
    const small = size && size < 10, pale = size && ratio < (size >= 24 ? 3 : 4.5);
    if (small || pale) found.push(`${words}: ${ratio.toFixed(2)}, ${size} px`);
  }
  return found;
}"""
WIDER = """() => {
  const main = document.querySelector("[data-testid=stMain]");
  const wider = [main.scrollWidth - main.clientWidth, document.documentElement.scrollWidth - innerWidth];
  return wider.filter((pixels) => pixels > 1);
}"""
DRAWN_IN = """(scheme) => {
  const [red] = getComputedStyle(document.querySelector(".stApp")).backgroundColor.match(/\\d+/);
  return (red < 128) === (scheme === "dark");
}"""
NAMED = {"button", "link", "radio", "checkbox", "switch", "slider", "combobox", "textbox", "spinbutton", "image"}


def nameless(tab: Tab) -> list[str]:
    """What a screen reader comes to and cannot name."""
    session = tab.page.context.new_cdp_session(tab.page)
    nodes = [n for n in session.send("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
    session.detach()
    named = [n for n in nodes if n["role"]["value"] in NAMED]
    assert len(named) > 8
    return [n["role"]["value"] for n in named if not n["name"]["value"].strip()]


def left(tab: Tab, script: str) -> list:
    """What a script still finds when the page, which follows its theme and its window in its own time, has settled."""
    for _ in range(50):
        tab.page.wait_for_timeout(200)
        if not (found := tab.page.evaluate(script)):
            break
    return found


def check(tab: Tab) -> None:
    """All is named; readable in light and dark; and no wider than a screen of 1280 pixels at 200 and at 400 %."""
    assert nameless(tab) == []
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.wait_for_function(DRAWN_IN, arg=scheme)
        assert left(tab, PALE) == [], scheme
    for wide in (640, 320):
        tab.page.set_viewport_size({"width": wide, "height": 640})
        assert left(tab, WIDER) == [], wide


def test_the_pages_for_whoever_hears_them_has_no_mouse_or_a_small_screen(tab: Callable[[], Tab]):
    shown = tab().open("?mode=pipeline&devices=4&lang=zh").settle()
    page = shown.page
    page.wait_for_function("document.documentElement.lang === 'zh'")
    toggle, ring = (
        page.locator(".st-key-critical input"),
        "(input) => getComputedStyle(input.closest('label')).boxShadow",
    )
    assert toggle.evaluate(ring) == "none"
    toggle.focus()
    assert toggle.evaluate(ring) != "none"
    page.focus(".st-key-run button")
    page.keyboard.press("Tab")  # past the head, at which nothing stops
    assert page.evaluate("document.activeElement.closest('.st-key-numbers') !== null")
    check(shown)
    page.evaluate("document.activeElement.blur()")
    page.focus("a >> nth=0")  # to the content
    page.keyboard.press("Tab")  # past the settings, which are put away here
    assert page.evaluate("document.activeElement.ariaLabel") == "Expand sidebar"
    page.set_viewport_size({"width": 1400, "height": 900})
    page.locator("[data-testid=stTopNavLink]:visible").last.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".st-key-validated-targets")
    page.wait_for_selector(".lockstep-chart .main-svg")
    check(shown)
    assert shown.problems == []
