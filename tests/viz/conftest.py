"""Fixtures of the player's tests: one page in a real browser, and a new player in it."""

import tempfile
from pathlib import Path

import pytest

from bench.figures import open_page
from tests.viz.playing import ROOT, payload_of

MOUNT = """(payload) => {
  document.querySelector(".lockstep-player")?.player.destroy();
  mountPlayer(document.body.appendChild(document.createElement("div")), payload);
}"""


@pytest.fixture(scope="session")
def page(browser):
    """One page for all tests: most of a second page's time would go to reading plotly.js."""
    with tempfile.TemporaryDirectory() as folder:
        opened = open_page(browser, payload_of(), Path(folder))
        yield opened
        opened.close()


@pytest.fixture
def show(page):
    """show(payload) -> the page with a new player of it. Whatever scripts complain about or ask for fails the test."""
    complaints = []
    listeners = {
        "pageerror": lambda error: complaints.append(str(error)),
        "console": lambda message: message.type == "error" and complaints.append(message.text),
        "request": lambda request: complaints.append(request.url),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(color_scheme="light")
    page.mouse.move(1, 1)

    def show(payload):
        page.evaluate(MOUNT, payload)
        page.wait_for_function(f"document.querySelector('{ROOT}')?.player?.ready")
        return page

    yield show
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert complaints == []
