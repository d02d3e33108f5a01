"""The player in a real browser: what it shows, what its controls do, and how smoothly it moves."""

import json
import re

import pytest

from bench.figures import frames_per_second, pipeline_payload
from engine import modes
from engine.job import prepare
from engine.spec import Spec
from engine.timeline import Timeline
from tests.viz.playing import ROOT, ask, payload_of, seek, state
from viz import player
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.locales import LANGUAGES, text

SPAN = """(player) => {  // the middle of the fourth op that computes, and what it is
  const { spans, strings } = player.payload, scale = player.scale(), frame = player.figure_.getBoundingClientRect();
  const i = spans.front.map((front, i) => [front, i]).filter(([front]) => front === 1)[3][1];
  const [y0, y1] = spans.lanes[spans.lane[i]], middle = (spans.t0[i] + spans.t1[i]) / 2;
  return [frame.left + scale.tx(middle), frame.top + scale.ty((y0 + y1) / 2), strings[spans.words[i]]];
}"""
BUSY = """(player) => {  // to the middle of the op in the middle of those that compute
  const { t0, t1, front } = player.payload.spans, of = [...t0.keys()].filter((i) => front[i] === 1);
  const i = of[of.length >> 1];
  player.seek((t0[i] + t1[i]) / 2);
}"""
ELEVEN = """(player) => {  // where the clock is at 11
  const scale = player.scale(), frame = player.figure_.getBoundingClientRect();
  return [frame.left + scale.tx(11), frame.top + scale.top + 5];
}"""


TEN_FRAMES = """(player) => {  // of 50 ms: how far the clock goes
  const { requestAnimationFrame } = window;
  let frame, now = performance.now();
  window.requestAnimationFrame = (next) => ((frame = next), 0);
  player.seek(0);
  player.play();
  frame(now = performance.now());
  player.seek(0);
  for (let i = 0; i < 10; i++) frame((now += 50));
  player.pause();
  window.requestAnimationFrame = requestAnimationFrame;
  return player.time;
}"""


CALM_FRAMES = """(player) => {  // one each 400 ms: what is shown in each
  const { requestAnimationFrame, setTimeout } = window, times = [];
  let frame, wait, now = performance.now();
  window.requestAnimationFrame = (next) => ((frame = next), 0);
  window.setTimeout = (next, milliseconds) => ((wait = [next, milliseconds]), 0);
  player.seek(0);
  player.play();
  frame(now = performance.now());
  player.seek(0);
  for (; player.time < player.payload.end && times.length < 99; times.push(player.time)) {
    wait[0]();
    frame((now += wait[1]));
  }
  player.pause();
  Object.assign(window, { requestAnimationFrame, setTimeout });
  return times;
}"""


BESIDE_A_RUN = """(player) => {  // that needs all cores: when the next frame is, and how far the clock goes
  const { requestAnimationFrame, setTimeout } = window, run = document.body.appendChild(document.createElement("div"));
  let frame, wait, now = performance.now();
  window.requestAnimationFrame = (next) => ((frame = next), 0);
  window.setTimeout = (next, milliseconds) => ((wait = [next, milliseconds]), 0);
  run.className = "ls-sparing";
  player.play();
  frame(now = performance.now());
  player.seek(frame = 0);
  wait[0]();
  frame(now + wait[1]);
  player.pause();
  run.remove();
  Object.assign(window, { requestAnimationFrame, setTimeout });
  return [wait[1], player.time];
}"""


TOO_LONG = """({ payload, said_ }) => payload.lesson.map(({ text }) => text).filter((text) => {
  said_.textContent = text;
  return said_.scrollWidth > said_.clientWidth || said_.scrollHeight > said_.clientHeight + 1;
})"""


