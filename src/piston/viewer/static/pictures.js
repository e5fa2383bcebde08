/** The cameras' pictures, with buttons to switch them off and regions that are covered by dragging. */

import { occlusion, pictureAddress } from "./api.js";
import { find } from "./elements.js";
import { rounded } from "./link.js";

/**
 * @typedef {import("./link.js").View} View
 * @typedef {import("./link.js").Box} Box
 * @typedef {(change: Partial<View>) => void} Update
 */

// Smaller ones, as shares of the picture, are clicks.
const SMALLEST = 0.02;
// How far an arrow key moves a side.
const KEY_STEP = 0.05;
/** @type {Record<string, [number, number]>} */
const ARROWS = {
  ArrowLeft: [-KEY_STEP, 0],
  ArrowRight: [KEY_STEP, 0],
  ArrowUp: [0, -KEY_STEP],
  ArrowDown: [0, KEY_STEP],
};

/** @param {number} value */
const within = (value) => rounded(Math.min(Math.max(value, 0), 1));

/** One camera. */
export class Picture {
  /** @type {View | null} */ #view = null;
  /** @type {Box | null} */ #dragged = null;
  #image;
  #drawing;
  #boxes;
  #state;
  #box;
  // The moment and the actions that the map belongs to.
  #mapped = "";
  #wanted = "";
  #shown = "";

