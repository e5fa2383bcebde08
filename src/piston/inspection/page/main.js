/** The page: one view, which controls change and all parts show; answers arrive when they are there. */

import * as api from "./api.js";
import { Scrubber, Sentence, Sliders } from "./controls.js";
import { byId, make } from "./elements.js";
import { UNCHANGED, changeOf, fromLink, isChanged, toLink } from "./link.js";
import { Picture } from "./pictures.js";
import { Bars, Plots } from "./plots.js";

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

  byId("title", HTMLElement).textContent = about.title || "\u00a0";
  document.title = about.title ? `${about.title} · piston inspect` : "piston inspect";
  const scrubber = new Scrubber(about, update);
  const sentence = new Sentence(about, update);
  const sliders = new Sliders(about, update, current);
  const bars = new Bars(about, update, current);
  const plots = new Plots(about);
  const pictures = about.cameras.map((camera) => new Picture(camera, about, update, fail));
  byId("cameras", HTMLElement).append(...pictures.map((picture) => picture.element));
  const reset = byId("reset", HTMLButtonElement);
  reset.addEventListener("click", () => update(UNCHANGED));

  /** @type {api.Newest<View, api.Moment>} */
  const moments = new api.Newest(
    ({ episode, frame }, signal) => api.moment(episode, frame, signal),
    (found) => {
      moment = found;
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
    bars.show(view, answer);
    plots.show(view, moment, answer);
    reset.disabled = !isChanged(view);
    showTab(about, view.tab);
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

/**
 * @param {api.About} about
 * @param {View["tab"]} tab
 */
function showTab(about, tab) {
  const overview = byId("overview", HTMLElement);
  byId("tab-overview", HTMLButtonElement).hidden = !about.has_overview;
  for (const name of ["try", "overview"]) {
    byId(name, HTMLElement).hidden = name !== tab;
    byId(`tab-${name}`, HTMLButtonElement).setAttribute("aria-selected", String(name === tab));
  }
  if (tab !== "overview" || overview.firstChild) return;
  const frame = make("iframe", { src: "overview", title: "Overview" });
  frame.addEventListener("load", () => {
    const content = frame.contentDocument?.documentElement;
    if (!content) return;
    const fit = () => (frame.style.height = `${Math.ceil(content.getBoundingClientRect().height)}px`);
    new ResizeObserver(fit).observe(content);
    fit();
  });
  overview.append(frame);
}

try {
  start(await api.about());
} catch (error) {
  fail(/** @type {Error} */ (error));
}
