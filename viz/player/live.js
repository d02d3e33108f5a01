// A run that goes on -> what it has come to, twice a second. The page asks for it past Streamlit, and changes a few
// texts and one path: the ranks that it watches need the cores that drawing anew would take.

const LOOK = 500; // milliseconds between two looks

export default function (component) {
  const { parentElement, data, setTriggerValue } = component;
  let root = parentElement.querySelector(".lockstep-live");
  if (!root) {
    parentElement.appendChild((root = document.createElement("div")));
    root.className = "lockstep-live";
    root.innerHTML = `<div><p><span class="ls-state" role="status"><span></span></span> <span class="ls-count"></span></p><div class="ls-done" role="progressbar"><div></div></div>
      <p class="ls-ranks"></p><p class="ls-more"></p><p class="ls-note"></p></div><div class="ls-losses" role="img"><span class="ls-axis"></span><div class="ls-ticks"></div>
      <svg viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true"><path/></svg><div class="ls-steps"><span></span><span></span><span></span></div></div>`;
  }
  root.data = data;
  root.classList.toggle("ls-sparing", data.sparing !== ""); // the player looks for it
  root.querySelector(".ls-note").textContent = data.sparing;
  const look = async () => {
    const asked = await fetch(root.data.address).catch(() => null); // no answer: Streamlit says that its server is gone
    const now = asked?.ok && (await asked.json());
    if (!root.isConnected) return;
    if (now && !now.error) show(root, now);
    if (now?.ended) setTriggerValue("ended", true); // and again, should the page stay
    root.next = setTimeout(look, LOOK);
  };
  root.next ??= setTimeout(look);
  return () => { clearTimeout(root.next); root.remove(); };
}

// What is as it was is not touched.
function show(root, { state, count, done, ranks, more, losses, steps }) {
  const part = (name) => root.querySelector(`.ls-${name}`), bar = part("done"), percent = Math.round(100 * done);
  const write = (element, words) => element.textContent === words || (element.textContent = words);
  const badge = (element, [colour, words]) => { element.className = `ls-badge ls-${colour}`; write(element, words); };
  const fill = (element, count) => { while (element.childElementCount < count) element.append(document.createElement("span"), " "); return [...element.children]; };
  badge(part("state").firstElementChild, state);
  write(part("count"), count);
  bar.ariaLabel = state[1];
  bar.setAttribute("aria-valuenow", percent);
  bar.firstElementChild.style.width = `${percent}%`;
  fill(part("ranks"), ranks.length).forEach((element, i) => badge(element, ranks[i]));
  write(part("more"), more);
  part("losses").ariaLabel = losses.title;
  part("losses").querySelector("path").setAttribute("d", losses.path);
  fill(part("ticks"), losses.marks.length).forEach((element, i) => {
    element.hidden = i >= losses.marks.length;
    if (element.hidden) return;
    write(element, losses.marks[i][1]);
    element.style.top = `${losses.marks[i][0]}%`;
  });
  write(part("axis"), losses.title);
  [...part("steps").children].forEach((element, i) => write(element, steps[i]));
}
