/** The chunk as small plots, one of each action, and the effect of the change as bars. */

import { byId, draw, make, short } from "./elements.js";

/**
 * @typedef {import("./api.js").About} About
 * @typedef {import("./api.js").Answer} Answer
 * @typedef {import("./api.js").Fan} Fan
 * @typedef {import("./api.js").Moment} Moment
 * @typedef {import("./link.js").View} View
 * @typedef {(change: Partial<View>) => void} Update
 * @typedef {{across: (step: number) => number, up: (value: number) => number}} Axes
 */

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [280, 130, 40, 274, 6, 112];
// Actions that hardly move get an axis of at least this many of their standard deviations.
const LEAST_SPAN = 0.5;
const NUM_TICKS = 3;

/** @param {string} name */
const spoken = (name) => name.replaceAll("_", " ");

/** The small plots. */
export class Plots {
  /** @type {HTMLElement[]} */ #figures;

  /** @param {About} about */
  constructor(about) {
    this.about = about;
    const element = byId("plots", HTMLElement);
    this.#figures = about.actions.map(({ name }) => {
      const title = make("figcaption", {}, make("span", {}, spoken(name)), make("span"));
      const figure = make("figure", {}, title);
      figure.append(draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }));
      element.append(figure);
      return figure;
    });
    const fan = byId("fan-note", HTMLElement);
    if (about.seeds > 1) {
      fan.textContent = `lines: mean of ${about.seeds} noise seeds; shaded: between them`;
    }
  }

  /**
   * @param {View} view
   * @param {Moment | null} moment
   * @param {Answer | null} answer
   */
  show(view, moment, answer) {
    this.#figures.forEach((figure, action) => {
      const { name, std } = this.about.actions[action];
      figure.hidden = view.chosen.length > 0 && !view.chosen.includes(name);
      if (figure.hidden) return;
      const drawing = /** @type {SVGElement} */ (figure.querySelector("svg"));
      const recorded = (moment?.recorded ?? []).map((row) => row[action]);
      drawing.replaceChildren(...this.#draw(recorded, answer, action, std));
      const effect = answer?.effect?.per_action[action];
      const text = effect === undefined ? "" : `±${short(effect)}`;
      const value = /** @type {HTMLElement} */ (figure.querySelector("span:last-child"));
      value.textContent = text;
      drawing.setAttribute("aria-label", `${spoken(name)}${text && `, changed by ${text}`}`);
    });
  }

  /**
   * @param {number[]} recorded
   * @param {Answer | null} answer
   * @param {number} action
   * @param {number} std
   * @returns {SVGElement[]}
   */
  #draw(recorded, answer, action, std) {
    const fans = [answer?.base, answer?.changed].flatMap((fan) => (fan ? [fan] : []));
    /** @param {number[][]} rows */
    const column = (rows) => rows.map((row) => row[action]);
    const values = [recorded, ...fans.flatMap(({ low, high }) => [column(low), column(high)])].flat();
    if (values.length === 0) return [];
    const steps = Math.max(recorded.length, ...fans.map(({ mean }) => mean.length), 2);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    const missing = Math.max(LEAST_SPAN * std, 1e-6) - (high - low);
    if (missing > 0) [low, high] = [low - missing / 2, high + missing / 2];
    /** @type {Axes} */
    const axes = {
      across: (step) => LEFT + (step / (steps - 1)) * (RIGHT - LEFT),
      up: (value) => BOTTOM - ((value - low) / (high - low)) * (BOTTOM - TOP),
    };
    const looks = ["second", "accent"];
    return [
      ...this.#frame(axes, low, high, steps),
      ...fans.map((fan, place) => area(axes, column(fan.low), column(fan.high), looks[place])),
      line(axes, recorded, "ink"),
      ...fans.map((fan, place) => line(axes, column(fan.mean), looks[place])),
    ];
  }

  /**
   * @param {Axes} axes
   * @param {number} low
   * @param {number} high
   * @param {number} steps
   */
  #frame({ across, up }, low, high, steps) {
    const seconds = (steps - 1) / this.about.fps;
    const parts = [draw("path", { class: "axis", d: `M${LEFT} ${BOTTOM}H${RIGHT}` })];
    for (const value of ticks(low, high)) {
      const y = up(value).toFixed(1);
      parts.push(draw("path", { class: "grid", d: `M${LEFT} ${y}H${RIGHT}` }));
      const place = { x: LEFT - 5, y: Number(y) + 3.5, "text-anchor": "end" };
      parts.push(draw("text", place, short(value)));
    }
    for (const value of ticks(0, seconds)) {
      const x = across(value * this.about.fps).toFixed(1);
      const anchor = value === 0 ? "start" : value > 0.95 * seconds ? "end" : "middle";
      const text = value === 0 ? "0 s" : short(value);
      parts.push(draw("text", { x, y: BOTTOM + 14, "text-anchor": anchor }, text));
    }
    return parts;
  }
}

