"""The rail of a lesson's steps in a real browser: where a step leads, and which steps are marked."""

import pytest

from engine import modes
from engine.spec import MODES
from tests.viz.playing import ROOT, ask, payload_of, state
from viz.locales import LANGUAGES
from viz.locales.engine import lesson

PLAYED = """(player) => {  // frames of 50 ms, one after the other: which steps are marked, whenever that changes
  const { requestAnimationFrame } = window, seen = [];
  let frame, now = performance.now();
  window.requestAnimationFrame = (next) => ((frame = next), 0);
  player.seek(0);
  player.play();
  while (player.playing) {
    frame((now += 50));
    const on = player.rail.chips.flatMap((chip, i) => (chip.ariaCurrent ? [i + 1] : [])).join();
    if (on !== seen.at(-1)) seen.push(on);
  }
  window.requestAnimationFrame = requestAnimationFrame;
  return seen;
}"""


CUT_OFF = """([root, titles]) => {  // which of these titles of steps do not fit into their boxes
  const { rail, payload } = document.querySelector(root).player;
  rail.build({ ...payload, lesson: titles.map((title) => ({ ...payload.lesson[0], title })) });
  const cut = (n) => n.scrollWidth > n.clientWidth || n.scrollHeight > n.clientHeight + 1;
  return [...document.querySelectorAll(".ls-name")].filter(cut).map((n) => n.innerText);
}"""


@pytest.mark.browser
@pytest.mark.xdist_group("player")
class TestLesson:
    """The rail of steps. 1F1B, 4 stages, 8 microbatches, F = 1 s, B = 2 s: all stages work from 3 s on."""

    def marked(self, page):
        return page.locator(".ls-step[aria-current=step] .ls-name").all_text_contents()

    def test_a_click_on_a_step_goes_to_its_moment_and_the_next_click_to_the_next(self, show):
        page = show(payload_of(microbatches=8, taught=True))
        assert (self.marked(page), page.locator(".ls-said").text_content()) == (
            ["Stage split"],
            modes.lesson("pipeline").steps[0].text,
        )
        assert page.locator(".ls-pointed").count() == 4  # what each device holds
        page.get_by_role("button", name="Pipelined execution").click()
        assert state(page) == [False, 3, 33]
        assert "Pipelined execution" in self.marked(page)
        assert page.locator(".ls-said").text_content() == modes.lesson("pipeline").steps[2].text
        assert page.locator(".ls-doing").all_text_contents() == ["forward 3", "forward 2", "forward 1", "forward 0"]
        times = []
        for _ in range(3):
            page.get_by_role("button", name="Data transfer").click()
            times.append(state(page)[1])
            assert "Data transfer" in self.marked(page)
        assert times[0] == 3 < times[1] < times[2]
        assert page.locator(".ls-pointed").count() == 0

    def test_what_a_device_holds_is_outlined_and_not_covered(self, show):
        """128 layers in boxes that are narrow: a cell of them is a few pixels wide."""
        page = show(payload_of("pipeline", 16, model="mlp", layers=127, taught=True))
        lines = page.locator(".ls-pointed").evaluate_all(
            "(all) => all.map((n) => [n.getBBox().width, +getComputedStyle(n).strokeWidth.replace('px', '')])"
        )
        assert len(lines) >= 16 and min(width for width, _ in lines) < 6
        assert all(0 < 2 * line < width for width, line in lines)

    def test_a_number_key_goes_to_a_step_and_what_plays_plays_on(self, show):
        page = show(payload_of(microbatches=8, taught=True))
        page.keyboard.press("4")
        assert state(page)[1] > 25
        assert self.marked(page)[-1] == "Merging of results"
        page.keyboard.press("1")
        assert (state(page), self.marked(page)) == ([False, 0, 33], ["Stage split"])
        page.keyboard.press(" ")
        page.keyboard.press("3")
        page.wait_for_function(f"document.querySelector('{ROOT}').dataset.time > 3")
        assert state(page)[0]

    def test_playing_marks_the_steps_in_order_and_stays_at_those_that_happened_before(self, show):
        page = show(payload_of("ddp", 4, "h100", bucket_mb=0.5, taught=True))
        assert ask(page, PLAYED) == ["1", "2", "3", "4", "4,5", "5", "6"]

    def test_a_step_under_the_pointer_shows_its_moments_on_the_timeline(self, show):
        page = show(payload_of(microbatches=8, taught=True))
        bands = page.locator(".ls-under path[opacity='0.28']")
        assert bands.count() == 0
        page.get_by_role("button", name="Pipelined execution").hover()
        ends = ask(page, "(player) => [0, 33].map(player.scale().tx)")
        box, left = bands.bounding_box(), page.locator(".ls-figure").bounding_box()["x"]
        assert [box["x"] - left, box["x"] + box["width"] - left] == pytest.approx(ends, abs=1)

    def test_no_step_moves_anything_else(self, show):
        payload = payload_of("ddp", 4, "h100", taught=True, language="zh")
        payload["lesson"][3]["text"] *= 5  # longer than a line
        page = show(payload)
        places = set()
        for key in "123456":
            page.keyboard.press(key)
            places.add(
                str([page.locator(part).bounding_box() for part in (".ls-step >> nth=5", ".ls-said", ".ls-stage")])
            )
        assert len(places) == 1
        page.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_function("document.querySelector('.ls-figure .main-svg').clientWidth < 400")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400

    def test_a_step_that_this_step_of_training_lacks_leads_nowhere(self, show):
        payload = payload_of("ddp", 4, "h100", taught=True)
        payload["lesson"][4]["moments"] = []
        page = show(payload)
        page.keyboard.press("5")
        assert (state(page)[1], page.locator(".ls-step >> nth=4").get_attribute("aria-disabled")) == (0, "true")
        assert "not in this step" in page.locator(".ls-step >> nth=4").get_attribute("title")

    @pytest.mark.parametrize("language", LANGUAGES)
    def test_every_title_has_room_in_its_box_at_any_width(self, show, language):
        """Of a word that is cut off a reader guesses the end; where boxes would be too narrow there are more
        rows, and on a phone numbers alone."""
        page = show(payload_of("ddp", 2, "h100", taught=True, language=language))
        for wide in (1400, 1000, 910, 400):
            page.set_viewport_size({"width": wide, "height": 900})
            page.wait_for_function(f"Math.abs(document.querySelector('.ls-rail').clientWidth - {wide}) < 60")
            for mode in MODES:
                titles = [step.title for step in lesson(language, mode).steps]
                assert page.evaluate(CUT_OFF, [ROOT, titles]) == [], (mode, wide)

    def test_a_picture_without_a_lesson_has_no_rail(self, show):
        assert show(payload_of()).locator(".ls-rail, .ls-said").all_text_contents() == ["", ""]
