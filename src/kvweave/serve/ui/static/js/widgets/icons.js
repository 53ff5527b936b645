// Line icons, 24 × 24. Decoration: what they mean is said in words beside them.
import { html } from "../html.js";

const PATHS = {
  chat: "M4 5h16v11H9l-5 4z",
  compare: "M5 4h5v16H5zM14 4h5v16h-5z",
  documents: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  cache: "M4 6c0-1.7 3.6-3 8-3s8 1.3 8 3-3.6 3-8 3-8-1.3-8-3zM4 6v12c0 1.7 3.6 3 8 3s8-1.3 8-3V6M4 12c0 1.7 3.6 3 8 3s8-1.3 8-3",
  quality: "M4 20V4M4 20h16M7 15l4-5 3 3 5-7",
  system: "M4 5h16v6H4zM4 13h16v6H4zM8 8h.01M8 16h.01",
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 20V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  retry: "M4 12a8 8 0 1 0 2.5-5.8M4 4v4h4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  details: "M4 6h9M4 12h16M4 18h6M17 6h3M14 18h6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  upload: "M12 16V4M7 9l5-5 5 5M4 16v4h16v-4",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM20 20l-4-4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  screen: "M3 5h18v11H3zM9 20h6M12 16v4",
  warning: "M12 4l9 16H3zM12 10v4M12 17h.01",
  offline: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM5.7 5.7l12.6 12.6",
  lock: "M6 11h12v9H6zM8 11V8a4 4 0 0 1 8 0v3",
  check: "M5 13l4 4L19 7",
  play: "M7 5l12 7-12 7z",
  pause: "M8 5v14M16 5v14",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  book: "M5 4h9a3 3 0 0 1 3 3v13H8a3 3 0 0 1-3-3zM17 7h2v13h-2",
  out: "M10 4H5v16h5M14 8l4 4-4 4M18 12H9",
  spark: "M12 3v6M12 15v6M3 12h6M15 12h6",
  first: "M7 5v14M18 5l-9 7 9 7z",
};

export const Icon = ({ name }) => html`<svg class="i" viewBox="0 0 24 24" aria-hidden="true"
  focusable="false"><path d=${PATHS[name]} /></svg>`;
