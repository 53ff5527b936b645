"""What the results page shows of bench/figures: figures of FusionRAG and QCFuse on small models."""

from collections.abc import Sequence
from typing import Any

from report_parts.figures import Figure, Result, Run, listed, percent, pick

MEASURES = ("src/kvweave/fuse", "src/kvweave/calibrate", ":(exclude)src/kvweave/calibrate/packaged")
VIEWS = ("sink 10%", "knorm 10%", "kvzip 10%", "no anchors", "full context")
TARGETS = (0.1, 0.15, 0.3)  # ratios of ProphetKV whose KL QCFuse is to reach


def _recovered(run: Run, part: str, ways: Sequence[str], ratio: float = 0.15) -> str:
    """The share of plain reuse's KL that some ways take away."""
    rows = run["parts"][part]["rows"]
    return _percents([pick(rows, way=way, ratio=ratio)["recovered"] for way in ways])


def _with_interval(run: Run, part: str, way: str, ratio: float = 0.15) -> str:
    row = pick(run["parts"][part]["rows"], way=way, ratio=ratio)
    low, high = row["recovered_ci"]
    return f"{row['recovered']:.0f} % ({low:.0f} to {high:.0f})"


def _behind(run: Run, name: str, ratio: float, encodings: Sequence[str]) -> str:
    return _recovered(run, "neighbours", [f"{each}/{name}" for each in encodings], ratio)


def _matched(run: Run, part: str, encoding: str, field: str) -> list[Any]:
    """What QCFuse needs to reach ProphetKV's KL, by ProphetKV's ratio."""
    found = run["parts"][part][encoding]["rows"] if encoding else run["parts"][part]["matched"]
    rows = [pick(found, of="prophetkv", ratio=ratio) for ratio in TARGETS]
    return [row[field] for row in rows]


def _needs(run: Run, part: str, encoding: str = "") -> str:
    return listed(
        ["–" if x is None else percent(x) for x in _matched(run, part, encoding, "needs")]
    )


def _costs(run: Run, part: str, encoding: str = "") -> str:
    """QCFuse's cost over ProphetKV's at equal KL."""
    saved = _matched(run, part, encoding, "saves")
    return listed(["–" if x is None else f"{1 / x:.2f}×" for x in saved])


def _costs_over(run: Run, by: str, others: Sequence[str], ratio: float) -> str:
    """Work of one strategy over that of others at a ratio, at the KL that they have there."""
    rows = run["parts"]["stored"]["isolated"]["rows"]
    saved = [pick(rows, of=other, by=by, ratio=ratio)["saves"] for other in others]
    return listed([f"{1 / each:.2f}×" for each in saved])


def _view(run: Run, view: str, field: str) -> float:
    value: float = pick(run["parts"]["recall"]["rows"], view=view)[field]
    return value


def _together(run: Run, name: str, of: str = "chunks") -> str:
    found = run["parts"]["together"][name]
    return _percents([100 * found[f"top {top}, nearest {top}"][of] for top in (2, 5, 10)])


def _percents(values: Sequence[float]) -> str:
    return listed([f"{value:.0f}" for value in values]) + " %"


def _lifts(run: Run, by: str, key: str) -> str:
    names = ("cacheblend", "fusionrag", "qcfuse")
    return listed([f"{run['parts']['places'][name][by][key]:.1f}×" for name in names])


NEAR = ("isolated", "filler:4", *(f"neighbours:{count}" for count in (2, 5, 10, 15)))
SHARES = ("none", "kvzip 5%", "kvzip 10%", "kvzip 20%", "kvzip 50%", "all")
MASS = ("0.01", "0.05", "0.1", "0.2")
LAYERS = ("first", "middle", "last", "all", "profiled 1", "profiled 3")
STRATEGIES = ("cacheblend", "cachecraft-like", "fusionrag")

