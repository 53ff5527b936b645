"""Does what the gate lets through stay within the bound, on questions that calibration never saw?

For every question of the held-out sets (quality/kinds.py): the gate is asked with the shape of its
prompt, as `auto` asks it; the cheapest strategy that passes is taken, a close call is computed
exactly, and what the gate refuses is exact. The figures are those of `quality/by_kind.py`, which
ran every strategy and ratio through `kvweave.calibrate.measure`:

    python bench/quality/by_kind.py --cases cases.pickle --device cuda --values values.jsonl.gz
    python bench/gate.py --values values.jsonl.gz --out bench/results/gate-h200.json

`before` is the baseline, where it was measured: weave at 0.15, which one table of single-hop
questions let through everywhere. `within`: realised KL at most the bound and at most 2 % of first
tokens changed.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.results import finish, result_header
from kvweave.app.auto.facts import CalibratedGate
from kvweave.calibrate.bootstrap import Bootstrap
from kvweave.calibrate.gate import BOUND, CLOSE_CALLS, MAX_FLIPS
from kvweave.calibrate.measure import Outcome
from kvweave.calibrate.profiles import Profile, packaged_profile
from kvweave.fuse.encode.contexts import context_filler, digest_ids, parse_variant, variant_name
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.plan.plan import PromptShape
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer
from quality.by_kind import outcomes_of, read_values
from quality.kinds import SETS

BEFORE = ("weave", 0.15)


class Served(NamedTuple):
    """How one question was answered, against full prefill."""

    cell: str  # strategy and ratio, or "exact"
    kl: float
    flips: bool
    work: float
    close: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=Path, required=True, help="from quality/by_kind.py")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--encoding", default="filler:4")
    parser.add_argument("--bound", type=float, default=BOUND)
    parser.add_argument("--device", default="cuda", help="that --values were measured on")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gate = open_gate(args.model, args.encoding)
    lines = read_values(args.values)
    sets = {}
    for name, chosen in SETS.items():
        mine = [line for line in lines if line["set"] == name]
        if chosen.held_out and mine:
            served = [serve(gate, line, chosen.kind, args) for line in mine]
            sets[name] = {"kind": chosen.kind, **summarise(served, args.bound)}
            if all(list(BEFORE) in line["settings"] for line in mine):
                before = [_served(line, BEFORE, args.encoding, 0.0) for line in mine]
                sets[name]["before"] = summarise(before, args.bound)
    for name, found in sets.items():
        print(
            f"{name:10} n {found['n']:3}  {found['strategy']:14} KL {found['kl']:.4f} "
            f"(≤ {found['kl_high']:.4f})  flips {found['flips']:.1%}  close {found['close']:.0%}  "
            f"work {found['work']:.0%}  {'within' if found['within'] else 'NOT WITHIN'}"
        )
        if "before" in found:
            before = found["before"]
            print(f"{'':10} before: KL {before['kl']:.4f}, flips {before['flips']:.1%}")
    header = result_header("gate", "cpu")
    result = {
        **header,
        "measured_on": args.device,
        "model": args.model,
        "encoding": args.encoding,
        "bound": args.bound,
        "max_flips": MAX_FLIPS,
        "close_calls": CLOSE_CALLS,
        "within_on_every_set": all(found["within"] for found in sets.values()),
        "sets": sets,
    }
    finish(__doc__, result, args.out)


def open_gate(model: str, encoding: str) -> CalibratedGate:
    """The gate as a user of the packaged profile has it."""
    folder = locate(model)
    tokenizer, decoder = Tokenizer(folder), load_decoder(folder, device="cpu", dtype="float32")
    profile: Profile | None = packaged_profile(decoder.weights.fingerprint, tokenizer.fingerprint)
    assert profile is not None, f"{model} comes without a profile"
    variant = parse_variant(encoding)
    context = variant_name(variant, context_filler(tokenizer, variant))
    preamble = digest_ids(split_template(tokenizer, SYSTEM)[0])
    return CalibratedGate(profile.tables(decoder.revision, context, preamble), preamble)


def serve(
    gate: CalibratedGate, line: dict[str, Any], kind: str, args: argparse.Namespace
) -> Served:
    """What `auto` does with a question."""
    shape = PromptShape(line["tokens"], line["chunks"], kind == "conversation", line.get("said", 0))
    passing = list(_passing(gate, line, shape, args))
    if not passing:
        return Served("exact", 0.0, False, 1.0)
    strategy, ratio, close_call = min(passing, key=lambda cell: (cell[1], cell[0]))
    return _served(line, (strategy, ratio), args.encoding, close_call)


def _passing(
    gate: CalibratedGate, line: dict[str, Any], shape: PromptShape, args: argparse.Namespace
) -> Iterator[tuple[str, float, float]]:
    """Strategy, ratio, and the lead below which a first token is computed exactly."""
    for strategy in {name for name, _ in line["settings"]} - {"order"}:
        verdict = gate.min_ratio(strategy, args.bound, shape)
        if verdict.ratio is not None:
            yield strategy, verdict.ratio, verdict.close_call


def _served(
    line: dict[str, Any], cell: tuple[str, float], encoding: str, close_call: float
) -> Served:
    outcome: Outcome = outcomes_of(line).outcomes[encoding][line["settings"].index(list(cell))]
    judged, name = outcome.judged, f"{cell[0]} {cell[1]:g}"
    if judged.margin < close_call:
        return Served(name, 0.0, False, outcome.work + 1.0, True)
    return Served(name, judged.kl_mean, judged.first_flips, outcome.work)


def summarise(served: Sequence[Served], bound: float) -> dict[str, Any]:
    kl = Bootstrap(len(served)).mean(np.array([each.kl for each in served]))
    flips = float(np.mean([each.flips for each in served]))
    cells = [each.cell for each in served]
    return {
        "n": len(served),
        "strategy": max(dict.fromkeys(cells), key=cells.count),
        "exact": round(cells.count("exact") / len(cells), 4),
        "kl": round(kl.mean, 6),
        "kl_high": round(kl.high, 6),
        "flips": round(flips, 4),
        "close": round(float(np.mean([each.close for each in served])), 4),
        "work": round(float(np.mean([each.work for each in served])), 4),
        "median_work": round(float(np.median([each.work for each in served])), 4),
        "within": kl.mean <= bound and flips <= MAX_FLIPS,
    }


if __name__ == "__main__":
    main()
