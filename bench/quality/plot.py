"""Draw what bench/quality/run.py found: KL gap recovered over the work of a request.

python bench/quality/plot.py bench/results/quality-h200.json bench/results/quality-h200.svg
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/, where common/ is

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="what run.py or join.py wrote")
    parser.add_argument("--run", type=int, default=-1, help="which of its runs; the last")
    parser.add_argument("target", type=Path, help="the picture, .svg or .png")
    args = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "kvweave"  # the same figures give the same file
    result = read_results(args.source)["runs"][args.run]
    figure = draw(result)
    figure.savefig(args.target, bbox_inches="tight", metadata={"Date": None})


def draw(result: dict[str, Any]) -> Figure:
    """One panel per set and encoding context."""
    cells = result["cells"]
    sets = list(dict.fromkeys(c["set"] for c in cells))
    # plain reuse of isolated chunk KV is always there: what recovery counts from
    encodings = list(dict.fromkeys(c["encoding"] for c in cells if c["strategy"] in STRATEGIES))
    size = (4.2 * len(sets), 3.4 * len(encodings))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(encodings), len(sets), sharex=True, sharey=True, squeeze=False)
    for row, encoding in zip(panels, encodings, strict=True):
        for panel, name in zip(row, sets, strict=True):
            here = [c for c in cells if c["set"] == name and c["encoding"] == encoding]
            draw_panel(panel, here)
            panel.set_title(f"{name}, {encoding} (n = {here[0]['n']})", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("rows through layers, % of full prefill")
    for row in panels:
        row[0].set_ylabel("KL gap recovered, %")
    panels[0][0].legend(fontsize=7, loc="lower right")
    runs = result.get("runs") or [{**result["config"], "commit": result["commit"]}]
    commits = ", ".join(run["commit"] for run in runs)
    figure.suptitle(f"{Path(runs[0]['model']).stem}, {result['device']}, {commits}", fontsize=10)
    return figure


def draw_panel(panel: Any, cells: list[dict[str, Any]]) -> None:
    reuse = next(c for c in cells if c["strategy"] == "reuse")
    for name, colour in STRATEGIES.items():
        line = sorted(
            (c for c in [reuse, *(c for c in cells if c["strategy"] == name)]),
            key=lambda c: c["ratio"],
        )
        if len(line) == 1:
            continue
        work = [100 * c["work"] for c in line]
        panel.plot(work, [c["recovered"] for c in line], color=colour, marker=".", label=name)
        low, high = zip(*(c["recovered_ci"] for c in line), strict=True)
        panel.fill_between(work, low, high, color=colour, alpha=0.12, linewidth=0)
    panel.set_xlim(0, 60)
    panel.set_ylim(-5, 100)
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    main()
