/** The page: one view, which controls change and all parts show; answers arrive when they are there. */

import * as api from "./api.js";
import { Scrubber, Sentence, Sliders } from "./controls.js";
import { byId, find } from "./elements.js";
import { UNCHANGED, changeOf, fromLink, isChanged, toLink } from "./link.js";
import { Picture } from "./pictures.js";
import { Results } from "./results.js";

/** @typedef {import("./link.js").View} View */

// Browsers allow about 200 changes of the address in 30 seconds.
const LINK_MS = 250;
// Answers that take longer than this show how long one has waited.
const SPINNER_MS = 300;
const FIELDS = "input[type=text], textarea, select";

/** @param {string | null} text */
function tell(text) {
  const element = byId("error", HTMLElement);
  element.textContent = text;
  element.hidden = text === null;
}

/** @param {Error} error */
function fail(error) {
  tell(error.message);
}

/** @param {api.About} about */
function start(about) {
  /** @type {api.Moment | null} */ let moment = null;
  /** @type {api.Answer | null} */ let answer = null;
  let view = fromLink(location.hash, about);
  const current = () => view;

  const scrubber = new Scrubber(about, update);
  const sentence = new Sentence(update);
  const sliders = new Sliders(about, update, current);
  const results = new Results(about, update, current);
  const figures = byId("cameras", HTMLElement).children;
  const pictures = about.cameras.map(
    (camera, place) => new Picture(figures[place], camera, about, update, fail),
  );
  const reset = byId("reset", HTMLButtonElement);
  reset.addEventListener("click", () => update(UNCHANGED));

  /** @type {api.Newest<View, api.Moment>} */
  const moments = new api.Newest(
    ({ episode, frame }, signal) => api.moment(episode, frame, signal),
    (found) => {
      moment = found;
      // While a slow policy computes, what was recorded is shown alone.
      if (!answer || answer.ms > SPINNER_MS) results.drawPlots(found.drawn, view);
      show();
    },
    fail,
  );
  /** @type {api.Newest<View, api.Answer>} */
  const answers = new api.Newest(
    (asked, signal) =>
      api.act({ episode: asked.episode, frame: asked.frame, change: changeOf(asked) }, signal),
    (found) => {
      answer = found;
      results.draw(found.drawn, view);
      tell(found.note);
      show();
    },
    fail,
  );

  function show() {
    scrubber.show(view);
    sentence.show(view, moment);
    sliders.show(view, moment);
    for (const picture of pictures) picture.show(view);
    results.show(view);
    reset.disabled = !isChanged(view);
    showTab(view.tab);
  }

  /** @param {Partial<View>} change */
  function update(change) {
    const old = view;
    view = { ...view, ...change };
    show();
    if (view.episode !== old.episode || view.frame !== old.frame) moments.ask(view);
    const isShown = Object.keys(change).every((key) => key === "chosen" || key === "tab");
    if (!isShown) answers.ask(view);
    keepLink();
  }

  let timer = 0;
  function keepLink() {
    clearTimeout(timer);
    timer = setTimeout(() => history.replaceState(null, "", toLink(view)), LINK_MS);
  }

  window.addEventListener("hashchange", () => update(fromLink(location.hash, about)));
  for (const tab of /** @type {const} */ (["try", "overview"])) {
    byId(`tab-${tab}`, HTMLButtonElement).addEventListener("click", () => update({ tab }));
  }
  window.addEventListener("keydown", (event) => {
    const { target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || view.tab !== "try") return;
    if (event.key === "Escape") {
      scrubber.stop();
      update(UNCHANGED);
      return;
    }
    const isOwn = target instanceof Element && target.matches(`${FIELDS}, input, button`);
    // A slider or a button keeps the keys that it knows; arrows on a button are free.
    const isFree = target instanceof HTMLButtonElement && event.key !== " ";
    if ((!isOwn || isFree) && scrubber.press(event)) event.preventDefault();
  });
  showWaiting(answers, () => answer);
  show();
  moments.ask(view);
  answers.ask(view);
}

/**
 * How long the running request has taken, or the last one took.
 *
 * @param {api.Newest<any, api.Answer>} answers
 * @param {() => api.Answer | null} answer
 */
function showWaiting(answers, answer) {
  const status = byId("status", HTMLElement);
  const text = /** @type {HTMLElement} */ (status.querySelector("span"));
  setInterval(() => {
    const waited = answers.since === null ? 0 : performance.now() - answers.since;
    const isSlow = waited > SPINNER_MS;
    status.classList.toggle("is-waiting", isSlow);
    const last = answer();
    if (isSlow) text.textContent = `${(waited / 1000).toFixed(1)} s`;
    else text.textContent = last ? `${Math.round(last.ms)} ms` : "";
  }, 100);
}

/** @param {View["tab"]} tab */
function showTab(tab) {
  for (const name of ["try", "overview"]) {
    byId(name, HTMLElement).hidden = name !== tab;
    byId(`tab-${name}`, HTMLButtonElement).setAttribute("aria-selected", String(name === tab));
  }
  const frame = find("#overview iframe", HTMLIFrameElement);
  if (tab !== "overview" || frame.src) return;
  frame.addEventListener("load", () => {
    const content = frame.contentDocument?.documentElement;
    if (!content) return;
    const fit = () => (frame.style.height = `${Math.ceil(content.getBoundingClientRect().height)}px`);
    new ResizeObserver(fit).observe(content);
    fit();
  });
  frame.src = "overview";
}

try {
  start(await api.about());
} catch (error) {
  fail(/** @type {Error} */ (error));
}
