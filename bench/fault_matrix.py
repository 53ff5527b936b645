"""Does the server give right answers whatever breaks, and lose nothing that it acknowledged?

    python bench/fault_matrix.py --out bench/results/fault_matrix-cpu.json

Parts, which may be run one by one into the same file:

    faults    every tier by what goes wrong by what is being done, and faults of the engine: a proxy
              in front of Valkey and S3, files that are damaged, forbidden and moved away, hooks at
              the edge to the system where nothing else reaches (reliability/fault_hooks.py)
    kills     kill -9 under load, again and again (reliability/kills.py)
    power     the power goes: writes that were not synced are lost (reliability/power.py)
    tenants   what one tenant can learn of another or do to it, by looking and by timing
    bombs     /healthz while requests and files made to freeze it come in; SIGTERM meanwhile
    device    what lies in a GPU's memory, and the engine there; into a file of its own, if asked
              for by name. Such a machine has bare PyTorch and no server: the engine itself is
              asked, watched by what watches it in a server (reliability/device_faults.py)

    python bench/fault_matrix.py --parts device --device cuda \\
        --out bench/results/fault_matrix-h200.json

Every server is `kvweave serve` in a process of its own, asked over HTTP. A fault counts if it was
seen to strike. The fields in front of the runs sum them up: faults, kills and power cuts of all
runs, of the other parts the last one; --page writes docs/reliability.md from the file, no more.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.files import REPO, RESULTS
from common.results import read_results, result_header, save_run
from reliability.reliability_page import page_of, summary

PARTS = ("faults", "kills", "power", "tenants", "bombs")  # `device` is asked for by name
OUT = RESULTS / "fault_matrix-cpu.json"
TIERS = ("valkey", "s3", "disk", "host", "engine")
DEVICE_OUT = RESULTS / "fault_matrix-h200.json"
RESTARTS_OUT = tuple(RESULTS / f"restart-{kind}.json" for kind in ("cpu", "h200"))
PAGE = REPO / "docs" / "reliability.md"
ON_DEVICE = "Does the engine give right answers whatever breaks on its device?"


def tell(words: str) -> None:
    """How far a part is, and every failure as it is found."""
    print(words, flush=True)


def run_part(
    part: str, args: argparse.Namespace, folder: Path, on_rows: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """`on_rows` hears of what a long part has found so far."""
    ops = {each for each in args.ops.split(",") if each}
    match part:
        case "faults":
            from reliability.faults import run_faults

            tiers = args.tiers.split(",") if args.tiers else TIERS

            def only(tier: str, op: str, kind: str) -> bool:
                return not ops or op in ops

            return run_faults(folder, tiers, args.reps, only, on_rows, args.seed)
        case "kills":
            from reliability.kills import run_kills

            return run_kills(
                args.kills,
                seed=args.seed,
                served_share=args.served,
                tell=tell,
                on_result=on_rows,
            )
        case "power":
            from reliability.power import run_power_cuts

            return run_power_cuts(args.cuts, seed=args.seed, tell=tell)
        case "tenants":
            from reliability.tenants import run_tenants

            return run_tenants(folder, args.model)
        case "bombs":
            from reliability.bombs import run_bombs

            return run_bombs(folder)
        case "device":
            from reliability.device_faults import WAYS, run_device_faults

            ways = args.tiers.split(",") if args.tiers else WAYS
            return run_device_faults(
                folder,
                args.device,
                args.reps,
                lambda fault: fault.way in ways and (not ops or fault.op in ops),
                on_rows,
                args.seed,
            )
    raise SystemExit(f"no part {part!r}; known: {', '.join(PARTS)}, device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas [all]")
    parser.add_argument(
        "--tiers", default="", help="of the faults; of a device: what lies there [all]"
    )
    parser.add_argument("--ops", default="", help="what is being done, with commas [all]")
    parser.add_argument("--device", default="cpu", help="of the part `device`")
    parser.add_argument("--reps", type=int, default=3, help="of each fault, with other seeds")
    parser.add_argument("--seed", type=int, default=0, help="which bytes, which moments")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--served", type=float, default=0.4, help="share of servers in the kills")
    parser.add_argument("--cuts", type=int, default=300)
    parser.add_argument("--model", help="of the tenants' timing; a tiny random one if left out")
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    parser.add_argument(
        "--add", metavar="PART=FILE", action="append", help="take a part's result from a JSON file"
    )
    parser.add_argument("--page", action="store_true", help="write docs/reliability.md, no more")
    args = parser.parse_args()
    if args.page:
        restarts = [read_results(each) for each in RESTARTS_OUT if each.exists()]
        PAGE.write_text(page_of(read_results(args.out or OUT), read_results(DEVICE_OUT), restarts))
        return
    result: dict[str, Any] = result_header("fault_matrix", args.device)

    def keep(part: str, found: dict[str, Any]) -> None:
        """As it goes: a run that is ended early has what it had found."""
        result["faults" if part == "device" else part] = found
        if args.out is not None:
            save_run(ON_DEVICE if part == "device" else __doc__, result, args.out, summary)

    for part, _, file in (each.partition("=") for each in args.add or ()):
        keep(part, json.loads(Path(file).read_text()))
    for part in () if args.add else args.parts.split(","):
        with tempfile.TemporaryDirectory(prefix="kvw-", ignore_cleanup_errors=True) as temporary:
            keep(part, run_part(part, args, Path(temporary), partial(keep, part)))
    print(json.dumps(summary([result])))


if __name__ == "__main__":
    main()
