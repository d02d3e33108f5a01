// What is told beside the picture: the lesson's steps, each with the moments in which it happens, and the line that says
// who does what. Read before player.js.

const DWELL = 1.1; // seconds that playing stays at each step which happened before the clock begins
const MOST = 6; // steps that stand in one row, at most
const [NOT_EARLIER, HELD, BATCH] = [0, 1, 2]; // what a step that happened earlier is seen in

// Letters reach out of their line by a part of its height; a line that is cut off, by more than half of it.
const hasRoom = (chip) => {
  const name = chip.querySelector(".ls-name"), { scrollWidth, clientWidth, scrollHeight, clientHeight } = name;
  return scrollWidth <= clientWidth && scrollHeight <= clientHeight + parseFloat(getComputedStyle(name).fontSize) / 2;
};

class Rail {
  constructor(player, list, line) {
    Object.assign(this, { player, list, line, chosen: -1, since: 0, shown: -1, intro: [], lesson: [] });
    list.onpointerleave = () => this.show(-1);
    this.resize = new ResizeObserver(() => list.clientWidth !== this.width && this.arrange());
    this.resize.observe(list);
  }

  // A new payload: a button a step, in a grid that no state changes the size of.
  build({ lesson, looks, text }) {
    this.list.hidden = this.line.hidden = !lesson.length;
    this.list.ariaLabel = text.lesson;
    if (this.lesson.length !== lesson.length) this.chosen = this.shown = -1;
    if (lesson.map((step) => step.title).join() !== this.lesson.map((step) => step.title).join()) {
      this.list.innerHTML = lesson.map((_, i) => `<li><button type="button" class="ls-step"><span class="ls-no">${i + 1}</span><span class="ls-name"></span></button></li>`).join("");
      this.chips = [...this.list.querySelectorAll("button")];
    }
    this.lesson = lesson;
    lesson.forEach(({ title, text: words, look, earlier, moments }, i) => {
      const chip = this.chips[i], absent = !earlier && !moments.length;
      chip.querySelector(".ls-name").textContent = title;
      chip.title = absent ? `${words} (${text.absent})` : words;
      chip.setAttribute("aria-disabled", absent);
      chip.style.setProperty("--ls-look", look < 0 ? "var(--st-primary-color)" : looks[look][0]);
      chip.style.setProperty("--ls-ink", look < 0 ? "#fff" : looks[look][1]);
      chip.onclick = () => this.go(i);
      chip.onpointerenter = () => this.show(i);
      chip.onfocus = () => this.show(chip.matches(":focus-visible") ? i : -1);
      chip.onblur = () => this.show(-1);
    });
    this.arrange();
  }

  // In as few rows as leave room for every title.
  arrange() {
    const count = this.lesson.length;
    this.width = this.list.clientWidth;
    this.line.dataset.long = this.lesson.some(({ text }) => width(text, WORDS) * this.player.loud > this.width); // two lines for all, so that nothing jumps
    for (let rows = Math.ceil(count / MOST); this.width && rows <= count; rows++) {
      this.list.style.setProperty("--ls-steps", Math.ceil(count / rows));
      if (this.chips.every(hasRoom)) return;
    }
  }

  // Its moments are shown on the timeline while a step has the pointer or the keyboard.
  show(i) {
    if (this.shown === i) return;
    this.shown = i;
    if (this.player.ready) this.player.draw();
  }

  // To the next moment of a step, round and round. What was playing plays on from there.
  go(i) {
    const { earlier, moments } = this.lesson[i] ?? {};
    if (!earlier && !moments?.length) return;
    const again = this.chosen === i, now = this.player.time;
    const [, , best] = earlier ? [0, 0, 0] : moments.find(([, , best]) => (again ? best > now : best >= now)) ?? moments[0];
    this.intro = [];
    Object.assign(this, { chosen: i, since: best });
    this.player.held = 0;
    this.player.seek(best);
  }

