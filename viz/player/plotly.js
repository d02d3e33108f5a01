// What the player and a still chart share: plotly.js, and a figure in the colours and the type of the page.

const CONFIG = { displaylogo: false, showSendToCloud: false, displayModeBar: false, responsive: false, doubleClick: "reset" };

// A component of its own brings plotly.js, once a page; it may still be on its way.
async function plotlyLoaded() {
  for (let i = 0; !window.Plotly && i < 600; i++) await new Promise((done) => setTimeout(done, 50));
  if (!window.Plotly) throw new Error("plotly.js did not load");
  document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", true); // its ruler for texts
}

// A copy, as Plotly writes into what it is given; with stand-in colours replaced by those of the theme.
function themed({ figure, theme }, style) {
  let text = JSON.stringify(figure);
  for (const [standin, name] of Object.entries(theme))
    text = text.replaceAll(`"${standin}"`, `"${style.getPropertyValue(name).trim() || standin}"`);
  const { data, layout } = JSON.parse(text);
  layout.autosize = true;
  layout.font.family = style.fontFamily;
  return { data, layout };
}
