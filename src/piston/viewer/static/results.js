/** What the policy answered, as the server draws it; names of actions choose which plots are shown. */

import { byId } from "./elements.js";

/**
 * @typedef {import("./api.js").About} About
 * @typedef {import("./api.js").Drawn} Drawn
 * @typedef {import("./link.js").View} View
 */

export class Results {
  #effect = byId("effect", HTMLElement);
  #plots = byId("plots", HTMLElement);
  #reset = byId("reset-chosen", HTMLButtonElement);
  #buttons = [...byId("bars", HTMLElement).querySelectorAll("button")];
  /** @type {NodeListOf<HTMLElement>} */ #bars = document.querySelectorAll("#bars i");
  #values = document.querySelectorAll("#bars .value");

  /**
   * @param {About} about
   * @param {(change: Partial<View>) => void} update
   * @param {() => View} current
   */
  constructor(about, update, current) {
    this.names = about.actions.map(({ name }) => name);
    this.#buttons.forEach((button, action) => {
      button.addEventListener("click", () => {
        const [name, { chosen }] = [this.names[action], current()];
        const others = chosen.filter((other) => other !== name);
        update({ chosen: others.length < chosen.length ? others : [...chosen, name] });
      });
    });
    this.#reset.addEventListener("click", () => update({ chosen: [] }));
  }

  /** @param {View} view */
  show({ chosen }) {
    this.#reset.disabled = chosen.length === 0;
    this.names.forEach((name, action) => {
      const isChosen = chosen.includes(name);
      this.#buttons[action].setAttribute("aria-pressed", String(isChosen));
      const figure = /** @type {HTMLElement} */ (this.#plots.children[action]);
      figure.hidden = chosen.length > 0 && !isChosen;
    });
  }

  /** @param {string[]} plots @param {View} view */
  drawPlots(plots, view) {
    this.#plots.innerHTML = plots.join("");
    this.show(view);
  }

  /** @param {Drawn} drawn @param {View} view */
  draw({ effect, bars, plots }, view) {
    this.#effect.textContent = effect;
    bars.forEach(({ width, text }, action) => {
      this.#bars[action].style.width = width;
      this.#values[action].textContent = text;
    });
    this.drawPlots(plots, view);
  }
}
