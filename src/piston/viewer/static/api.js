/**
 * Requests to the server, and what the page uses of its answers.
 *
 * @typedef {{slot: string, name: string, width: number, height: number}} Camera
 * @typedef {{name: string, std: number}} Dim
 * @typedef {{
 *   title: string, run: string, has_overview: boolean, episodes: [number, number][], fps: number,
 *   prompts: string[], cameras: Camera[], states: Dim[], actions: Dim[], seeds: number,
 * }} About
 * @typedef {{prompt: string, state: number[], drawn: string[]}} Moment  with a plot of each action
 * @typedef {{effect: string, bars: {width: string, text: string}[], plots: string[]}} Drawn
 * @typedef {{drawn: Drawn, note: string | null, ms: number}} Answer
 */

// An older request that takes longer than this is given up for a newer one.
const PATIENCE_MS = 1000;
// The server answers one request of each page at a time: the newest.
const client = crypto.getRandomValues(new Uint32Array(2)).join("-");

/** @param {string} path @param {object} question @param {AbortSignal} [signal] */
const post = (path, question, signal) =>
  request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ client, ...question }),
    signal,
  });

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<any>}
 */
async function request(path, options) {
  const response = await fetch(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is piston inspect still running?");
  });
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

/** @returns {Promise<About>} */
export const about = () => request("api/about");

/**
 * @param {number} episode
 * @param {number} frame
 * @param {AbortSignal} signal
 * @returns {Promise<Moment>}
 */
export const moment = (episode, frame, signal) =>
  request(`api/moment/${episode}/${frame}`, { signal });

/**
 * @param {{episode: number, frame: number, change: object}} question
 * @param {AbortSignal} signal
 * @returns {Promise<Answer>}
 */
export const act = (question, signal) => post("api/act", question, signal);

/**
 * How much covering each part of a picture changes the actions, drawn in SVG over the unit square.
 *
 * @param {{episode: number, frame: number, camera: string, actions: string[]}} question
 * @returns {Promise<{drawn: string}>}
 */
export const occlusion = (question) => post("api/occlusion", question);

/**
 * @param {About} about
 * @param {number} episode
 * @param {number} frame
 * @param {string} slot
 */
export const pictureAddress = (about, episode, frame, slot) =>
  `api/picture/${episode}/${frame}/${encodeURIComponent(slot)}?run=${about.run}`;

/**
 * Asks for one thing at a time, and next for the newest: those between are left out. So answers
 * follow a slider as fast as they come.
 *
 * @template Question, Result
 */
export class Newest {
  /** @type {Question | undefined} */ #waiting;
  /** @type {AbortController | null} */ #running = null;
  #started = 0;

  /**
   * @param {(question: Question, signal: AbortSignal) => Promise<Result>} send
   * @param {(result: Result, question: Question) => void} show
   * @param {(error: Error) => void} fail
   */
  constructor(send, show, fail) {
    this.send = send;
    this.show = show;
    this.fail = fail;
  }

  /** When the request that runs was sent; null if there is none. */
  get since() {
    return this.#running && this.#started;
  }

  /** @param {Question} question */
  ask(question) {
    this.#waiting = question;
    if (!this.#running) void this.#run();
    else if (performance.now() - this.#started > PATIENCE_MS) this.#running.abort();
  }

  async #run() {
    while (this.#waiting !== undefined) {
      const question = this.#waiting;
      this.#waiting = undefined;
      this.#running = new AbortController();
      this.#started = performance.now();
      try {
        this.show(await this.send(question, this.#running.signal), question);
      } catch (error) {
        // A request that was given up has a newer one behind it.
        if (!this.#running.signal.aborted) this.fail(/** @type {Error} */ (error));
      }
    }
    this.#running = null;
  }
}
