/**
 * What is shown, and the same as the part of the address behind "#", so that a link holds it.
 *
 * @typedef {{camera: string, left: number, top: number, right: number, bottom: number}} Box
 * @typedef {{
 *   tab: "try" | "overview", episode: number, frame: number,
 *   prompt: string | null, off: string[], black: string[], covered: Box[],
 *   state: Record<string, number>, chosen: string[],
 * }} View
 */

const ROUNDED = 1e4;

/** @type {Pick<View, "prompt" | "off" | "black" | "covered" | "state">} */
export const UNCHANGED = { prompt: null, off: [], black: [], covered: [], state: {} };

/** @param {number} value */
export const rounded = (value) => Math.round(value * ROUNDED) / ROUNDED;

/**
 * @param {View} view
 * @returns {string}
 */
export function toLink(view) {
  const link = new URLSearchParams();
  if (view.tab !== "try") link.set("tab", view.tab);
  link.set("episode", String(view.episode));
  link.set("frame", String(view.frame));
  if (view.prompt !== null) link.set("prompt", view.prompt);
  for (const slot of view.off) link.append("off", slot);
  for (const slot of view.black) link.append("black", slot);
  for (const box of view.covered) {
    const sides = [box.left, box.top, box.right, box.bottom].map(rounded);
    link.append("covered", [box.camera, ...sides].join(","));
  }
  for (const [name, amount] of Object.entries(view.state)) {
    link.append("state", `${name},${amount}`);
  }
  for (const name of view.chosen) link.append("joint", name);
  return `#${link}`;
}

/**
 * Parts that do not fit this policy and data set are left out.
 *
 * @param {string} hash
 * @param {import("./api.js").About} about
 * @returns {View}
 */
export function fromLink(hash, about) {
  const link = new URLSearchParams(hash.replace(/^#/, ""));
  const slots = about.cameras.map((camera) => camera.slot);
  const known = new Map(about.episodes);
  const asked = Number(link.get("episode") ?? NaN);
  const episode = known.has(asked) ? asked : about.episodes[0][0];
  const last = (known.get(episode) ?? 1) - 1;
  const frame = Math.trunc(Number(link.get("frame"))) || 0;
  /** @param {string} text */
  const split = (text) => {
    const comma = text.lastIndexOf(",");
    return /** @type {[string, number]} */ ([text.slice(0, comma), Number(text.slice(comma + 1))]);
  };
  const names = about.states.map((state) => state.name);
  const moved = link.getAll("state").map(split);
  return {
    tab: link.get("tab") === "overview" && about.has_overview ? "overview" : "try",
    episode,
    frame: Math.min(Math.max(frame, 0), last),
    prompt: link.get("prompt"),
    off: link.getAll("off").filter((slot) => slots.includes(slot)),
    black: link.getAll("black").filter((slot) => slots.includes(slot)),
    covered: link.getAll("covered").map(toBox).filter((box) => isValid(box, slots)),
    state: Object.fromEntries(
      moved.filter(([name, amount]) => names.includes(name) && Number.isFinite(amount) && amount),
    ),
    chosen: link.getAll("joint").filter((name) => about.actions.some((dim) => dim.name === name)),
  };
}

/**
 * @param {string} text
 * @returns {Box}
 */
function toBox(text) {
  const parts = text.split(",");
  const [left, top, right, bottom] = parts.slice(-4).map(Number);
  return { camera: parts.slice(0, -4).join(","), left, top, right, bottom };
}

/**
 * @param {Box} box
 * @param {string[]} slots
 */
function isValid({ camera, left, top, right, bottom }, slots) {
  const isInOrder = 0 <= left && left < right && right <= 1 && 0 <= top && top < bottom && bottom <= 1;
  return slots.includes(camera) && isInOrder;
}

/**
 * The view's intervention, as the server reads it.
 *
 * @param {View} view
 */
export function changeOf({ prompt, off, black, covered, state }) {
  const boxes = covered.map((box) => ({ type: "inspection_box", ...box }));
  return { prompt, off, black, covered: boxes, state };
}

/** @param {View} view */
export function isChanged({ prompt, off, black, covered, state }) {
  const lists = [off, black, covered, Object.keys(state)];
  return prompt !== null || lists.some((list) => list.length > 0);
}