/** @param {Axes} axes @param {number[]} values @param {string} look */
function line({ across, up }, values, look) {
  const places = values.map((value, step) => `${across(step).toFixed(1)} ${up(value).toFixed(1)}`);
  // A line of no length: a single point is drawn as a dot.
  const dot = places.length === 1 ? "h0" : "";
  return draw("path", {
    class: `line ${look}`,
    d: places.length ? `M${places.join("L")}${dot}` : "",
  });
}

/** @param {Axes} axes @param {number[]} low @param {number[]} high @param {string} look */
function area({ across, up }, low, high, look) {
  /** @param {number} value @param {number} step */
  const place = (value, step) => `${across(step).toFixed(1)} ${up(value).toFixed(1)}`;
  const back = low.map(place).reverse();
  return draw("path", { class: `fan ${look}`, d: `M${[...high.map(place), ...back].join("L")}Z` });
}

/** Round numbers: 1, 2 or 5 times a power of ten. @param {number} low @param {number} high */
export function ticks(low, high) {
  const rough = (high - low) / NUM_TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  /** @param {number} factor */
  const distance = (factor) => Math.abs(Math.log((factor * power) / rough));
  const step = power * [1, 2, 5, 10].reduce((a, b) => (distance(b) < distance(a) ? b : a));
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + 1e-9 * step; number++) {
    found.push(Number((number * step).toPrecision(12)));
  }
  return found;
}

/** The effect of the change on each action; a row also chooses which plots are shown. */
export class Bars {
  #sentence = byId("effect", HTMLElement);
  #reset = byId("reset-chosen", HTMLButtonElement);
  /** @type {{button: HTMLButtonElement, bar: HTMLElement, value: HTMLElement}[]} */ #rows;

  /**
   * @param {About} about
   * @param {Update} update
   * @param {() => View} current
   */
  constructor(about, update, current) {
    this.about = about;
    const element = byId("bars", HTMLElement);
    const spreads = about.seeds > 1 ? " In brackets: in spreads over the noise seeds." : "";
    byId("bars-note", HTMLElement).textContent =
      "Mean absolute change in the robot's units; bars are in standard deviations of the recorded "
      + `actions.${spreads} Choose names to show only their plots.`;
    this.#rows = about.actions.map(({ name }) => {
      const button = make("button", { type: "button", "aria-pressed": "false" }, spoken(name));
      const bar = make("i");
      const value = make("span", { class: "value" });
      button.addEventListener("click", () => {
        const { chosen } = current();
        const others = chosen.filter((one) => one !== name);
        update({ chosen: others.length < chosen.length ? others : [...chosen, name] });
      });
      element.append(button, make("span", { class: "track" }, bar), value);
      return { button, bar, value };
    });
    this.#reset.addEventListener("click", () => update({ chosen: [] }));
  }

  /**
   * @param {View} view
   * @param {Answer | null} answer
   */
  show(view, answer) {
    const effect = answer?.effect ?? null;
    this.#reset.disabled = view.chosen.length === 0;
    this.#rows.forEach(({ button, bar, value }, action) => {
      const { name, std } = this.about.actions[action];
      button.setAttribute("aria-pressed", String(view.chosen.includes(name)));
      const change = effect?.per_action[action] ?? 0;
      const spread = effect?.spread?.[action];
      // A bar of full length is one standard deviation or more.
      bar.style.width = `${Math.min(100 * (std ? change / std : 0), 100)}%`;
      const inSpreads = spread ? ` (${short(change / spread)}×)` : "";
      value.textContent = effect ? `${short(change)}${inSpreads}` : "";
    });
    this.#sentence.textContent = describe(answer, this.about.seeds);
  }
}

/** @param {Answer | null} answer @param {number} seeds */
function describe(answer, seeds) {
  if (!answer) return "\u00a0";
  const { effect } = answer;
  if (!effect) return "Nothing is changed. Cover a region, switch a camera off, edit the sentence …";
  const size = effect.strength ?? 0;
  const compared =
    effect.in_spreads === null
      ? ""
      : `, ${short(effect.in_spreads)} times the spread over ${seeds} noise seeds`;
  return `The change moves the actions by ${short(size)} of their standard deviation${compared}.`;
}
