/** Choice of the moment, the sentence, and sliders for the state. */

import { byId, find } from "./elements.js";
import { rounded } from "./link.js";

/**
 * @typedef {import("./link.js").View} View
 * @typedef {import("./api.js").About} About
 * @typedef {import("./api.js").Moment} Moment
 * @typedef {(change: Partial<View>) => void} Update
 */

const LARGE_STEP = 10;
// Steps of a slider in one standard deviation.
const STEPS = 20;

/** Episode and frame, with keys and a button that plays. */
export class Scrubber {
  #episode = byId("episode", HTMLSelectElement);
  #frame = byId("frame", HTMLInputElement);
  #text = byId("moment", HTMLOutputElement);
  #play = byId("play", HTMLButtonElement);
  /** @type {View | null} */ #view = null;
  #playing = 0;

  /**
   * @param {About} about
   * @param {Update} update
   */
  constructor(about, update) {
    this.about = about;
    this.update = update;
    this.lengths = new Map(about.episodes);
    this.#episode.addEventListener("change", () =>
      this.#go(Number(this.#episode.value), this.#view?.frame ?? 0),
    );
    this.#frame.addEventListener("input", () => {
      this.stop();
      this.#go(Number(this.#episode.value), Number(this.#frame.value));
    });
    this.#play.addEventListener("click", () => this.toggle());
  }

  /** @param {View} view */
  show(view) {
    this.#view = view;
    const last = (this.lengths.get(view.episode) ?? 1) - 1;
    this.#episode.value = String(view.episode);
    this.#frame.max = String(last);
    this.#frame.value = String(view.frame);
    const seconds = (view.frame / this.about.fps).toFixed(2);
    this.#text.textContent = `frame ${view.frame} of ${last}, ${seconds} s`;
    this.#frame.setAttribute("aria-valuetext", this.#text.textContent);
  }

  /**
   * @param {number} episode
   * @param {number} frame
   */
  #go(episode, frame) {
    const last = (this.lengths.get(episode) ?? 1) - 1;
    this.update({ episode, frame: Math.min(Math.max(frame, 0), last) });
  }

  toggle() {
    if (this.#playing) {
      this.stop();
      return;
    }
    const { episode = 0, frame = 0 } = this.#view ?? {};
    const last = (this.lengths.get(episode) ?? 1) - 1;
    const begin = frame >= last ? 0 : frame;
    const started = performance.now();
    this.#showPlaying(true);
    const advance = () => {
      const passed = Math.floor(((performance.now() - started) / 1000) * this.about.fps);
      const now = Math.min(begin + passed, last);
      if (now !== this.#view?.frame) this.#go(episode, now);
      if (now >= last) this.stop();
      else this.#playing = requestAnimationFrame(advance);
    };
    this.#playing = requestAnimationFrame(advance);
  }

  stop() {
    cancelAnimationFrame(this.#playing);
    this.#playing = 0;
    this.#showPlaying(false);
  }

  /** @param {boolean} isPlaying */
  #showPlaying(isPlaying) {
    this.#play.setAttribute("aria-pressed", String(isPlaying));
    this.#play.textContent = isPlaying ? "Pause" : "Play";
  }

  /**
   * Whether the key was one of the scrubber's.
   *
   * @param {KeyboardEvent} event
   */
  press(event) {
    const { episode = 0, frame = 0 } = this.#view ?? {};
    const step = event.shiftKey ? LARGE_STEP : 1;
    const place = this.about.episodes.findIndex(([index]) => index === episode);
    /** @param {number} number */
    const episodeAt = (number) => this.about.episodes[number]?.[0] ?? episode;
    /** @type {Record<string, (() => void) | undefined>} */
    const actions = {
      " ": () => this.toggle(),
      ArrowLeft: () => this.#go(episode, frame - step),
      ArrowRight: () => this.#go(episode, frame + step),
      ArrowUp: () => this.#go(episodeAt(place - 1), frame),
      ArrowDown: () => this.#go(episodeAt(place + 1), frame),
      Home: () => this.#go(episode, 0),
      End: () => this.#go(episode, Infinity),
    };
    const action = actions[event.key];
    if (action && event.key !== " ") this.stop();
    action?.();
    return action !== undefined;
  }
}

/** The sentence, and those of the data set to choose from. */
export class Sentence {
  #text = byId("prompt", HTMLTextAreaElement);
  #reset = byId("reset-prompt", HTMLButtonElement);
  #recorded = "";

  /** @param {Update} update */
  constructor(update) {
    const choice = byId("prompts", HTMLSelectElement);
    /** @param {string} prompt */
    const change = (prompt) => update({ prompt: prompt === this.#recorded ? null : prompt });
    choice.addEventListener("change", () => {
      if (choice.value) change(choice.value);
      choice.value = "";
    });
    this.#text.addEventListener("input", () => change(this.#text.value));
    this.#reset.addEventListener("click", () => update({ prompt: null }));
  }

  /**
   * @param {View} view
   * @param {Moment | null} moment
   */
  show(view, moment) {
    this.#recorded = moment?.prompt ?? "";
    const text = view.prompt ?? this.#recorded;
    if (this.#text.value !== text) this.#text.value = text;
    this.#text.classList.toggle("is-changed", view.prompt !== null);
    this.#reset.disabled = view.prompt === null;
  }
}

/** A slider for each number of the state: what is added to it. */
export class Sliders {
  #reset = byId("reset-state", HTMLButtonElement);
  /** @type {{slider: HTMLInputElement, value: HTMLOutputElement, reset: HTMLButtonElement}[]} */
  #rows = [];

  /**
   * @param {About} about
   * @param {Update} update
   * @param {() => View} current
   */
  constructor(about, update, current) {
    this.about = about;
    /** @param {string} name @param {number} amount */
    const move = (name, amount) => {
      const { [name]: _, ...others } = current().state;
      update({ state: amount ? { ...others, [name]: amount } : others });
    };
    document.querySelectorAll(".state").forEach((row, number) => {
      const { name, std } = about.states[number];
      const slider = find("input", HTMLInputElement, row);
      const reset = find("button", HTMLButtonElement, row);
      slider.addEventListener("input", () =>
        move(name, rounded((Number(slider.value) / STEPS) * std)),
      );
      reset.addEventListener("click", () => move(name, 0));
      this.#rows.push({ slider, value: find("output", HTMLOutputElement, row), reset });
    });
    this.#reset.addEventListener("click", () => update({ state: {} }));
  }

  /**
   * @param {View} view
   * @param {Moment | null} moment
   */
  show(view, moment) {
    this.#reset.disabled = Object.keys(view.state).length === 0;
    this.#rows.forEach(({ slider, value, reset }, number) => {
      const { name, std } = this.about.states[number];
      const amount = view.state[name] ?? 0;
      const place = String(Math.round((amount / std) * STEPS));
      if (slider.value !== place) slider.value = place;
      const recorded = moment?.state[number] ?? 0;
      value.textContent = (recorded + amount).toFixed(3);
      value.classList.toggle("is-changed", amount !== 0);
      const added = amount ? `, changed by ${amount.toPrecision(3)}` : "";
      slider.setAttribute("aria-valuetext", `${value.textContent}${added}`);
      reset.disabled = amount === 0;
    });
  }
}