FIGURES_CPU = Result(
    "figures-cpu",
    MEASURES,
    (
        Figure(
            "needs",
            "share of rows that QCFuse needs for the KL that ProphetKV has at 10 / 15 / 30 %, "
            "isolated chunk KV, the 600 questions of quality-h200",
            lambda r: _needs(r, "stored", "isolated"),
        ),
        Figure(
            "costs",
            "… QCFuse's rows through layers over ProphetKV's then, probes included",
            lambda r: _costs(r, "stored", "isolated"),
        ),
        Figure(
            "costs_filler",
            "… the same behind a filler",
            lambda r: _costs(r, "stored", "filler:4"),
        ),
        Figure(
            "costs_others",
            "QCFuse's rows through layers over those of CacheBlend / EPIC / FusionRAG at 30 %, at "
            "their KL, isolated",
            lambda r: _costs_over(r, "qcfuse", ("cacheblend", "epic", "fusionrag"), 0.3),
        ),
        Figure(
            "costs_weave",
            "`weave`'s rows through layers over those of QCFuse at 30 %, at its KL, isolated",
            lambda r: _costs_over(r, "weave", ("qcfuse",), 0.3),
        ),
        Figure(
            "questions",
            "questions of 2Wiki, HotpotQA, MuSiQue and NQ with five chunks each, SmolLM2, for all "
            "that follows on layers, anchors, attention, deviation and places",
            lambda r: str(r["parts"]["layers"]["n"]),
        ),
        Figure(
            "layers",
            "KL gap of plain reuse that QCFuse recovers at 15 %, scored at the first / middle / "
            "last / all layers / the best / the best three of the profile",
            lambda r: _recovered(r, "layers", [f"isolated/{name}" for name in LAYERS]),
        ),
        Figure(
            "layer_profiled",
            "… the best of the profile, with its 95 % interval",
            lambda r: _with_interval(r, "layers", "isolated/profiled 1"),
        ),
        Figure(
            "layer_middle",
            "… the middle layer",
            lambda r: _with_interval(r, "layers", "isolated/middle"),
        ),
        Figure(
            "anchor_share",
            "… with no anchors / 5 / 10 / 20 / 50 % by KVzip / the full context, at the layers of "
            "the profile",
            lambda r: _recovered(r, "anchors", [f"isolated/{name}" for name in SHARES]),
        ),
        Figure(
            "anchor_rule",
            "… with 10 % by first tokens / key norm / KVzip",
            lambda r: _recovered(
                r, "anchors", [f"isolated/{name} 10%" for name in ("sink", "knorm", "kvzip")]
            ),
        ),
        Figure(
            "mass",
            "attention of a question on chunk tokens that the top 1 / 5 / 10 / 20 % of them hold",
            lambda r: _percents(
                [
                    100 * r["parts"]["attention"]["covered"][s]
                    for s in ("0.01", "0.05", "0.1", "0.2")
                ]
            ),
        ),
        Figure(
            "agreement",
            "overlap of a layer's top 10 % with that of all layers: first / middle / last third",
            lambda r: _percents([100 * x for x in r["parts"]["attention"]["agrees_by_third"]]),
        ),
        Figure(
            "agree_most",
            "layers of 30 (from 0) that agree most, best first",
            lambda r: ", ".join(map(str, r["parts"]["attention"]["agree_most"])),
        ),
        Figure(
            "left",
            "KV deviation that is left when the 15 % of most deviation are exact: mean of all "
            "layers / layer 2",
            lambda r: _percents(
                [
                    100 * r["parts"]["deviation"][name]
                    for name in ("left_all_layers", "left_second_layer")
                ]
            ),
        ),
        Figure(
            "deviation_place",
            "deviation of layer 2 over its mean, by place in the chunk: tokens 0 to 3 / 4 to 15 / "
            "16 to 63 / from 64 on",
            lambda r: listed(
                [
                    f"{r['parts']['deviation']['by_place'][p]:.2f}"
                    for p in ("0-3", "4-15", "16-63", "64-")
                ]
            ),
        ),
        Figure(
            "deviation_chunk",
            "… by chunk: second / third / fourth / fifth",
            lambda r: listed([f"{r['parts']['deviation']['by_chunk'][c]:.2f}" for c in "2345"]),
        ),
        Figure(
            "chosen_first",
            "how often the first four tokens of a chunk are chosen over how often all are, at 15 "
            "%: CacheBlend / FusionRAG / QCFuse",
            lambda r: _lifts(r, "by_place", "0-3"),
        ),
        Figure("chosen_second", "… the second chunk", lambda r: _lifts(r, "by_chunk", "2")),
        Figure("chosen_last", "… the fifth chunk", lambda r: _lifts(r, "by_chunk", "5")),
        Figure(
            "recall",
            "tokens of a marked answer in the 10 % that QCFuse ranks highest, SQuAD in 2,000 "
            "tokens: anchors of 10 % by first tokens / key norm / KVzip / no anchors / the full "
            "context",
            lambda r: _percents([100 * _view(r, view, "recall") for view in VIEWS]),
        ),
        Figure(
            "recall_all_layers",
            "… scored at all layers",
            lambda r: _percents([100 * _view(r, view, "recall_all_layers") for view in VIEWS]),
        ),
        Figure(
            "recall_share",
            "… by KVzip with 5 / 10 / 20 / 50 % of a chunk",
            lambda r: _percents([100 * _view(r, f"kvzip {s}%", "recall") for s in (5, 10, 20, 50)]),
        ),
        Figure(
            "recall_same",
            "rows of the full context's 10 % that are chosen over anchors, too: first tokens / key "
            "norm / KVzip / no anchors",
            lambda r: _percents([100 * _view(r, view, "same") for view in VIEWS[:-1]]),
        ),
        Figure("recall_n", "… questions of these", lambda r: str(r["parts"]["recall"]["n"])),
        Figure(
            "near_reuse",
            "KL gap that plain reuse recovers: isolated / behind a filler / behind it and 2 / 5 / "
            "10 / 15 neighbours",
            lambda r: _behind(r, "reuse", 0.0, NEAR),
        ),
        Figure(
            "near_5",
            "… FusionRAG at 5 %",
            lambda r: _behind(r, "fusionrag", 0.05, NEAR),
        ),
        Figure(
            "near_15_isolated",
            "… at 15 %, isolated: CacheBlend / Cache-Craft-like / FusionRAG",
            lambda r: _recovered(r, "neighbours", [f"isolated/{name}" for name in STRATEGIES]),
        ),
        Figure(
            "near_15",
            "… at 15 % behind ten neighbours",
            lambda r: _recovered(r, "neighbours", [f"neighbours:10/{name}" for name in STRATEGIES]),
        ),
        Figure(
            "near_deviation",
            "deviation of layer 2 that is gone behind a filler / 2 / 5 / 10 / 15 neighbours",
            lambda r: _percents(
                [
                    100 * (1 - r["parts"]["neighbours"]["deviation_over_isolated"][name])
                    for name in NEAR[1:]
                ]
            ),
        ),
        Figure("near_n", "… questions of these", lambda r: str(r["parts"]["neighbours"]["n"])),
        Figure(
            "together",
            "retrieved passages that have one of their nearest 2 / 5 / 10 among the 2 / 5 / 10 "
            "retrieved with them, HotpotQA's questions",
            lambda r: _together(r, "hotpot"),
        ),
        Figure(
            "together_questions",
            "… HotpotQA's questions with such a pair",
            lambda r: _together(r, "hotpot", "questions"),
        ),
        Figure("together_2wiki", "… 2Wiki's", lambda r: _together(r, "2wiki")),
        Figure("together_nq", "… NQ-open's", lambda r: _together(r, "nq")),
    ),
    "FusionRAG and QCFuse measure 7B to 14B models by F1 on 10 to 20 chunks a prompt. Ours is "
    "SmolLM2-135M in 8 bits by KL divergence, five chunks, few questions: a sign, no proof.",
)
