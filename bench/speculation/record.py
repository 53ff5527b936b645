"""Records searches, stage by stage, for bench/speculation/gpu.py: a GPU box has neither the data
nor an index.

    python bench/speculation/record.py --data DATA --searches carry/searches.json.gz

Run it while nothing else runs: what each stage takes is played back as it was.
"""

import argparse
import gzip
import json
import statistics
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.results import finish, portable_args, result_header
from kvweave.app.answer.guessing import MAX_STAGES
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from speculation.modes import WARM_UP
from speculation.run import World, open_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki_kb, nq_oracle")
    parser.add_argument("--searches", type=Path, required=True, help="written")
    parser.add_argument("--model", default="smollm2", help="whose tokens")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--k", type=int, nargs="+", default=[2, 8], help="chunks of a prompt")
    parser.add_argument("--passages", type=int, help="of Wikipedia's; [all 35,745]")
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0])
    args = parser.parse_args()
    tokenizer = Tokenizer(locate(args.model))
    world = open_world(args.data, tokenizer, args.questions, args.copies, args.passages)
    questions = [WARM_UP, *world.asked[: args.questions]]
    levels = [
        recorded(world, questions, args.questions, k, share)
        for k in args.k
        for share in args.shares
    ]
    kept = {
        "args": portable_args(sys.argv[1:]),
        "recorded_on": result_header("speculation_searches", "cpu")["device"],
        "vectors": len(world.kb.index),
        "passages": world.passages,
        "questions": {q: tokenizer.encode_text(q) for q in questions},
        "chunks": world.kb.chunk_ids(),
        "levels": levels,
    }
    with gzip.open(args.searches, "wt", encoding="utf-8") as file:
        json.dump(kept, file)
    said = [{name: level[name] for name in ("k", "share", "search_ms")} for level in levels]
    finish(__doc__, {**result_header("speculation_searches", "cpu"), "levels": said})


def recorded(
    world: World, questions: list[str], num_questions: int, k: int, share: float
) -> dict[str, Any]:
    """Searches for k chunks in a share of the clusters: what each stage took, and its list."""
    kb = world.kb
    kb.index.share = share
    found = {}
    for question in questions:
        vector = kb.vectors[question]
        kb.record(vector, k)
        found[question] = {
            stages: [(seconds, hits.ids.tolist()) for seconds, hits in kb.played(vector, stages)]
            for stages in range(1, MAX_STAGES + 1)
        }
    learnt = [kb.learnt(vector, k) for vector in world.vectors[num_questions:]]
    took_s = statistics.fmean(runs[1][0][0] for runs in found.values())
    return {
        "k": k,
        "share": share,
        "search_ms": round(1e3 * took_s, 1),
        "stages": kb.num_stages(k, MAX_STAGES),
        "searches": found,
        "learnt": [each._asdict() for each in learnt],
    }


if __name__ == "__main__":
    main()
