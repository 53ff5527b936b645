"""The pictures of docs/results.md, drawn from stored results: lines and points in panels.

Each is a file under bench/results/ which the table of bench/README.md names beside its result. The
same results give the same bytes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from common.files import REPO, RESULTS
from report_parts.figures import Run, runs_of

PACKAGED = REPO / "src" / "kvweave" / "calibrate" / "packaged"
COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#7f7f7f"),
    *("#17becf", "#bcbd22", "#000000", "#aa5588"),
)
WIDTH, HEIGHT = 290, 210  # of a panel
LEFT, TOP, GAP, FOOT = 64, 66, 60, 44
LEAST_WIDTH = 560  # of a picture: its title and legend

Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """Lines over the same axes; a line of one point is a point."""

    title: str
    lines: Mapping[str, Points]


class Picture(NamedTuple):
    """A row of panels that share their axes and their legend."""

    title: str
    x: str
    y: str
    panels: Sequence[Panel]
    is_log: bool = False  # the x axis


def draw(picture: Picture) -> str:
    """The picture as SVG."""
    names = list(dict.fromkeys(name for panel in picture.panels for name in panel.lines))
    points = [p for panel in picture.panels for line in panel.lines.values() for p in line]
    across = _Axis([x for x, _ in points], WIDTH, picture.is_log)
    up = _Axis([y for _, y in points], HEIGHT)
    width = max(LEAST_WIDTH, LEFT + len(picture.panels) * (WIDTH + GAP))
    per_row = max(1, width // 130)
    legend_rows = math.ceil(len(names) / per_row)
    top = TOP + 18 * (legend_rows - 1)
    height = top + HEIGHT + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        "<style>polyline{fill:none;stroke-width:1.5}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2:g}" y="18" font-size="13">{picture.title}</text>',
    ]
    for i, name in enumerate(names):
        at = (i % per_row + 0.5) * width / per_row
        parts.append(
            f'<text x="{at:g}" y="{38 + 18 * (i // per_row)}" fill="{_colour(names, name)}">'
            f"● {name}</text>"
        )
    for column, panel in enumerate(picture.panels):
        parts.append(f'<g transform="translate({LEFT + column * (WIDTH + GAP)} {top})">')
        parts.append(f'<text x="{WIDTH / 2:g}" y="-7">{panel.title}</text>')
        parts += _grid(across, up)
        for name, line in panel.lines.items():
            places = [(across.place(x), round(HEIGHT - up.place(y), 1)) for x, y in line]
            parts.append(f'<g fill="{_colour(names, name)}" stroke="{_colour(names, name)}">')
            parts.append(f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in places)}"/>')
            parts += [f'<circle cx="{x:g}" cy="{y:g}" r="2.5"/>' for x, y in places]
            parts.append("</g>")
        parts.append("</g>")
    parts.append(f'<text x="{width / 2:g}" y="{height - 8}">{picture.x}</text>')
    middle = f"16 {top + HEIGHT / 2:g}"
    parts.append(f'<text transform="translate({middle}) rotate(-90)">{picture.y}</text></svg>')
    return "\n".join(parts) + "\n"


class _Axis:
    """Where values lie on a side of a panel; it begins at 0 unless it is logarithmic."""

    def __init__(self, values: Sequence[float], length: int, is_log: bool = False) -> None:
        self._scale: Callable[[float], float] = math.log2 if is_log else float
        self._length = length
        if is_log:
            self.ticks = sorted(set(values))
            self._low, self._high = map(math.log2, (self.ticks[0], self.ticks[-1]))
            return
        rough = max(max(values), 1e-9) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * n for n in (1, 2, 2.5, 5, 10) if unit * n >= rough)
        count = math.ceil(max(values) / step)
        self.ticks = [round(step * n, 6) for n in range(count + 1)]
        self._low, self._high = 0.0, self.ticks[-1]

    def place(self, value: float) -> float:
        share = (self._scale(value) - self._low) / ((self._high - self._low) or 1)
        return round(self._length * share, 1)


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    lines = [f"M{across.place(tick):g} 0V{HEIGHT}" for tick in across.ticks]
    lines += [f"M0 {HEIGHT - up.place(tick):g}H{WIDTH}" for tick in up.ticks]
    yield f'<path d="{"".join(lines)}" stroke="#ddd"/>'
    for tick in across.ticks:
        yield f'<text x="{across.place(tick):g}" y="{HEIGHT + 14}">{tick:g}</text>'
    for tick in up.ticks:
        y = HEIGHT - up.place(tick) + 4
        yield f'<text x="-6" y="{y:g}" text-anchor="end">{tick:g}</text>'


# ── what is drawn ─────────────────────────────────────────────────────────────

SHOWN_WAYS = ("weave", "weave-deep", "epic", "cacheblend", "fusionrag", "prophetkv", "qcfuse")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return round(sum(found) / len(found), 6)


def _kl(run: Run, encoding: str, strategy: str, ratio: float) -> float:
    """Over all sets. Plain reuse and full prefill have no share of rows."""
    rows = [
        row["kl"]
        for row in run["cells"]
        if (row["encoding"], row["strategy"], row["ratio"]) == (encoding, strategy, ratio)
    ]
    if not rows:
        raise LookupError(f"no {strategy} at {ratio} behind {encoding}")
    return _mean(rows)


def _gap_by_ratio() -> Picture:
    run = runs_of("quality-h200")[-1]
    panels = []
    for encoding in ("isolated", "filler:4", "neighbours:3"):
        cells = [cell for cell in run["cells"] if cell["encoding"] == encoding]
        lines: dict[str, Points] = {}
        for way in SHOWN_WAYS:
            ratios = sorted({cell["ratio"] for cell in cells if cell["strategy"] == way})
            if ratios:
                lines[way] = [
                    (0.0, _kl(run, encoding, "reuse", 0.0)),
                    *((100 * ratio, _kl(run, encoding, way, ratio)) for ratio in ratios),
                ]
        panels.append(Panel(encoding, lines))
    title = f"SmolLM2, mean of three sets, {run['device']}"
    return Picture(title, "rows recomputed, %", "KL to full prefill, nats per token", panels)


def _quality_by_ttft() -> Picture:
    """Time and quality are of two benches over the same model and the same strategies."""
    times, quality = runs_of("ttft-cpu")[0], runs_of("quality-h200")[-1]
    lines: dict[str, Points] = {}
    for cell in times["cells"]:
        way, _, ratio = cell["way"].partition(" ")
        if cell["tier"] != "host" or way not in ("reuse", *SHOWN_WAYS):
            continue
        seconds = round(cell["ttft_ms"] / 1000, 3)
        point = (seconds, _kl(quality, "filler:4", way, float(ratio or 0)))
        lines[way] = sorted([*lines.get(way, ()), point])
    full = next(c for c in times["cells"] if (c["way"], c["tier"]) == ("full", "host"))
    lines["full"] = [(round(full["ttft_ms"] / 1000, 3), 0.0)]
    title = "SmolLM2 behind a filler: time on two x86-64 cores, quality on an H200"
    tokens = f"{times['config']['prompt_tokens']:,} tokens"
    return Picture(title, "first token, s", "KL, nats per token", [Panel(tokens, lines)])


def _quality_by_work() -> Picture:
    panels = []
    for run in {run["model"]: run for run in runs_of("quality_models-h200")}.values():
        lines: dict[str, Points] = {}
        for way in dict.fromkeys(row["way"] for row in run["rows"] if row["way"] != "full"):
            rows = [row for row in run["rows"] if row["way"] == way]
            name = way.partition(":")[0]
            point = (_mean(100 * row["work"] for row in rows), _mean(row["kl"] for row in rows))
            lines[name] = sorted([*lines.get(name, ()), point])
        panels.append(Panel(run["model"], lines))
    title = f"mean of all sets, {runs_of('quality_models-h200')[-1]['device']}"
    return Picture(title, "rows through layers, %", "KL to full prefill, nats per token", panels)


def _ttft_by_length() -> Picture:
    run = runs_of("ttft-h200")[-1]
    tokens: Mapping[str, int] = run["config"]["prompt_tokens"]
    panels = []
    for tier in ("host", "device"):
        lines: dict[str, Points] = {}
        for cell in sorted(run["cells"], key=lambda cell: tokens[cell["size"]]):
            if cell["tier"] in (tier, "none") and cell["codec"] in ("raw", ""):
                point = (tokens[cell["size"]] / 1000, cell["ttft_ms"])
                lines[cell["way"]] = [*lines.get(cell["way"], ()), point]
        panels.append(Panel(f"chunk KV on the {tier}", lines))
    title = f"{run['config']['shape']}, 15 % of the rows, {run['device']}, {run['commit']}"
    return Picture(title, "prompt, thousands of tokens", "first token, ms", panels)


def _throughput() -> Picture:
    panels = []
    for file in ("throughput-h200", "throughput-cpu"):
        run = runs_of(file)[-1]
        lines: dict[str, Points] = {}
        for cell in sorted(run["cells"], key=lambda cell: cell["rate"]):
            point = (cell["rate"] / _most(run, "full"), cell["ttft_ms"]["p95"] / _unloaded(run))
            # a bench of the engine alone says which strategy stands for the planner
            way = run["config"].get("auto", "auto") if cell["way"] == "auto" else cell["way"]
            lines[way] = [*lines.get(way, ()), point]
        panels.append(Panel(f"{run['device']}, {run['commit']}", lines))
    return Picture(
        "load that a server bears",
        "requests per second over the most that full prefill bears",
        "p95 of the first token over full prefill's alone",
        panels,
    )


def _unloaded(run: Run) -> float:
    return float(next(c for c in run["cells"] if c["way"] == "full")["unloaded"]["ttft_ms"])


def _most(run: Run, way: str) -> float:
    return max(float(c["rate"]) for c in run["cells"] if c["way"] == way and c["within"])


def _hit_rate() -> Picture:
    run = runs_of("hitrate-cpu")[-1]
    panels = []
    for name in dict.fromkeys(row["set"] for row in run["rows"]):
        rows = [row for row in run["rows"] if row["set"] == name]
        budgets = sorted({row["host_gib"] for row in rows})
        lines: dict[str, Points] = {
            policy: [
                (
                    gib,
                    _mean(100 * row[policy]["hit_rate"] for row in rows if row["host_gib"] == gib),
                )
                for gib in budgets
            ]
            for policy in ("pgdsf", "gdsf", "lru", "lfu")
        }
        panels.append(Panel(f"{name}, mean of top 1, 2, 3, 5", lines))
    title = f"which documents stay, {run['device']}, {run['commit']}"
    return Picture(title, "host memory, GiB", "hit rate, %", panels, is_log=True)


def _layer_profile() -> Picture:
    lines: dict[str, Points] = {}
    for path in sorted(PACKAGED.glob("*.json")):
        profile: Mapping[str, Any] = json.loads(path.read_text())
        recall = profile["layers"]["recall"]
        lines[profile["model"]] = [
            (round(100 * layer / (len(recall) - 1), 1), round(100 * share, 2))
            for layer, share in enumerate(recall)
        ]
    title = "where a question looks: the packaged layer profiles"
    y = "evidence among the best rows, %"
    return Picture(title, "depth of the layer, %", y, [Panel("", lines)])


PICTURES: Mapping[str, Callable[[], Picture]] = {
    "quality_ratio-h200.svg": _gap_by_ratio,
    "quality_models-h200.svg": _quality_by_work,
    "layers-h200.svg": _layer_profile,
    "ttft-cpu.svg": _quality_by_ttft,
    "ttft-h200.svg": _ttft_by_length,
    "throughput-h200.svg": _throughput,
    "hitrate-cpu.svg": _hit_rate,
}


def write_pictures(*, check: bool) -> int:
    """Write those that are not what the results give, or with `check` only say so; returns how many
    that were."""
    behind = 0
    for name, picture in PICTURES.items():
        path, text = RESULTS / name, draw(picture())
        if path.is_file() and path.read_text() == text:
            continue
        behind += 1
        if not check:
            path.write_text(text)
        print(f"bench/results/{name} {'is not what `make results` draws' if check else 'drawn'}")
    return behind
