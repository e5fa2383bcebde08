/**
 * The first element that matches; an error if it is of another kind.
 *
 * @template {Element} Kind
 * @param {string} selector
 * @param {new () => Kind} kind
 * @param {ParentNode} parent
 * @returns {Kind}
 */
export function find(selector, kind, parent = document) {
  const found = parent.querySelector(selector);
  if (!(found instanceof kind)) throw new Error(`The page has no ${kind.name} ${selector}.`);
  return found;
}

/**
 * @template {HTMLElement} Kind
 * @param {string} id
 * @param {new () => Kind} kind
 */
export const byId = (id, kind) => find(`#${id}`, kind);