  /**
   * @param {Element} figure
   * @param {import("./api.js").Camera} camera
   * @param {import("./api.js").About} about
   * @param {Update} update
   * @param {(error: Error) => void} fail
   */
  constructor(figure, camera, about, update, fail) {
    this.camera = camera;
    this.about = about;
    this.update = update;
    this.fail = fail;
    this.screen = find(".screen", HTMLElement, figure);
    this.#image = find("img", HTMLImageElement, figure);
    this.#drawing = find(".map", SVGElement, figure);
    this.#boxes = find(".boxes", HTMLElement, figure);
    this.#state = find(".camera-state", HTMLElement, figure);
    this.#box = find("template", HTMLTemplateElement, figure);
    this.off = find(".off", HTMLButtonElement, figure);
    this.black = find(".black", HTMLButtonElement, figure);
    this.map = find(".map-button", HTMLButtonElement, figure);
    const cover = find(".cover", HTMLButtonElement, figure);
    this.off.addEventListener("click", () => this.#toggle("off"));
    this.black.addEventListener("click", () => this.#toggle("black"));
    cover.addEventListener("click", () => this.#coverMiddle());
    this.map.addEventListener("click", () => void this.#toggleMap());
    this.#image.addEventListener("load", () => this.#loaded());
    this.#image.addEventListener("error", () => this.#loaded());
    this.#listenForDragging();
  }

  /** @param {View} view */
  show(view) {
    this.#view = view;
    const { slot, name } = this.camera;
    const [isOff, isBlack] = [view.off.includes(slot), view.black.includes(slot)];
    this.off.setAttribute("aria-pressed", String(isOff));
    this.black.setAttribute("aria-pressed", String(isBlack));
    this.screen.classList.toggle("is-off", isOff);
    this.screen.classList.toggle("is-black", isBlack && !isOff);
    this.#state.textContent = isOff ? "out of attention" : isBlack ? "black" : "";
    this.#image.alt = `${name}, episode ${view.episode}, frame ${view.frame}`;
    this.#wanted = pictureAddress(this.about, view.episode, view.frame, slot);
    if (this.#shown === "") this.#load();
    if (this.#mapped !== this.#moment()) this.#clearMap();
    this.#showBoxes();
  }

  #moment() {
    const { episode = 0, frame = 0, chosen = [] } = this.#view ?? {};
    return JSON.stringify([episode, frame, chosen]);
  }

  #clearMap() {
    this.#mapped = "";
    this.#drawing.replaceChildren();
    this.map.setAttribute("aria-pressed", "false");
  }

  async #toggleMap() {
    const view = this.#view;
    if (this.#mapped || !view) {
      this.#clearMap();
      return;
    }
    const [asked, started] = [this.#moment(), performance.now()];
    this.map.disabled = true;
    const timer = setInterval(() => {
      this.map.textContent = `${((performance.now() - started) / 1000).toFixed(1)} s`;
    }, 100);
    try {
      const { episode, frame, chosen } = view;
      const place = { episode, frame, camera: this.camera.slot };
      const { drawn } = await occlusion({ ...place, actions: chosen });
      if (asked === this.#moment()) {
        this.#drawing.innerHTML = drawn;
        this.#mapped = asked;
        this.map.setAttribute("aria-pressed", "true");
      }
    } catch (error) {
      this.fail(/** @type {Error} */ (error));
    } finally {
      clearInterval(timer);
      this.map.textContent = "Map";
      this.map.disabled = false;
    }
  }

  // One picture at a time, and next the newest: a browser that is told of another one before it has
  // shown the first would show none while one scrubs.
  #load() {
    this.#shown = this.#wanted;
    this.#image.src = this.#wanted;
  }

  #loaded() {
    if (this.#wanted !== this.#shown) {
      this.#load();
      return;
    }
    this.#shown = "";
    const { naturalWidth: width, naturalHeight: height } = this.#image;
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    if (!context || !width) return;
    context.drawImage(this.#image, 0, 0);
    const { data } = context.getImageData(0, 0, width, height);
    const sums = [0, 0, 0];
    data.forEach((value, place) => {
      if (place % 4 < 3) sums[place % 4] += value;
    });
    const mean = sums.map((sum) => Math.round((4 * sum) / data.length));
    this.#boxes.style.setProperty("--mean", `rgb(${mean.join(" ")})`);
  }

  /** @param {"off" | "black"} kind */
  #toggle(kind) {
    const { slot } = this.camera;
    const chosen = this.#view?.[kind] ?? [];
    const others = chosen.filter((one) => one !== slot);
    this.update({ [kind]: chosen.includes(slot) ? others : [...others, slot] });
  }

  #coverMiddle() {
    const box = { camera: this.camera.slot, left: 0.35, top: 0.35, right: 0.65, bottom: 0.65 };
    this.#add(box);
    /** @type {HTMLElement | null} */ (this.#boxes.lastElementChild)?.focus();
  }

  /** @param {Box} box */
  #add(box) {
    this.update({ covered: [...(this.#view?.covered ?? []), box] });
  }

  /**
   * @param {Box} box
   * @param {Box | null} other  what replaces it
   */
  #replace(box, other) {
    const covered = (this.#view?.covered ?? []).flatMap((one) =>
      one !== box ? [one] : other ? [other] : [],
    );
    this.update({ covered });
  }

  #listenForDragging() {
    const { screen } = this;
    /** @type {[number, number]} */
    let start = [0, 0];
    /** @param {PointerEvent} event @returns {[number, number]} */
    const place = (event) => {
      const { left, top, width, height } = screen.getBoundingClientRect();
      return [within((event.clientX - left) / width), within((event.clientY - top) / height)];
    };
    screen.addEventListener("pointerdown", (event) => {
      const isOnBox = event.target instanceof Element && event.target.closest("button");
      if (event.button !== 0 || isOnBox) return;
      start = place(event);
      this.#dragged = { camera: this.camera.slot, left: 0, top: 0, right: 0, bottom: 0 };
      screen.setPointerCapture(event.pointerId);
    });
    screen.addEventListener("pointermove", (event) => {
      if (!this.#dragged) return;
      const [x, y] = place(event);
      this.#dragged = {
        camera: this.camera.slot,
        left: Math.min(start[0], x),
        right: Math.max(start[0], x),
        top: Math.min(start[1], y),
        bottom: Math.max(start[1], y),
      };
      this.#showBoxes();
    });
    /** @param {boolean} isKept */
    const end = (isKept) => {
      const box = this.#dragged;
      this.#dragged = null;
      const isLarge = box && Math.min(box.right - box.left, box.bottom - box.top) >= SMALLEST;
      if (box && isLarge && isKept) this.#add(box);
      else this.#showBoxes();
    };
    screen.addEventListener("pointerup", () => end(true));
    screen.addEventListener("pointercancel", () => end(false));
  }

  #showBoxes() {
    const own = (this.#view?.covered ?? []).filter((box) => box.camera === this.camera.slot);
    const boxes = this.#dragged ? [...own, this.#dragged] : own;
    // Elements stay, so that one that is moved by keys keeps the focus.
    while (this.#boxes.children.length > boxes.length) this.#boxes.lastElementChild?.remove();
    while (this.#boxes.children.length < boxes.length) this.#boxes.append(this.#makeBox());
    boxes.forEach((box, place) => {
      const { style } = /** @type {HTMLElement} */ (this.#boxes.children[place]);
      style.left = `${100 * box.left}%`;
      style.top = `${100 * box.top}%`;
      style.width = `${100 * (box.right - box.left)}%`;
      style.height = `${100 * (box.bottom - box.top)}%`;
    });
  }

  #makeBox() {
    const copy = /** @type {DocumentFragment} */ (this.#box.content.cloneNode(true));
    const element = find("button", HTMLButtonElement, copy);
    const box = () => {
      const own = (this.#view?.covered ?? []).filter((one) => one.camera === this.camera.slot);
      return own[[...this.#boxes.children].indexOf(element)];
    };
    element.addEventListener("click", () => this.#replace(box(), null));
    element.addEventListener("keydown", (event) => {
      if (event.key === "Delete" || event.key === "Backspace") this.#replace(box(), null);
      const step = ARROWS[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      this.#replace(box(), shifted(box(), step, event.shiftKey));
    });
    return element;
  }
}

/**
 * @param {Box} box
 * @param {[number, number]} step
 * @param {boolean} isSize  whether only its lower right corner moves
 * @returns {Box}
 */
function shifted(box, [x, y], isSize) {
  if (isSize) {
    const right = Math.max(box.left + SMALLEST, box.right + x);
    const bottom = Math.max(box.top + SMALLEST, box.bottom + y);
    return { ...box, right: within(right), bottom: within(bottom) };
  }
  const across = Math.min(Math.max(x, -box.left), 1 - box.right);
  const down = Math.min(Math.max(y, -box.top), 1 - box.bottom);
  return {
    camera: box.camera,
    left: within(box.left + across),
    right: within(box.right + across),
    top: within(box.top + down),
    bottom: within(box.bottom + down),
  };
}
