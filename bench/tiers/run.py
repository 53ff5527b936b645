"""How fast does chunk KV come back, how small does it get, and what does a codec cost?

Loads go through the store as a request would do them: acquire, load, wait for layer after layer,
every byte checked. The baseline in the same run is a plain `readinto` of the same files into one
reused buffer, unchecked, by one thread. `warm` has the files in the page cache; `cold` asks the
kernel to drop them first (posix_fadvise DONTNEED, after a sync), which drops them from this machine
but not from any cache below it. Chunks are synthetic, of SmolLM2's shape.

    python bench/tiers/run.py --data /path/on/the/disk/to/measure
"""

import argparse
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from rich.console import Console
from rich.table import Table

from common.results import device_words, finish, result_header
from kvweave.kv.format.codec import DTYPES
from kvweave.kv.tiers.config import StoreConfig
from tiers.codec_costs import bench_codecs, bench_layer0
from tiers.loads import bench_loads


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.data) as folder:
        loads = bench_loads(Path(folder), args)
    results = {"loads": loads, "codecs": bench_codecs(args), "layer0": bench_layer0(args)}
    show(results)
    config = {k: v for k, v in vars(args).items() if k not in ("data", "out")}
    finish(__doc__, {**result_header("tiers", "cpu"), "config": config, **results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder on the disk to measure (default: tmp)")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--chunks-per-request", type=int, default=8)
    parser.add_argument("--io-threads", type=int, default=StoreConfig().io_threads)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", help="whose layer 0 is recomputed")
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    return parser.parse_args()


def show(tables: dict[str, list[dict[str, object]]]) -> None:
    console = Console(width=110)
    for title, rows in tables.items():
        table = Table(title=f"{title}: {device_words()}", title_justify="left")
        for column in rows[0]:
            table.add_column(column, justify="right" if column != next(iter(rows[0])) else "left")
        for row in rows:
            table.add_row(*(str(cell) for cell in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