  // Playing from the start stays a while at each step that happened earlier. True while it does.
  begin() { this.intro = this.player.time ? [] : this.lesson.flatMap(({ earlier }, i) => (earlier ? [[i, DWELL]] : [])); }
  introduce(seconds) {
    if (!this.intro.length) return false;
    const [i] = this.intro[0], fresh = this.chosen !== i;
    if ((this.intro[0][1] -= seconds) <= 0) this.intro.shift();
    Object.assign(this, { chosen: i, since: 0 });
    if (fresh) this.player.draw();
    return true;
  }

  // Marks what goes on at a time. Returns what to point out of the start: HELD, BATCH or NOT_EARLIER.
  at(t) {
    if (t !== this.since) Object.assign(this, { chosen: -1, since: t, intro: [] });
    if (!this.lesson.length) return NOT_EARLIER;
    const { end } = this.player.payload, { lesson, chosen } = this, begins = t === 0 && !(chosen >= 0 && !lesson[chosen].earlier);
    let on = lesson.flatMap(({ moments }, i) => (moments.some(([t0, t1]) => t0 <= t && (t < t1 || (t === end && t1 === end))) ? [i] : []));
    const early = lesson.flatMap(({ earlier }, i) => (earlier ? [i] : []));
    if (begins && early.length) on = chosen >= 0 ? [chosen] : early;
    // Of several that go on, the later one in the lesson is the news; where none does, the one that ended last.
    const said = chosen >= 0 ? chosen : on.length ? (begins ? on[0] : on.at(-1)) : this.last(t);
    this.chips.forEach((chip, i) => (on.includes(i) ? chip.getAttribute("aria-current") || chip.setAttribute("aria-current", "step") : chip.removeAttribute("aria-current")));
    const { title, text } = lesson[said];
    if (this.line.textContent !== text) Object.assign(this.line, { textContent: text, title: text }).dataset.step = title;
    return begins ? lesson[said].earlier : NOT_EARLIER;
  }

  last(t) {
    const ends = this.lesson.map(({ moments }) => moments.findLast(([, t1]) => t1 <= t)?.[1] ?? -1);
    return ends.lastIndexOf(Math.max(...ends));
  }

  // [from, to, colour] of the moments to show on the timeline.
  bands() {
    const { moments, look } = this.lesson[this.shown] ?? { moments: [] }, { looks } = this.player.payload;
    return moments.map(([t0, t1]) => [t0, t1, looks[look][0]]);
  }
}

// One line: who does what. Where ranks do many different things, only which kind of thing; where these are many ranks, how many.
function narration({ strings, text, boxes }, doing, idle, fits) {
  const kind = (said) => said.split(" · ")[0];
  const line = (name, names) => {
    const groups = new Map();
    for (const [words, ranks] of doing) groups.set(name(strings[words]), [...(groups.get(name(strings[words])) ?? []), ...ranks]);
    const parts = [...groups].map(([said, ranks]) => text.doing.replace("{ranks}", names(boxes, text, ranks.sort((a, b) => a - b))).replace("{what}", () => said));
    if (idle.length) parts.push(text.idle.replace("{ranks}", names(boxes, text, idle)));
    return parts.join("   |   ");
  };
  const lines = [[(said) => said, namesOf], [kind, namesOf], [kind, numberOf]].map((how) => line(...how));
  return lines.find(fits) ?? lines.at(-1);
}

// By the ranks that boxes stand for, which are not their places where some ranks have none.
function namesOf(boxes, text, of) {
  if (of.length === 1) return boxes[of[0]].name;
  if (of.length === boxes.length) return text.all;
  const runs = [];
  for (const rank of of.map((b) => boxes[b].rank)) runs.at(-1)?.[1] === rank - 1 ? (runs.at(-1)[1] = rank) : runs.push([rank, rank]);
  return text.ranks.replace("{ranks}", runs.map(([a, b]) => (a === b ? a : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`)).join(", "));
}

function numberOf(boxes, text, of) {
  return of.length === 1 || of.length === boxes.length ? namesOf(boxes, text, of) : text.counted.replace("{count}", of.length).replace("{all}", boxes.length);
}