@pytest.mark.browser
@pytest.mark.xdist_group("player")
class TestPlayer:
    def test_it_plays_pauses_and_stops_at_the_end(self, show):
        page = show(payload_of())
        assert state(page) == [False, 0, 33]
        page.locator(".ls-play").click()
        page.wait_for_function(f"document.querySelector('{ROOT}').dataset.time > 1")
        page.locator(".ls-play").click()
        playing, time, _ = state(page)
        assert not playing
        assert 1 < time < 33
        seek(page, 0.99)
        page.locator(".ls-play").click()
        page.wait_for_function(f"document.querySelector('{ROOT}').dataset.playing === 'false'")
        assert state(page) == [False, 33, 33]

    def test_speed_changes_how_fast_the_clock_goes(self, show):
        """In the same ten frames, four times the speed covers four times the way."""
        page = show(payload_of())
        ways = []
        for speed in ("1", "4"):
            page.locator(".ls-speed").select_option(speed)
            ways.append(ask(page, TEN_FRAMES))
        assert ways == pytest.approx([33 * 0.5 / 8, 33 * 0.5 / 8 * 4])  # ten times 50 ms, where a step plays 8 s

    def test_beside_a_run_that_needs_all_cores_it_draws_five_times_a_second_as_fast_as_before(self, show):
        page = show(payload_of())
        end, seconds = ask(page, "(player) => [player.payload.end, player.payload.seconds]")
        put_off, time = ask(page, BESIDE_A_RUN)
        assert (put_off, time) == (200, pytest.approx(0.2 * end / seconds))

    def test_for_little_motion_it_goes_from_op_to_op_in_the_same_time(self, show):
        page = show(payload_of())
        page.emulate_media(reduced_motion="reduce")
        times, stops = ask(page, CALM_FRAMES), ask(page, "(player) => player.payload.stops")
        page.emulate_media(reduced_motion="no-preference")
        assert times[0] == 33 * 0.4 / 8 // 1 and times[-1] == 33  # 400 ms of 8 s; ops begin at whole numbers
        assert len(times) in (20, 21) and set(times) <= {*stops, 33}

    def test_what_is_on_is_told_after_a_step_and_not_while_it_plays(self, show):
        page = show(payload_of(taught=True))
        told = "(player) => [player.words_.ariaLive, player.said_.ariaLive]"
        assert ask(page, told) == ["polite", "polite"]
        assert ask(page, f"(player) => (player.play(), ({told})(player))") == ["off", "off"]
        assert ask(page, f"(player) => (player.forward(), ({told})(player))") == ["polite", "polite"]

    def test_keys_step_from_op_to_op(self, show):
        page = show(payload_of())
        page.locator(ROOT).focus()
        times = [0]
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
            page.keyboard.press(key)
            times.append(state(page)[1])
        assert times == [0, 1, 2, 1, 33, 0]
        page.keyboard.press(" ")
        assert state(page)[0]

    def test_keys_with_a_modifier_are_left_to_the_browser(self, show):
        page = show(payload_of())
        page.keyboard.press("Control+ArrowRight")
        assert state(page)[1] == 0

    def test_the_slider_sets_the_time_and_says_it(self, show):
        page = show(payload_of())
        page.locator(".ls-slider").evaluate("e => { e.value = 16.5; e.dispatchEvent(new Event('input')); }")
        assert state(page) == [False, 16.5, 33]
        assert page.locator(".ls-slider").get_attribute("aria-valuetext") == "16.5 s"

    def test_the_buttons_have_names(self, show):
        page = show(payload_of(language="zh"))
        for name in ("播放", "后退一个操作", "前进一个操作", "循环播放"):
            assert page.get_by_role("button", name=name, exact=True).count() == 1
        assert page.get_by_role("slider", name="时间").count() == 1

    def test_at_a_time_the_devices_that_compute_glow_and_packets_fly(self, show):
        """1F1B, 4 stages, F = 1, B = 2, messages 0 s. At 13.2: backward 1, forward 4, backward 2, backward 3."""
        page = show(payload_of(microbatches=8))
        seek(page, 13.2 / 33)
        assert page.locator(".ls-doing").all_text_contents() == ["backward 1", "forward 4", "backward 2", "backward 3"]
        assert sorted(page.locator(".ls-number").all_text_contents()) == ["1", "4"]
        said = page.locator(".ls-words").text_content()
        assert "rank 1: forward" in said
        assert "backward" in said

    def test_a_packet_passes_beneath_the_name_of_an_op(self, show):
        """In a ring it reaches the lower devices where their names are."""
        page = show(payload_of("context", 8, "h100", model="gpt"))
        ask(page, BUSY)
        order = page.locator(".ls-over > .ls-packet, .ls-over > .ls-pill").evaluate_all(
            "(all) => all.map((n) => n.classList[0])"
        )
        assert order == sorted(order) and {"ls-packet", "ls-pill"} == set(order)

    def test_an_idle_device_does_not_glow_and_is_said_to_be_idle(self, show):
        """At 0.5 only the first stage works; loads take no time on this machine."""
        page = show(payload_of(microbatches=8))
        seek(page, 0.5 / 33)
        assert page.locator(".ls-doing").all_text_contents() == ["forward 0"]
        assert page.locator(".ls-words").text_content() == "rank 0: forward · microbatch 0   |   ranks 1–3 idle"

    def test_ranks_are_said_by_their_numbers_where_not_all_are_drawn(self, show):
        """Of 32 ranks, two stages of 16, half are drawn: 0 to 7 and 16 to 23."""
        page = show(payload_of("hybrid", 32, pp=2, dp=16, model="mlp", microbatches=4))
        seek(page, 0.05)
        assert page.locator(".ls-words").text_content() == "ranks 0–7: forward · fc1   |   ranks 16–23 idle"

    def test_many_ranks_that_stand_apart_are_counted_and_the_line_is_not_cut_off(self, show):
        """Of 16 stages of 32 ranks one rank each is drawn: 0, 32, 64, ... No name for these fits a line."""
        page = show(payload_of("hybrid", 512, pp=16, dp=32, model="mlp", layers=15, microbatches=16, global_batch=512))
        page.set_viewport_size({"width": 800, "height": 900})
        page.wait_for_timeout(100)
        counted = 0
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            seek(page, share)
            line = page.locator(".ls-words")
            counted += bool(re.search(r"\d+ of 16 ranks", line.text_content()))
            assert line.evaluate("(line) => line.scrollWidth <= line.clientWidth"), line.text_content()
        assert counted

    @pytest.mark.parametrize(
        ("settings", "rows"),
        [({"microbatches": 8}, 1), ({"mode": "context", "devices": 8, "model": "gpt", "machine_name": "h100"}, 2)],
    )
    def test_a_full_screen_shows_steps_devices_and_every_row_at_once(self, show, settings, rows):
        """As on a projector: `rows` of the lesson's steps, and no name of an op over the name of its device. Letters of
        this font reach far out of their lines, as those of the app's do a little."""
        page = show(payload_of(**settings, taught=True))
        page.evaluate("document.body.style.setProperty('--st-font', 'Noto Sans CJK SC')")
        page.set_viewport_size({"width": 1920, "height": 1080})
        page.wait_for_timeout(100)
        page.locator(".ls-full").click()
        page.wait_for_function("document.fullscreenElement !== null")
        page.wait_for_timeout(300)
        ask(page, BUSY)
        box = lambda part: page.locator(part).bounding_box()  # noqa: E731
        tops = {step.bounding_box()["y"] for step in page.locator(".ls-step").all()}
        foot, pill, title = box(".ls-foot"), box(".ls-doing >> nth=0"), box(".ls-title >> nth=0")
        page.keyboard.press("f")
        page.wait_for_function("document.fullscreenElement === null")
        page.evaluate("document.body.style.removeProperty('--st-font')")
        assert len(tops) == rows
        assert foot["y"] + foot["height"] <= 1080
        assert pill["y"] + pill["height"] <= title["y"] + 4  # of the letters' own room

    @pytest.mark.parametrize("language", LANGUAGES)
    def test_what_a_step_says_is_never_cut_off(self, show, language):
        page = show(payload_of("hybrid", 8, pp=2, tp=2, dp=2, taught=True, language=language))
        for wide in (1000, 1280):
            page.set_viewport_size({"width": wide, "height": 900})
            page.wait_for_timeout(100)
            assert ask(page, TOO_LONG) == []

    @pytest.mark.parametrize(("devices", "shrinks"), [(2, False), (8, True)])
    def test_a_picture_too_high_for_its_window_shrinks_until_all_of_it_is_seen_at_once(self, show, devices, shrinks):
        page = show(payload_of("ddp", devices, model="gpt", machine_name="h100", taught=True))
        high, plain = ask(page, "(player) => [player.figure_.clientHeight, player.plain]")
        assert (high < plain) == shrinks
        assert page.locator(ROOT).bounding_box()["height"] <= 900 - 60  # the rest is the page's head
        drawn, axis = (page.locator(part).first.bounding_box() for part in (".ls-stage", ".x2tick"))
        assert drawn["y"] < axis["y"] < drawn["y"] + drawn["height"]

    def test_packets_lie_on_the_links_that_plotly_drew(self, show):
        """Halfway along its flight a packet is in the middle between two boxes, in pixels."""
        payload = payload_of("layer_split", 2, "local")
        page = show(payload)
        i = len(payload["flights"]["t0"]) - 1
        middle = (payload["flights"]["t0"][i] + payload["flights"]["t1"][i]) / 2
        seek(page, middle / payload["end"])
        spot = page.locator(".ls-packet").bounding_box()
        plot = page.evaluate(
            "(f => [f.xaxis._offset, f.xaxis._length])(document.querySelector('.ls-figure')._fullLayout)"
        )
        left = page.locator(".ls-figure").bounding_box()["x"]
        assert spot["x"] + spot["width"] / 2 == pytest.approx(left + plot[0] + plot[1] / 2, abs=1.5)

    def test_the_span_under_the_mouse_says_what_it_is(self, show):
        page = show(payload_of(microbatches=8))
        at = ask(page, SPAN)
        page.mouse.move(at[0], at[1])
        lines = page.locator(".ls-tip div").all_text_contents()
        assert lines[0] == at[2]
        assert re.fullmatch(r"rank \d · stage \d", lines[1])
        assert re.fullmatch(r"[12] s · starts at \d+ s", lines[-1])
        page.mouse.move(5, 5)
        assert page.locator(".ls-tip").is_hidden()

    def test_a_click_on_the_timeline_goes_there(self, show):
        page = show(payload_of())
        spot = ask(page, ELEVEN)
        page.mouse.click(*spot)
        assert state(page)[1] == pytest.approx(11, abs=0.1)

    def test_a_changed_picture_keeps_the_clock_and_goes_on_playing(self, show):
        page = show(payload_of())
        seek(page, 0.5)
        page.locator(".ls-play").click()
        other = payload_of(language="zh")
        page.evaluate(f"payload => mountPlayer(document.querySelector('{ROOT}'), payload)", other)
        page.wait_for_function("document.querySelector('.ls-words').textContent.includes('向')")
        playing, time, _ = state(page)
        assert playing
        assert 16 < time < 25

    def test_titles_of_all_devices_have_one_form(self, show):
        """The tokens that a rank has make its title longer or shorter; none drops a word that the others keep."""
        page = show(payload_of("context", model="gpt"))
        for wide in range(600, 1500, 100):
            page.set_viewport_size({"width": wide, "height": 900})
            page.wait_for_timeout(150)
            titles = page.locator(".ls-title").all_text_contents()
            assert len({(title.startswith("rank"), "tokens" in title) for title in titles}) == 1, (wide, titles)

    def test_a_narrow_page_does_not_scroll_sideways(self, show):
        page = show(payload_of("pipeline", 4))
        page.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_function("document.querySelector('.ls-figure .main-svg').clientWidth < 400")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400

    def test_a_dark_theme_changes_the_ink(self, show):
        page = show(payload_of())
        ink = "document.querySelector('.ls-figure .x2tick text').style.fill"
        light = page.evaluate(ink)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"{ink} !== '{light}'")
        assert page.evaluate(ink) == "rgb(228, 234, 240)"

    def test_an_empty_picture_opens_and_says_so(self, show):
        job = prepare(Spec(mode="ddp", devices=2))
        info = picture_info(modes.plan(job), job.layers, None, Timeline.of([], "measured", 2), "measured")
        page = show(moving_picture(info, text("en")))
        assert page.locator(".ls-caption").text_content() == "Nothing has been recorded yet."
        page.locator(".ls-play").click()
        assert page.locator(".ls-packet").count() == 0

    def test_a_thousand_spans_move_at_25_frames_a_second_or_more(self, show, alone):
        spans, _, payload = pipeline_payload(8, 23)
        assert spans >= 1000
        page = show(payload)
        # One try of three, as other work on this machine can only slow it down.
        with alone():
            assert any(frames_per_second(page, 1.5) >= 25 for _ in range(3))


def test_a_page_holds_no_address_and_a_label_cannot_end_its_element():
    payload = payload_of()
    payload["strings"][0] = "</script><b>"
    page = player.page(payload, title="<i>", language="zh")
    assert "</script><b>" not in page
    assert "<title>&lt;i&gt;</title>" in page
    head = page.replace(player._read("player.js"), "")
    assert not re.search(r'(?:src|href)="', head.split("<script>")[0])
    data = re.search(r'id="payload">(.*?)</script>', page)[1]
    assert json.loads(data)["strings"][0] == "</script><b>"
