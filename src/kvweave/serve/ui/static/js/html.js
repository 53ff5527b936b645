// The one place that knows which framework this is.
import { Fragment, h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { Fragment, h, render };
export {
  useCallback, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef,
    useState,
} from "../vendor/hooks.js";
export const html = htm.bind(h);

/** Class names of what is truthy: cls("a", b && "c"). */
export const cls = (...names) => names.filter(Boolean).join(" ");

/** Elements with every text in them replaced by `change(text)`, in the order of the document. */
export function changeText(node, change) {
  if (typeof node === "string") return change(node);
  if (Array.isArray(node)) return node.map((each) => changeText(each, change));
  if (!node?.props) return node;
  return h(node.type, { ...node.props, children: changeText(node.props.children, change) });
}
