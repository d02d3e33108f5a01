// A figure that stands still -> a chart on a Streamlit page, as wide as its place, drawn by the player's plotly.js. Its
// legend is a line of names above it, which wraps where there is little room: Plotly's own would lie on the figure.

const LINES = { "/": "M-13,1L-3,-9M-13,9L5,-9M-5,9L13,-9M3,9L13,-1", "\\": "M13,1L3,-9M13,9L-5,-9M5,9L-13,-9M-3,9L-13,-1",
  "-": "M-13,-5H13M-13,1H13M-13,7H13", "|": "M-8,-9V9M-1,-9V9M6,-9V9", ".": "M-8,-4h.1M0,-4h.1M8,-4h.1M-4,4h.1M4,4h.1" };
const HATCHES = { ...LINES, x: LINES["/"] + LINES["\\"], "+": LINES["-"] + LINES["|"] };
const SYMBOLS = { ...SHAPES, x: "M-9,-12L0,-4L9,-12L12,-9L4,0L12,9L9,12L0,4L-9,12L-12,9L-4,0L-12,-9Z", "triangle-up": SHAPES.triangle, "line-ns": "M0,-13V13" };

export default function (component) {
  const { parentElement, data, setStateValue } = component;
  let root = parentElement.querySelector(".lockstep-chart");
  if (!root) {
    parentElement.appendChild((root = document.createElement("div")));
    root.innerHTML = `<div class="ls-legend" aria-hidden="true"></div><div class="ls-figure" aria-hidden="true"></div>`;
  }
  Object.assign(root, { className: "lockstep-chart", gone: false });
  root.setAttribute("role", data.picks ? "slider" : "img");
  root.setAttribute("aria-label", data.alt);
  root.lastElementChild.style.height = `${data.figure.layout.height}px`; // its place is kept until it is drawn
  plotlyLoaded().then(() => root.gone || draw(root, data, setStateValue), (error) => (root.textContent = String(error)));
  return () => {
    root.gone = true;
    root.resize?.disconnect();
    if (window.Plotly) Plotly.purge(root.lastElementChild);
    root.remove();
  };
}

async function draw(root, payload, setStateValue) {
  const { data, layout } = themed(payload, getComputedStyle(root)), [legend, figure] = root.children;
  legend.replaceChildren(...(layout.showlegend ? data.filter((trace) => trace.showlegend !== false) : []).map(named));
  layout.showlegend = false;
  await Plotly.react(figure, data, layout, CONFIG);
  figure.removeAllListeners("plotly_click");
  if (payload.picks) {
    figure.on("plotly_click", ({ points: [point] }) => setStateValue("picked", point.customdata));
    walk(root, figure, (name) => setStateValue("picked", name));
  }
  root.resize ??= new ResizeObserver(() => figure.clientWidth && Plotly.Plots.resize(figure));
  root.resize.observe(figure);
}

// Points to pick, without a mouse: arrows go from one to the next, the fastest first, and Enter picks it.
function walk(root, figure, pick) {
  const points = figure.data.flatMap(({ customdata, hovertext, y }, curveNumber) => (customdata ?? []).map((name, pointNumber) =>
    ({ name, y: y[pointNumber], words: hovertext[pointNumber], curveNumber, pointNumber }))).sort((a, b) => a.y - b.y);
  const last = points.length - 1, show = () => {
    Object.entries({ tabindex: 0, "aria-valuemin": 1, "aria-valuemax": last + 1, "aria-valuenow": root.at + 1 }).forEach(([name, value]) => root.setAttribute(name, value));
    root.setAttribute("aria-valuetext", new DOMParser().parseFromString(points[root.at].words.replace("<br>", " · "), "text/html").body.textContent);
  };
  const hover = () => root.matches(":focus-visible") && Plotly.Fx.hover(figure, [points[root.at]]);
  root.at = Math.min(root.at ?? 0, last);
  show();
  root.onfocus = hover;
  root.onblur = () => Plotly.Fx.unhover(figure);
  root.onkeydown = (event) => {
    const to = { ArrowRight: root.at + 1, ArrowUp: root.at + 1, ArrowLeft: root.at - 1, ArrowDown: root.at - 1, Home: 0, End: last }[event.key];
    if (to === undefined && event.key !== "Enter") return;
    event.preventDefault();
    if (to === undefined) return pick(points[root.at].name);
    root.at = Math.max(0, Math.min(last, to));
    show();
    hover();
  };
}

// A trace -> its swatch and its name. Where each bar has a colour of its own, the swatch has that of the text.
function named({ name, type, mode, fillcolor, line, marker = {} }) {
  const colour = [type === "bar" || mode === "markers" ? marker.color : (fillcolor ?? line.color)].flat(), { pattern = {}, symbol = "" } = marker;
  const fill = colour.length > 1 ? "currentColor" : colour[0], open = symbol.endsWith("-open");
  const item = document.createElement("span");
  const drawn = mode === "markers" ? `<path d="${SYMBOLS[symbol.replace("-open", "")]}" fill="${open ? "none" : fill}" stroke="${fill}" stroke-width="${open ? 3 : 0}"/>`
    : type === "bar" || fillcolor ? `<path d="M-13,-9H13V9H-13Z" fill="${fill}" stroke="var(--st-border-color)" stroke-width="1.5" opacity="${marker.opacity ?? 1}"/>
      <path d="${HATCHES[pattern.shape] ?? ""}" stroke="${pattern.fgcolor ?? "var(--st-background-color)"}" stroke-width="2.5" stroke-linecap="round" opacity=".6"/>`
    : `<path d="M-14,0H14" stroke="${fill}" stroke-width="4" stroke-dasharray="${{ solid: "", dash: "8 4", dot: "3 4" }[line.dash ?? "solid"] ?? "8 3 2 3"}"/>`;
  item.innerHTML = `<svg viewBox="-15 -15 30 30" width="16" height="16" aria-hidden="true">${drawn}</svg>`;
  item.append(name);
  return item;
}
