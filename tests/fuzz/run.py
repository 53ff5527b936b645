"""Feeds fuzz jobs for as long as it is told: python tests/fuzz/run.py --minutes 60 [--jobs gguf …]

Jobs take turns of a few seconds. An input that breaks something is written to build/fuzz/JOB/ with
what it did, and the exit code is 1. With the same seed and number of inputs the same is fed.
"""

import argparse
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # tests/ instead of this folder

from fuzz.jobs import JOBS, corpus_of, run_one
from fuzz.mutations import mutate

FOUND = Path(__file__).parents[2] / "build" / "fuzz"
TURN_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=list(JOBS))
    parser.add_argument("--seed", type=int, help="the time if left out")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    fed: Counter[str] = Counter()
    broken: dict[str, set[str]] = {name: set() for name in args.jobs}
    until_s = time.monotonic() + args.minutes * 60
    with ExitStack() as stack:
        feeds = {name: stack.enter_context(JOBS[name]()) for name in args.jobs}
        while time.monotonic() < until_s:
            for name, feed in feeds.items():
                corpus, turn_s = corpus_of(name), time.monotonic() + TURN_S
                while time.monotonic() < min(turn_s, until_s):
                    data = mutate(random.Random(f"{seed}/{name}/{fed[name]}"), corpus)
                    fed[name] += 1
                    if trouble := run_one(feed, data):
                        keep(name, data, trouble, broken[name])
    for name in args.jobs:
        print(f"{name:12} {fed[name]:8,} inputs, {len(broken[name])} kinds of trouble")
    sys.exit(1 if any(broken.values()) else 0)


def keep(job: str, data: bytes, trouble: str, known: set[str]) -> None:
    """Write an input down, the first of its kind: the same words are the same trouble."""
    kind = trouble[:60]
    if kind in known:
        return
    known.add(kind)
    folder = FOUND / job
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / blake2b(data, digest_size=8).hexdigest()
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(f"{trouble}\n")
    print(f"{job}: {trouble} ({path})", flush=True)


if __name__ == "__main__":
    main()
