// What a page owes to those who hear it or have no mouse: the language it is in, and a focus that is not lost when
// Streamlit takes away what has it, as Run, in whose place Stop comes.

const FOCUSABLE = ["a[href]", "button", "input", "select", "textarea"].map((tag) => `${tag}:not([disabled])`).join() + ",summary,[tabindex='0']";
const reachable = (root) => [...root.querySelectorAll(FOCUSABLE)].filter((element) => element.checkVisibility());
const POPOVER = "#stFloatingOverlayPortal [data-testid=stPopoverBody]";
const PATIENCE = 100; // milliseconds: some of what closes, as a list, gives the focus back by itself

export default function ({ data }) {
  document.documentElement.lang = data.language;
  if (window.lockstepKeepsFocus) return; // called again when the language changes
  window.lockstepKeepsFocus = true;
  let had = null, before = [], popover = null;
  document.addEventListener("focusin", ({ target }) => {
    if (!target.closest("#root")) return; // in a popover: what opened it counts
    const all = reachable(document);
    had = target.matches(":focus-visible") ? target : null;
    before = all.slice(0, all.indexOf(target));
  });
  document.addEventListener("pointerdown", () => (had = null), true); // a mouse needs no focus
  // A key that is held would press what has come in its button's place.
  document.addEventListener("keydown", (event) => event.repeat && event.key === "Enter" && event.target.closest("button") && event.preventDefault(), true);
  new MutationObserver(() => {
    if (had && !had.isConnected) setTimeout(next, PATIENCE, had);
    const was = popover; // it stands at the end of the page, far from its button: the focus goes there and comes back
    popover = document.querySelector(POPOVER);
    if (popover && !was && had) setTimeout(() => popover && reachable(popover)[0]?.focus(), PATIENCE); // when it has its place
    if (!popover && was && document.activeElement === document.body) had?.focus();
  }).observe(document.body, { childList: true, subtree: true });

  // To what now stands where the thing with the focus stood.
  function next(lost) {
    if (lost !== had) return;
    had = null;
    if (document.activeElement !== document.body) return;
    const last = before.findLast((element) => element.isConnected), all = reachable(document);
    (all[all.indexOf(last) + 1] ?? last)?.focus({ preventScroll: true });
  }
}
