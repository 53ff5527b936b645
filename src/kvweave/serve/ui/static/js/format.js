// Numbers and times for people.

const whole = new Intl.NumberFormat("en");

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(Math.round(n)));
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function ms(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 1) return `${value.toFixed(2)} ms`;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 10_000) return `${(value / 1000).toFixed(2)} s`;
  if (value < 120_000) return `${(value / 1000).toFixed(1)} s`;
  return `${Math.round(value / 60_000)} min`;
}

/** "12 min", of seconds that nobody counts one by one. */
export function roughly(seconds) {
  if (seconds < 60) return `${Math.max(5, Math.round(seconds / 5) * 5)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const PARTS = ["waiting", "searching", "loading", "computing", "answering"];
/** Where the time of an answer went, in milliseconds: its parts; `prompt`, what loading and
 * computing took, is what a full prefill compares with: no waiting is on either side. */
export const timesOf = (timeline) => ({
  ...Object.fromEntries(PARTS.map((name) => [name, timeline[name]])),
  prompt: timeline.loading + timeline.computing, first: timeline.queue + timeline.first_token });
/** How many times sooner a prompt was ready than a full prefill, both without waiting; null: it
 * was not, or not because of the cache. */
export const soonerBy = (times, full, tokens) => (
  full > times.prompt * 1.05 && hasSaved(tokens) ? full / times.prompt : null);

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export const percent = (share) => (share === null || share === undefined ? "–"
  : `${share !== 0 && Math.abs(share) < 0.1 ? (share * 100).toFixed(1)
    : Math.round(share * 100)} %`);

export function times(factor) {
  return factor === null || !Number.isFinite(factor) ? "–"
    : `${factor >= 10 ? Math.round(factor) : factor.toFixed(1)}×`;
}

/** Whether so much of a prompt was taken from the cache that this is why an answer came sooner: the
 * few tokens in front of all passages are not. */
export const hasSaved = ({ exact = 0, reused = 0, recomputed = 0, computed = 0 }) => (
  exact + reused > 0.1 * (exact + reused + recomputed + computed));

export function nats(value) {
  if (value === null || value === undefined) return "–";
  return value === 0 ? "0" : Math.abs(value) < 0.001 ? value.toExponential(1)
    : value.toFixed(value < 0.1 ? 4 : 3);
}

const WAYS = { full: "full prefill", prefix: "exact", reuse: "full reuse" };
/** A way to answer in words that a visitor knows, with the share that it recomputes. */
export const wayWords = (name, ratio = 0) => `${WAYS[name] ?? name}${ratio > 0 && ratio < 1
  ? ` ${percent(ratio)}` : ""}`;

const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });

/** "5 minutes ago", of seconds since 1970. */
export function ago(seconds, now = Date.now() / 1000) {
  const past = seconds - now;
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (Math.abs(past) >= size) return relative.format(Math.round(past / size), unit);
  }
  return "just now";
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en",
  { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export function dataRatio(part, all) { return all > 0 ? part / all : 0; }
