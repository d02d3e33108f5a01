// A figure that stands still -> a chart on a Streamlit page, as wide as its place, drawn by the player's plotly.js.

export default function (component) {
  const { parentElement, data } = component;
  let root = parentElement.querySelector(".lockstep-chart");
  if (!root) parentElement.appendChild((root = document.createElement("div")));
  Object.assign(root, { className: "lockstep-chart", gone: false });
  root.setAttribute("role", "img");
  root.setAttribute("aria-label", data.alt);
  plotlyLoaded().then(() => root.gone || draw(root, data), (error) => (root.textContent = String(error)));
  return () => {
    root.gone = true;
    root.resize?.disconnect();
    if (window.Plotly) Plotly.purge(root);
    root.remove();
  };
}

async function draw(root, payload) {
  const { data, layout } = themed(payload, getComputedStyle(root));
  await Plotly.react(root, data, layout, CONFIG);
  root.resize ??= new ResizeObserver(() => root.clientWidth && Plotly.Plots.resize(root));
  root.resize.observe(root);
}
