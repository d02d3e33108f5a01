// A payload -> one figure with one clock. Streamlit mounts it as a component (default export); an exported page calls
// mountPlayer(root, payload). Plotly draws what stands still, once. What moves is drawn here, as SVG at Plotly's own
// scale: glow beneath the figure, cursor and packets above it. (Plotly.animate computes every trace anew each frame.)

const SPEEDS = [0.25, 0.5, 1, 2, 4];
const ICONS = {
  play: "M4 2V14L14 8Z", pause: "M3 2H7V14H3ZM9 2H13V14H9Z", back: "M2 2H4V14H2ZM14 2V14L5 8Z", forward: "M12 2H14V14H12ZM2 2V14L11 8Z",
  full: "M2 2H7V4H4V7H2ZM9 2H14V7H12V4H9ZM2 9H4V12H7V14H2ZM12 9H14V14H9V12H12Z",
  repeat: "M8 2.5A5.5 5.5 0 1 0 13.5 8H11.8A3.8 3.8 0 1 1 8 4.2V6.6L12.4 3.3L8 0Z",
};
const HOLD = 0.9; // seconds that the clock stands at the end of a training step
const [ENOUGH, LEAST] = [0.9, 0.6]; // of its height: what a picture has on a full screen, and at least on a small one
const ABOVE = 90; // pixels of the window that a page needs for its own head
const CALM = 400; // milliseconds between two pictures for whoever wants little motion: playing then goes from op to op
const [SPARING, SPARED] = [".ls-sparing", 200]; // a run that needs all cores, and the milliseconds between two frames beside it
const CLICK = 4; // pixels: what moves less is a click
const icon = (name) => `<svg viewBox="0 0 16 16" width="18" height="18" fill="currentColor" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;

export default function (component) {
  const { parentElement, data } = component;
  let root = parentElement.querySelector(".lockstep-player");
  if (!root) parentElement.appendChild((root = document.createElement("div")));
  root.gone = false; // Streamlit calls again when the data or the theme changes, and cleans up only at unmount
  plotlyLoaded().then(() => root.gone || mountPlayer(root, data), (error) => (root.textContent = String(error)));
  return () => { root.gone = true; root.player?.destroy(); };
}

export function mountPlayer(root, payload) {
  (root.player ??= new Player(root)).show(payload);
}

class Player {
  constructor(root) {
    Object.assign(this, { root, time: 0, speed: 1, playing: false, repeat: false, ready: false, held: 0, zoom: 1, loud: 1 });
    Object.assign(root, { className: "lockstep-player", tabIndex: 0 });
    root.setAttribute("role", "group");
    root.innerHTML = `<div class="ls-bar"><div class="ls-buttons">${["back", "toggle", "forward", "repeat"].map((name) =>
      `<button type="button" class="ls-${name === "toggle" ? "play" : name}">${ICONS[name] ? icon(name) : ""}</button>`).join("")}</div>
      <input class="ls-slider" type="range" min="0" step="any"><output class="ls-time"></output>
      <select class="ls-speed">${SPEEDS.map((s) => `<option value="${s}">${s}×</option>`).join("")}</select>
      <button type="button" class="ls-full">${icon("full")}</button></div>
      <ol class="ls-rail"></ol><p class="ls-said"></p><p class="ls-words"></p><div class="ls-stage"><svg class="ls-under" aria-hidden="true"></svg>
      <div class="ls-figure" aria-hidden="true"></div><svg class="ls-marks" aria-hidden="true"></svg><svg class="ls-over" aria-hidden="true"></svg>
      <div class="ls-tip" hidden></div></div><div class="ls-foot"><span class="ls-legend"></span><span class="ls-caption"></span></div>`;
    for (const part of ["slider", "time", "speed", "words", "rail", "said", "stage", "figure", "under", "marks", "over", "tip", "legend", "caption"])
      this[`${part}_`] = root.querySelector(`.ls-${part}`);
    this.buttons = Object.fromEntries(["back", "play", "forward", "repeat", "full"].map((name) => [name, root.querySelector(`.ls-${name}`)]));
    this.buttons.back.onclick = () => this.back();
    this.buttons.play.onclick = () => this.toggle();
    this.buttons.forward.onclick = () => this.forward();
    this.buttons.repeat.onclick = () => this.toggleRepeat();
    this.buttons.full.onclick = () => this.toggleFull();
    this.buttons.full.hidden = !document.fullscreenEnabled;
    root.addEventListener("fullscreenchange", () => this.ready && this.grow());
    this.rail = new Rail(this, this.rail_, this.said_);
    this.slider_.oninput = () => { this.pause(); this.seek(+this.slider_.value); };
    this.speed_.value = 1;
    this.speed_.onchange = () => (this.speed = +this.speed_.value);
    this.onKey = (event) => this.key(event);
    document.addEventListener("keydown", this.onKey, true);
    this.stage_.addEventListener("pointerdown", (event) => {
      root.focus({ preventScroll: true });
      const { clientX: x, clientY: y } = event; // while a button is down, Plotly covers the page
      const up = (late) => Math.hypot(late.clientX - x, late.clientY - y) <= CLICK && this.click(late);
      document.addEventListener("pointerup", up, { capture: true, once: true });
    }, true);
    this.stage_.addEventListener("pointermove", (event) => this.point(event), true);
    this.stage_.addEventListener("pointerleave", () => (this.tip_.hidden = true));
    [this.calm, this.dark] = ["reduced-motion: reduce", "color-scheme: dark"].map((want) => matchMedia(`(prefers-${want})`));
    this.onTheme = () => this.show(this.payload);
    this.dark.addEventListener("change", this.onTheme);
    this.resize = new ResizeObserver(() => this.ready && this.figure_.clientWidth && Plotly.Plots.resize(this.figure_));
    this.resize.observe(this.figure_);
  }

  // Shows a payload, new or changed. The clock keeps its time (in another picture, its share of the whole) and goes on.
  async show(payload) {
    const theme = getComputedStyle(this.root);
    const colours = JSON.stringify(Object.values(payload.theme).map((name) => theme.getPropertyValue(name)));
    if (payload === this.payload && colours === this.colours) return;
    const old = this.payload;
    if (old && old.id !== payload.id) this.time *= payload.end / old.end;
    else if (old && this.time === old.end) this.time = payload.end; // it grew, and we follow
    else if (old) this.time = Math.min(payload.end, (this.time * old.unit[0]) / payload.unit[0]);
    Object.assign(this, { payload, colours, ready: false });
    if (font !== theme.fontFamily) (font = theme.fontFamily), known.clear();
    this.prepare();
    this.label();
    this.rail.build(payload);
    const { data, layout } = themed(payload, theme);
    this.plain = layout.height; // given to the element instead, so that it can grow on a full screen
    delete layout.height;
    this.fit();
    layout.uirevision = `${payload.id} ${payload.end}`; // zoom stays while the clock is the same
    const turn = (this.turn = {});
    await Plotly.react(this.figure_, data, layout, CONFIG);
    if (turn !== this.turn || !this.root.isConnected) return;
    for (const event of ["plotly_afterplot", "plotly_relayouting"]) // resized, panned, zoomed
      this.figure_.removeAllListeners(event).on(event, () => this.ready && (this.mark(), this.draw()));
    this.ready = true;
    this.mark();
    this.seek(this.time);
    if (document.fullscreenElement === this.root) this.grow();
    if (this.playing) this.run();
  }

  // The window's height that is left for the picture, beside words that are so many times as large.
  roomBeside(loud) {
    this.root.style.setProperty("--ls-loud", (this.loud = loud));
    this.rail.arrange();
    const parts = ["bar", "rail", "said", "words", "foot"].map((part) => this.root.querySelector(`.ls-${part}`).offsetHeight);
    return innerHeight - (document.fullscreenElement === this.root ? 46 : ABOVE) - parts.reduce((sum, part) => sum + part);
  }

  // On a page a picture that is too high for the window shrinks, so that devices and every row are seen at once. On a full
  // screen words grow with its width, and the picture as far as there is room beside them; else words grow less.
  fit() {
    const full = document.fullscreenElement === this.root, { plain } = this;
    let loud = full ? Math.min(1.6, Math.max(1, innerWidth / 1250)) : 1, left = this.roomBeside(loud);
    while (loud > 1 && left < ENOUGH * plain) left = this.roomBeside((loud = Math.max(1, loud - 0.05)));
    this.zoom = full ? Math.min(loud, Math.max(1, left / plain)) : 1;
    this.root.style.setProperty("--ls-zoom", this.zoom);
    this.figure_.style.height = `${plain * Math.max(LEAST, Math.min(full ? 2 : 1, left / plain))}px`; // and the observer does the rest
  }

  // The payload's layout, in type that is as much larger as all else.
  grow() {
    const { font: { size }, margin } = this.payload.figure.layout;
    this.fit();
    Plotly.relayout(this.figure_, { "font.size": size * this.zoom, "margin.l": margin.l * this.zoom });
  }

  // What drawing looks up: the spans of each device, in order of start.
  prepare() {
    const { boxes, spans } = this.payload;
    this.of = [1, 2].map((front) => boxes.map((_, b) => [...spans.t0.keys()].filter((i) => spans.front[i] === front && spans.box[i] === b)));
    this.slider_.max = this.payload.end;
    this.root.dataset.end = this.payload.end * this.payload.unit[0];
  }

  label() {
    const { text, legend, looks, caption } = this.payload, { back, play, forward, repeat, full } = this.buttons;
    const named = [[back, text.back], [play, this.playing ? text.pause : text.play], [forward, text.forward], [repeat, text.repeat], [full, text.full],
      [this.speed_, text.speed], [this.slider_, text.time]];
    for (const [part, words] of named) part.title = part.ariaLabel = words;
    this.root.ariaLabel = text.label;
    play.innerHTML = icon(this.playing ? "pause" : "play");
    repeat.setAttribute("aria-pressed", this.repeat);
    this.root.dataset.playing = this.playing;
    this.words_.ariaLive = this.said_.ariaLive = this.playing ? "off" : "polite"; // told after a step, and not while it plays
    this.caption_.textContent = caption;
    this.legend_.replaceChildren(...legend.map(([look, travels, words]) => {
      const item = document.createElement("span"), [colour, , shape] = looks[look];
      const d = travels ? SHAPES[shape] : "M-13,-9H13V9H-13Z";
      item.innerHTML = `<svg viewBox="-15 -15 30 30" width="16" height="16" aria-hidden="true"><path d="${d}" fill="${colour}"/></svg>`;
      item.append(words);
      return item;
    }));
  }

  toggle() { this.playing ? this.pause() : this.play(); }
  toggleFull() { document.fullscreenElement === this.root ? document.exitFullscreen() : this.root.requestFullscreen(); }
  toggleRepeat() { this.repeat = !this.repeat; this.label(); }
  forward() { this.pause(); this.seek(this.payload.stops.find((s) => s > this.time * (1 + 1e-9) + 1e-12) ?? this.payload.end); }
  back() { this.pause(); this.seek(this.payload.stops.findLast((s) => s < this.time * (1 - 1e-9) - 1e-12) ?? 0); }
  first() { this.pause(); this.seek(0); }
  last() { this.pause(); this.seek(this.payload.end); }
  pause() { this.playing = false; this.stop(); this.label(); }
  play() {
    if (this.time >= this.payload.end) this.time = 0;
    Object.assign(this, { playing: true, held: 0 });
    this.rail.begin();
    this.label();
    this.run();
  }

  run() {
    this.stop();
    let last = performance.now();
    const soon = () => (this.frame = requestAnimationFrame(tick));
    const tick = (now) => {
      if (!this.playing || !this.ready) return; // show() starts it again
      const past = Math.min(0.5, Math.max(0, now - last) / 1000); // a hidden tab does not leap ahead
      last = now;
      const wait = this.calm.matches ? CALM : document.querySelector(SPARING) && SPARED;
      wait ? (this.wait = setTimeout(soon, wait)) : soon();
      if (this.held > 0) return void (this.held -= past);
      if (this.rail.introduce(past * this.speed)) return;
      const { end, pauses, seconds, stops } = this.payload;
      if (this.time >= end) return this.repeat ? this.seek(0) : this.pause();
      const next = Math.min(end, this.clock + (past * this.speed * end) / seconds);
      const stop = pauses.find((p) => p > this.clock && p <= next); // stand still where a training step ends
      if (stop !== undefined && (stop < end || this.repeat)) this.held = HOLD;
      const at = stop ?? next, begun = stops.findLast((s) => s <= at) ?? 0;
      this.seek(this.calm.matches && at < end ? Math.max(this.time, begun) : at);
      this.clock = at; // ahead of what is shown
    };
    soon();
  }

  stop() { cancelAnimationFrame(this.frame); clearTimeout(this.wait); }

  key(event) {
    const active = this.root.getRootNode().activeElement;
    const here = this.root.contains(active);
    const free = document.activeElement === document.body && this.root === [...document.querySelectorAll(".lockstep-player")].find((p) => p.offsetParent);
    if (!(here || free) || event.ctrlKey || event.metaKey || event.altKey || active?.tagName === "SELECT") return;
    const act = { " ": "toggle", k: "toggle", ArrowRight: "forward", ArrowLeft: "back", Home: "first", End: "last", l: "toggleRepeat", f: "toggleFull" }[event.key];
    const step = /^[1-9]$/.test(event.key) && this.payload?.lesson[event.key - 1];
    if (!(act || step) || !this.payload) return;
    if (event.key === " " && active?.tagName === "BUTTON" && here) return; // the button acts on its own
    event.preventDefault();
    event.stopPropagation();
    step ? this.rail.go(event.key - 1) : this[act]();
  }

  seek(time) {
    const { end, unit } = this.payload;
    this.clock = this.time = Math.max(0, Math.min(end, time));
    this.slider_.value = this.time;
    this.slider_.style.setProperty("--ls-done", `${(100 * this.time) / end}%`);
    this.time_.value = `${this.time.toFixed(end < 10 ? 2 : end < 100 ? 1 : 0)} ${unit[1]}`;
    this.slider_.setAttribute("aria-valuetext", this.time_.value);
    this.root.dataset.time = this.time * unit[0];
    if (this.ready) this.draw();
  }

  // From the payload's coordinates to pixels, as Plotly has them at this moment.
  scale() {
    const [X, Y, clock, rows] = this.payload.axes.map((name) => this.figure_._fullLayout[name]);
    return {
      px: (v) => X._offset + X.l2p(v), py: (v) => Y._offset + Y.l2p(v), tx: (v) => clock._offset + clock.l2p(v),
      ty: (v) => rows._offset + rows.l2p(v), left: clock._offset, right: clock._offset + clock._length,
      top: rows._offset, bottom: rows._offset + rows._length, clock,
    };
  }

  // Texts that stand still: drawn when the scale changes, each in the longest form that fits.
  mark() {
    const { boxes, spans, strings, looks } = this.payload, { px, py, tx, ty, left, right } = this.scale(), marks = brush(this.marks_);
    const z = this.zoom, fits = ([c0, c1, d0, d1], name) => py(d0) - py(d1) > 12 * z && z * width(name, CELL) <= px(c1) - px(c0) - 4;
    this.named = boxes.every(({ cells, layers }) => layers.every((name, i) => fits(cells[i], name))); // all or none
    this.room = this.words_.clientWidth;
    const digits = "8".repeat(Math.max(0, ...spans.label.map((i) => /\d*$/.exec(strings[i])[0].length))); // likewise
    // Titles get shorter in the same steps: as many steps before the shortest in each box as have room in all of them.
    const steps = ({ at: [x0, x1], titles }) => titles.length - titles.indexOf(fitting(titles, (px(x1) - px(x0) - 20) / z, TITLE) ?? titles.at(-1));
    const common = Math.min(...boxes.map(steps));
    for (const { at: [x0, x1, , y1], titles, memory, cells, kept, layers } of boxes) {
      const title = titles.at(-Math.min(common, titles.length));
      marks("text", { x: px(x0) + 10, y: py(y1) + (py(0) - py(18)), class: "ls-title" }, title);
      const used = memory[2];
      if (z * width(used, SMALL) < px(x1) - px(memory[0]) - 6) marks("text", { x: px(memory[0]), y: py(memory[1]), class: "ls-small" }, used);
      cells.forEach(([c0, c1, d0, d1], i) => {
        if (!this.named) return;
        // The name stands in what is held, else beside it, else across both.
        const [k0, k1] = kept[i], beside = k0 - c0 > c1 - k1 ? [c0, k0] : [k1, c1];
        const [at, look] = fits([k0, k1, d0, d1], layers[i]) ? [[k0, k1], "ls-held"] : k1 > k0 && fits([...beside, d0, d1], layers[i]) ? [beside, "ls-part"] : [[c0, c1], k1 > k0 ? "ls-part" : ""];
        marks("text", { x: (px(at[0]) + px(at[1])) / 2, y: (py(d0) + py(d1)) / 2, class: `ls-layer ${look}` }, layers[i]);
      });
    }
    spans.t0.forEach((t0, i) => {
      const x0 = Math.max(left, tx(t0)), x1 = Math.min(right, tx(spans.t1[i]));
      if (x1 - x0 < 8) return;
      const [y0, y1] = spans.lanes[spans.lane[i]], high = ty(y1) - ty(y0);
      if (high < 10) return;
      const size = Math.min(15 * z, high - 3), room = (x1 - x0 - 4) * (BAR / size);
      const short = (words) => (/^\d+$/.test(words) ? digits : /^[A-Z]\d+$/.test(words) ? `W${digits}` : words); // W: the widest
      const label = strings[spans.label[i]].split("\t").find((words) => width(short(words), BAR) <= room);
      if (!label) return;
      const fill = spans.veiled[i] ? "currentColor" : looks[spans.look[i]][1];
      marks("text", { x: (x0 + x1) / 2, y: (ty(y0) + ty(y1)) / 2, fill, class: "ls-label", "font-size": size }, label);
    });
    marks();
  }

  draw() {
    const { boxes, spans, strings, flights, paths, looks, end, fade } = this.payload, t = this.time;
    const { px, py, left, right, top, bottom, clock } = this.scale();
    const under = brush(this.under_), over = brush(this.over_), doing = new Map(), idle = [], pills = [];
    const links = new Map(), flying = [], z = this.zoom, pointed = this.rail.at(t);
    for (const [t0, t1, colour] of this.rail.bands()) {
      const [x0, x1] = [t0, t1].map((v) => left + Math.max(0, Math.min(right - left, clock.l2p(v))));
      if (x1 > x0) under("path", { d: rounded(x0, Math.max(x1, x0 + 3), top - 4, bottom, 4), fill: colour, opacity: 0.28 });
    }
    for (let i = 0; i < flights.t0.length && flights.t0[i] <= t; i++) { // sorted by start
      if (t > flights.t1[i] || (t === flights.t1[i] && t < end)) continue;
      flying.push(i);
      for (const link of paths[flights.path[i]]) links.set(link, looks[flights.look[i]][0]);
    }
    for (const [link, colour] of links) {
      const [x0, y0, x1, y1] = this.payload.links[link];
      under("path", { d: `M${px(x0)},${py(y0)}L${px(x1)},${py(y1)}`, stroke: colour, "stroke-width": 6, opacity: 0.35 });
    }
    boxes.forEach(({ at: [x0, x1, y0, y1], cells, kept, updated, held, glow, layers }, b) => {
      const i = this.current(this.of[0][b], t), on = i < 0 ? 0 : Math.max(0, 1 - Math.max(0, t - spans.t1[i]) / fade);
      const active = i >= 0 && (t < spans.t1[i] || t === spans.t0[i]);
      if (pointed === HELD) cells.forEach((cell, c) => {
        const [k0, k1] = kept[c].map(px);
        if (held[c]) over("path", { d: rounded(k0, k1, py(cell[3]), py(cell[2]), 2), class: "ls-pointed", "stroke-width": Math.min(2.5, (k1 - k0) / 3) });
      });
      const said = active ? i : (this.of[1][b].findLast((i) => spans.t0[i] <= t && t < spans.t1[i]) ?? -1);
      said < 0 ? idle.push(b) : doing.set(spans.words[said], [...(doing.get(spans.words[said]) ?? []), b]);
      if (!on) return;
      const [colour, ink] = looks[spans.look[i]], X0 = px(x0), X1 = px(x1), Y0 = py(y1), Y1 = py(y0);
      const d = rounded(X0, X1, Y0, Y1, 12);
      for (const [wide, opacity] of [[26, 0.1], [15, 0.16], [7, 0.5]]) // a soft edge without a filter, which is slow
        under("path", { d, fill: "none", stroke: colour, "stroke-width": wide, opacity: opacity * on });
      over("path", { d, fill: colour, opacity: 0.13 * on, stroke: colour, "stroke-width": 2.5 });
      cells.forEach(([c0, c1, d0, d1], c) => {
        const lit = spans.cell[i]; // a cell, -1: all that are held, or -2 - held: those of one stage
        if (lit !== c && !(held[c] && (lit === -1 || lit === -2 - held[c]))) return;
        const [k0, k1] = lit === c ? glow[c] : lit === -1 ? updated[c] : kept[c]; // of all that is held: what is updated
        if (k1 <= k0) return;
        over("path", { d: rounded(px(k0), px(k1), py(d1), py(d0), 2), fill: colour, opacity: on });
        if (this.named && z * width(layers[c], CELL) <= px(k1) - px(k0) - 4) over("text", { x: (px(k0) + px(k1)) / 2, y: (py(d0) + py(d1)) / 2, fill: ink, opacity: on, class: "ls-lit" }, layers[c]);
      });
      const pill = fitting(strings[spans.label[i]].split("\t"), (X1 - X0 - 8) / z, PILL), wide = pill && z * (width(pill, PILL) / 2 + 11);
      if (!pill) return;
      const middle = (X0 + X1) / 2;
      pills.push(() => {
        over("path", { d: rounded(middle - wide, middle + wide, Y0 - 20 * z, Y0 + 4 * z, 12 * z), fill: colour, opacity: on, class: "ls-pill" });
        over("text", { x: middle, y: Y0 - 8 * z, fill: ink, opacity: on, class: "ls-doing" }, pill);
      });
    });
    const at = clock.l2p(t);
    if (at >= 0 && at <= right - left) {
      over("path", { d: `M${left + at},${top - 4}V${bottom}`, class: "ls-cursor" });
      over("path", { d: `M${left + at - 7},${top - 12}h14l-7,9Z`, class: "ls-head" });
    }
    const size = Math.min(z, Math.max(0.55, (px(boxes[0].at[1]) - px(boxes[0].at[0])) / 90));
    for (const i of flying) {
      const [x, y] = along(paths[flights.path[i]].map((link) => this.payload.links[link]), (t - flights.t0[i]) / (flights.t1[i] - flights.t0[i]));
      const [colour, ink, shape] = looks[flights.look[i]], spot = `translate(${px(x)},${py(y)})scale(${size * (pointed === BATCH ? 1.5 : 1)})`;
      over("path", { d: SHAPES[shape], fill: colour, transform: spot, class: "ls-packet" });
      if (flights.number[i] >= 0) over("text", { transform: spot, fill: ink, class: "ls-number" }, String(flights.number[i]));
    }
    for (const pill of pills) pill(); // a packet passes beneath: what a device does can always be read
    under(), over();
    const words = narration(this.payload, doing, idle, (line) => width(line, WORDS) * this.loud <= this.room);
    if (this.words_.textContent !== words) this.words_.textContent = this.words_.title = words;
    this.drawn = (this.drawn ?? 0) + 1; // frames, for tests
  }

  // The last of some spans that has started, or -1.
  current(of, t) {
    const { t0 } = this.payload.spans;
    let low = 0, high = of.length;
    while (low < high) t0[of[(low + high) >> 1]] <= t ? (low = ((low + high) >> 1) + 1) : (high = (low + high) >> 1);
    return low ? of[low - 1] : -1;
  }

  // Where the pointer is, on the clock and in the rows.
  where(event) {
    const { left, right, top, bottom, clock } = this.scale(), frame = this.figure_.getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    if (x < left || x > right || y < top - 14 || y > bottom) return null;
    return { x, y, time: clock.p2l(x - left) };
  }

  click(event) {
    if (!this.ready) return;
    const at = this.where(event);
    if (at) this.seek(at.time);
  }

  // Says what the span under the pointer is; Plotly's own hover would find the one whose middle is nearest.
  point(event) {
    const at = this.ready && !event.buttons && this.where(event);
    const { spans, strings, text, unit } = this.payload ?? {};
    this.tip_.hidden = true;
    if (!at) return;
    const { tx, ty } = this.scale();
    let found = -1;
    for (let i = 0; i < spans.t0.length; i++) {
      const [y0, y1] = spans.lanes[spans.lane[i]];
      if (at.y < ty(y0) - 1 || at.y > ty(y1) + 1) continue;
      if (at.x >= tx(spans.t0[i]) - 1 && at.x <= Math.max(tx(spans.t1[i]), tx(spans.t0[i]) + 2)) found = i;
    }
    if (found < 0) return;
    const took = `${showSeconds((spans.t1[found] - spans.t0[found]) * unit[0])} · ${text.starts.replace("{time}", showSeconds(spans.t0[found] * unit[0]))}`;
    const lines = [strings[spans.words[found]], strings[spans.place[found]], strings[spans.size[found]], took];
    this.tip_.replaceChildren(...lines.filter(Boolean).map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    this.tip_.hidden = false;
    const { offsetWidth: w, offsetHeight: h } = this.tip_;
    this.tip_.style.left = `${Math.max(0, Math.min(this.figure_.clientWidth - w, at.x + 14))}px`;
    this.tip_.style.top = `${at.y - h - 12}px`;
  }

  destroy() {
    this.ready = this.playing = false;
    this.stop();
    document.removeEventListener("keydown", this.onKey, true);
    this.dark.removeEventListener("change", this.onTheme);
    this.resize.disconnect();
    this.rail.resize.disconnect();
    if (window.Plotly) Plotly.purge(this.figure_);
    this.root.remove();
  }
}
