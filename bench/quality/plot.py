"""Draw what bench/quality/run.py found: KL gap recovered over the work of a request.

python bench/quality/plot.py bench/results/quality-h200.json bench/results/quality-h200.svg
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.results import read_results

STRATEGIES = {  # in the order of the legend
    "weave": "#d62728",
    "weave-deep": "#ff7f0e",
    "prophetkv": "#1f77b4",
    "qcfuse": "#2ca02c",
    "fusionrag": "#9467bd",
    "cacheblend": "#8c564b",
    "epic": "#e377c2",
    "random": "#7f7f7f",
}
WIDTH, HEIGHT = 290, 210  # of a panel
LEFT, TOP, GAP = 60, 66, 40
MOST_WORK, MOST, LEAST = 60, 100, -5  # % shown: of full prefill, and of the gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="what run.py or join.py wrote")
    parser.add_argument("target", type=Path, help="the picture, .svg")
    parser.add_argument("--run", type=int, default=-1, help="which of its runs; the last")
    args = parser.parse_args()
    result = read_results(args.source)["runs"][args.run]
    args.target.write_text("\n".join(draw(result)) + "\n")


def draw(result: dict[str, Any]) -> Iterator[str]:
    """One panel per set and encoding context; lines with their 95 % intervals."""
    cells = result["cells"]
    sets = list(dict.fromkeys(c["set"] for c in cells))
    # plain reuse of isolated chunk KV is always there: what recovery counts from
    encodings = list(dict.fromkeys(c["encoding"] for c in cells if c["strategy"] in STRATEGIES))
    width = LEFT + len(sets) * (WIDTH + GAP)
    height = TOP + len(encodings) * (HEIGHT + GAP) + 24
    runs = result.get("runs") or [{**result["config"], "commit": result["commit"]}]
    commits = ", ".join(run["commit"] for run in runs)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">'
    )
    yield "<style>polyline{fill:none;stroke-width:1.5}polygon{stroke:none;opacity:.12}</style>"
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    title = f"{Path(runs[0]['model']).stem}, {result['device']}, {commits}"
    yield f'<text x="{width / 2:g}" y="18" font-size="13">{title}</text>'
    for i, (name, colour) in enumerate(STRATEGIES.items()):
        across = width * (i + 0.5) / len(STRATEGIES)
        yield f'<text x="{across:g}" y="38" fill="{colour}">● {name}</text>'
    for row, encoding in enumerate(encodings):
        for column, name in enumerate(sets):
            here = [c for c in cells if (c["set"], c["encoding"]) == (name, encoding)]
            at = f"{LEFT + column * (WIDTH + GAP)} {TOP + row * (HEIGHT + GAP)}"
            yield f'<g transform="translate({at})">'
            heading = f"{name}, {encoding} (n = {here[0]['n']})"
            yield f'<text x="{WIDTH / 2:g}" y="-7">{heading}</text>'
            yield from axes()
            yield from curves(here)
            yield "</g>"
    yield f'<text x="{width / 2:g}" y="{height - 10}">rows through layers, % of full prefill</text>'
    middle = f"16 {height / 2:g}"
    yield f'<text transform="translate({middle}) rotate(-90)">KL gap recovered, %</text></svg>'


def axes() -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'
    across = [f"M{x(work)} 0V{HEIGHT}" for work in range(10, MOST_WORK, 10)]
    up = [f"M0 {y(part)}H{WIDTH}" for part in range(0, MOST, 20)]
    yield f'<path d="{"".join([*across, *up])}" stroke="#ddd"/>'
    for work in range(0, MOST_WORK + 1, 10):
        yield f'<text x="{x(work)}" y="{HEIGHT + 13}">{work}</text>'
    for part in range(0, MOST + 1, 20):
        yield f'<text x="-5" y="{y(part + 1.5)}" dy="8" text-anchor="end">{part}</text>'


def curves(cells: list[dict[str, Any]]) -> Iterator[str]:
    """From plain reuse upwards, as far as the panel goes."""
    reuse = next(c for c in cells if c["strategy"] == "reuse")
    for name, colour in STRATEGIES.items():
        own = sorted((c for c in cells if c["strategy"] == name), key=lambda c: c["ratio"])
        if not own:
            continue
        line = [reuse, *own]
        low = [point(c["work"], c["recovered_ci"][0]) for c in line]
        high = [point(c["work"], c["recovered_ci"][1]) for c in reversed(line)]
        middle = [point(c["work"], c["recovered"]) for c in line]
        yield f'<g fill="{colour}" stroke="{colour}"><polygon points="{" ".join([*low, *high])}"/>'
        yield f'<polyline points="{" ".join(middle)}"/>'
        dots = (each.split(",") for each in middle)
        yield "".join(f'<circle cx="{a}" cy="{b}" r="2"/>' for a, b in dots) + "</g>"


def point(work: float, recovered: float) -> str:
    return f"{x(100 * work)},{y(recovered)}"


def x(work: float) -> float:
    return round(WIDTH * work / MOST_WORK, 1)


def y(recovered: float) -> float:
    return round(HEIGHT * (MOST - recovered) / (MOST - LEAST), 1)


if __name__ == "__main__":
    main()
