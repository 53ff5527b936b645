"""Makes the tables that come with a model out of what quality/by_kind.py measured.

    python bench/quality/package.py values.jsonl.gz --cases carry/cases.pickle \\
        --profile src/kvweave/calibrate/packaged/smollm2-c4e24e8168d5.json

Only sets that are not held out. Tables of sets that were measured are replaced; the others and the
layers stay, unless `--layers` names what quality/layers.py found. A model without a profile gets
one.
"""

import argparse
import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.results import finish
from kvweave.calibrate.case import Case, hash_cases
from kvweave.calibrate.gate import FEWEST_QUESTIONS, Table, choose, tables_for_size, worst_cells
from kvweave.calibrate.measure import ORDER, Setting
from kvweave.calibrate.profiles import LayerProfile, Profile, load_profile, save_profile
from kvweave.calibrate.tabulate import TableOrigin, tabulate
from kvweave.fuse.encode.contexts import context_filler, digest_ids, parse_variant, variant_name
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer
from quality.by_kind import outcomes_of, read_values
from quality.kinds import SETS

SIZES = (5, 10, 20)  # chunks of a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("values", type=Path)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True, help="read, then written")
    parser.add_argument("--layers", type=Path, help="what quality/layers.py found")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", help="of the model, in a profile that is new")
    parser.add_argument("--dtype", default="float32", help="that was measured in")
    parser.add_argument("--encoding", default="filler:4")
    parser.add_argument(
        "--fewest", type=int, default=FEWEST_QUESTIONS, help="questions of a set that counts"
    )
    args = parser.parse_args()
    folder = locate(args.model)
    tokenizer, decoder = Tokenizer(folder), load_decoder(folder, device="cpu", dtype=args.dtype)
    cases = pickle.loads(args.cases.read_bytes())
    lines = read_values(args.values)
    variant = parse_variant(args.encoding)
    origin = TableOrigin(
        revision=decoder.revision,
        dtype=args.dtype,
        data="",
        data_hash="",
        context=variant_name(variant, context_filler(tokenizer, variant)),
        preamble=digest_ids(split_template(tokenizer, SYSTEM)[0]),
        num_chunk_tokens=0,
    )
    num_layers = decoder.spec.num_layers
    tables = [
        table_of(name, lines, cases[name], args.encoding, num_layers, origin)
        for name, chosen in SETS.items()
        if not chosen.held_out and sum(line["set"] == name for line in lines) >= args.fewest
    ]
    weights, ids = decoder.weights.fingerprint, tokenizer.fingerprint
    if args.profile.exists():
        profile = load_profile(args.profile, weights, ids)
    else:
        profile = Profile(args.name or args.model, weights, ids)
    if args.layers is not None:
        profile = replace(profile, layers=LayerProfile(**json.loads(args.layers.read_text())))
    kept = [
        replace(table, kind=SETS[table.data].kind)
        for table in profile.calibration
        if table.data in SETS and table.data not in {fresh.data for fresh in tables}
    ]
    every = sorted((*kept, *tables), key=lambda table: list(SETS).index(table.data))
    save_profile(args.profile, replace(profile, calibration=tuple(every)))
    alone = [table for table in every if not table.has_history]
    said = {
        "tables": {t.data: t.num_questions for t in every},
        "chosen": {size: chosen_of(tables_for_size(alone, size)) for size in SIZES},
        "chosen_with_history": {size: chosen_of(behind_history(every, size)) for size in SIZES},
    }
    finish(__doc__, said)


def behind_history(tables: Sequence[Table], num_chunks: int) -> list[Table]:
    """Those that speak for so many chunks behind a history."""
    alone = [table for table in tables if not table.has_history]
    return [*tables_for_size(alone, num_chunks), *(table for table in tables if table.has_history)]


def chosen_of(tables: Sequence[Table]) -> list[Any] | None:
    chosen = choose(worst_cells(tables))
    return None if chosen is None else [chosen.strategy, chosen.ratio]


def table_of(
    name: str,
    lines: Sequence[dict[str, Any]],
    cases: Sequence[Case],
    encoding: str,
    num_layers: int,
    origin: TableOrigin,
) -> Table:
    """The table of one set."""
    mine = sorted((line for line in lines if line["set"] == name), key=lambda line: line["number"])
    used = [cases[line["number"]] for line in mine]
    facts = ModelFacts(num_layers)
    settings = [
        ORDER if strategy == ORDER.strategy.name else Setting(open_strategy(strategy, facts), ratio)
        for strategy, ratio in mine[0]["settings"]
    ]
    origin = replace(
        origin,
        data=name,
        data_hash=hash_cases(used),
        num_chunk_tokens=sum(case.num_chunk_tokens for case in used),
        kind=SETS[name].kind,
        has_history=any(case.history for case in used),
    )
    return tabulate([outcomes_of(line) for line in mine], settings, encoding, origin)


if __name__ == "__main__":
    main()
