"""Pictures of 1,000 to 50,000 spans -> how long they take to build, how large they are, how smoothly they move.

    python -m bench.figures

Frames are counted where they are painted: those that the browser's compositor drew, and of them only those in which
the cursor had moved.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from engine import modes
from engine.cost.machine import machine
from engine.job import prepare
from engine.simulation import simulate
from engine.spec import Spec
from viz import player
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.figures.places import drawn
from viz.locales import text

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FRAMES, DRAWN = "viz", "Display::DrawAndSwap"  # the browser's trace: a category, and its event for a frame on screen

MOVED = """async (seconds) => {
  const player = document.querySelector(".lockstep-player").player, seen = new Set();
  const cursor = () => player.over_.querySelector(".ls-cursor")?.getAttribute("d");
  player.seek(player.payload.end * 0.2);
  if (!player.playing) player.play();
  const begin = performance.now();
  await new Promise((done) => (function look() {
    seen.add(cursor());
    performance.now() - begin < 1000 * seconds ? requestAnimationFrame(look) : done();
  })());
  player.pause();
  return seen.size / ((performance.now() - begin) / 1000);
}"""


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def pipeline_payload(stages: int, microbatches: int) -> tuple[int, float, dict[str, Any]]:
    """(spans, seconds to build, payload) of a pipeline's picture."""
    spec = Spec(mode="pipeline", devices=stages, model="gpt", layers=2 * stages, microbatches=microbatches,
                global_batch=2 * microbatches, machine="h100")  # fmt: skip
    job = prepare(spec)
    simulation = simulate(modes.plan(job), machine(spec.machine))
    begin = time.perf_counter()
    timeline = simulation.of_ranks(drawn(simulation.plan))
    payload = moving_picture(picture_info(simulation.plan, job.layers, timeline), text("en"))
    return len(timeline), time.perf_counter() - begin, payload


def count_bytes(payload: dict[str, Any]) -> int:
    return len(json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode())


def frames_per_second(page: Any, seconds: float = 3.0) -> float:
    """Of the player on a Playwright page: the rate of frames painted, or that of cursor positions if that is lower."""
    browser = page.context.browser
    browser.start_tracing(page=page, categories=[FRAMES])
    moved = page.evaluate(MOVED, seconds)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    drawn = sorted(event["ts"] for event in events if event["name"] == DRAWN and event["ph"] in "BX")
    if len(drawn) < 2:
        raise RuntimeError(f"the browser's trace has no {DRAWN}: this Chromium names its frames otherwise")
    return min(moved, 1e6 * (len(drawn) - 1) / (drawn[-1] - drawn[0]))


def open_page(browser: Any, payload: dict[str, Any], folder: Path) -> Any:
    """The payload's exported page, ready."""
    file = folder / "page.html"
    file.write_text(player.page(payload), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    page.wait_for_function("document.querySelector('.lockstep-player')?.player?.ready")
    return page


def main() -> None:
    from playwright.sync_api import sync_playwright

    print(f"{'spans':>7} {'build':>9} {'bytes':>9} {'kB a 1,000':>11} {'frames/s':>9}")
    executable = find_browser()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS) if executable else None
        for stages, microbatches in ((8, 23), (8, 90), (16, 44), (64, 512)):
            spans, seconds, payload = pipeline_payload(stages, microbatches)
            size = count_bytes(payload)
            rate = f"{frames_per_second(open_page(browser, payload, Path(folder))):.0f}" if browser else "no browser"
            print(f"{spans:7,} {seconds * 1e3:6.0f} ms {size / 1e3:6.0f} kB {size / spans:11.0f} {rate:>9}")


if __name__ == "__main__":
    main()
