// Numbers and texts -> SVG: shapes, widths of texts, and a brush that uses elements again. Read before player.js.

const SHAPES = {
  circle: "M11,0A11,11 0 1 1 -11,0A11,11 0 1 1 11,0Z", diamond: "M0,-14L14,0L0,14L-14,0Z", square: "M-10.5,-10.5H10.5V10.5H-10.5Z",
  triangle: "M0,-14L13,10H-13Z", hexagon: "M0,-12.5L11,-6V6L0,12.5L-11,6V-6Z",
};
const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

// Widths of texts, at the sizes of player.css.
const [TITLE, CELL, SMALL, BAR, PILL, WORDS] = [16, 13, 13, 14, 15, 18.4], known = new Map();
let font = "sans-serif"; // the theme's
const ruler = document.createElement("canvas").getContext("2d");
function width(text, size) {
  const key = `${size} ${text}`;
  if (!known.has(key)) known.set(key, ((ruler.font = `700 ${size}px ${font}`), ruler.measureText(text).width));
  return known.get(key);
}
const fitting = (texts, room, size) => texts.find((text) => text && width(text, size) <= room);

function showSeconds(seconds) {
  const [size, name] = UNITS.find(([size]) => Math.abs(seconds) >= size) ?? (seconds ? UNITS.at(-1) : UNITS[0]);
  return `${+(seconds / size).toPrecision(3)} ${name}`;
}

function rounded(x0, x1, y0, y1, r) {
  r = Math.min(r, (x1 - x0) / 2, (y1 - y0) / 2);
  return `M${x0 + r},${y0}H${x1 - r}A${r},${r} 0 0 1 ${x1},${y0 + r}V${y1 - r}A${r},${r} 0 0 1 ${x1 - r},${y1}H${x0 + r}A${r},${r} 0 0 1 ${x0},${y1 - r}V${y0 + r}A${r},${r} 0 0 1 ${x0 + r},${y0}Z`;
}

// The point at a share of a way of links, each from x, y to x, y and taking the same time.
function along(way, share) {
  const leg = Math.max(0, Math.min(way.length - 1, Math.floor(share * way.length)));
  const part = Math.max(0, Math.min(1, share * way.length - leg)), [x0, y0, x1, y1] = way[leg];
  return [x0 + (x1 - x0) * part, y0 + (y1 - y0) * part];
}

// Draws into an SVG element, using again the children it has: brush(svg)(tag, attributes, text)..., and () to drop the rest.
const ATTRIBUTES = ["d", "x", "y", "fill", "stroke", "stroke-width", "opacity", "transform", "class", "font-size"];
function brush(svg) {
  let child = svg.firstElementChild;
  return (tag, attributes, text = "") => {
    if (!tag) {
      while (child) { const next = child.nextElementSibling; child.remove(); child = next; }
      return;
    }
    if (child?.tagName !== tag) {
      const fresh = document.createElementNS(svg.namespaceURI, tag);
      child ? child.replaceWith(fresh) : svg.appendChild(fresh);
      child = fresh;
    }
    for (const name of ATTRIBUTES) {
      const value = attributes[name] === undefined ? null : String(attributes[name]);
      if (child.getAttribute(name) === value) continue;
      value === null ? child.removeAttribute(name) : child.setAttribute(name, value);
    }
    if (child.textContent !== text) child.textContent = text;
    child = child.nextElementSibling;
  };
}
