"""Where does a model's question search? Its critical layers, for quality/package.py.

    python bench/quality/layers.py --data DATA --cases carry/layers.pickle      # here: prompts
    python bench/quality/layers.py --cases carry/layers.pickle --device cuda --found layers.json

What `kvweave calibrate layers` does, in two steps: a GPU box has neither data nor command line.
"""

import argparse
import json
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.results import finish, result_header
from kvweave.calibrate.layer_profile import profile_layers
from kvweave.calibrate.questions import add_distractors, make_case, read_records, repeat_ids
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 2000  # as `kvweave calibrate layers` takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cases", type=Path, required=True, help="prompts; made if not there")
    parser.add_argument("--found", type=Path, default=Path("layers.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", help="'none' makes --cases and stops")
    parser.add_argument("--limit", type=int, default=100, help="samples")
    args = parser.parse_args()
    folder = locate(args.model)
    tokenizer = Tokenizer(folder)
    if not args.cases.is_file():
        records = read_records(args.data / "squad_v1.1_dev/squad_bm25_10passages.jsonl.gz")
        marked = [r for r in records if any(p.answer_spans for p in r.passages)][: 4 * args.limit]
        padded = add_distractors(marked, tokenizer, CONTEXT_TOKENS)[: args.limit]
        args.cases.write_bytes(pickle.dumps([make_case(tokenizer, record) for record in padded]))
    if args.device == "none":
        return
    cases = pickle.loads(args.cases.read_bytes())[: args.limit]
    decoder = load_decoder(folder, device=args.device, dtype="float32")
    found = profile_layers(decoder, cases, repeat_ids(tokenizer))
    args.found.write_text(json.dumps(asdict(found)))
    result = {
        **result_header("critical_layers", args.device),
        "model": args.model,
        "critical": found.critical,
        "recall": [round(found.recall[layer], 3) for layer in found.critical],
    }
    finish(__doc__, result)


if __name__ == "__main__":
    main()
