"""`kvweave …` whose device fails when a test wants it to, until the process ends.

    python -m worlds.failing_server FOLDER ARGUMENTS…

While FOLDER/fault is there, the next forward pass is the last one of its process: all that follow
fail too, as those of a CUDA device do. FOLDER/slow has the seconds that every pass takes longer.
FOLDER/starts has a line with the id of every process that loaded weights. FOLDER/broken_start: the
weights do not load.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import kvweave.model.load as load
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows

WORDS = "CUDA error: an illegal memory access was encountered"


def _fail_by(folder: Path) -> None:
    forward, weights, is_lost = Decoder.forward, load.load_weights, False

    def failing(self: Decoder, batch: Sequence[Rows]) -> Tensor:
        nonlocal is_lost
        if (folder / "slow").exists():
            time.sleep(float((folder / "slow").read_text() or 0))
        is_lost = is_lost or (folder / "fault").exists()
        if is_lost:
            raise RuntimeError(WORDS)
        return forward(self, batch)

    def loading(*args: Any, **kwargs: Any) -> Any:
        with (folder / "starts").open("a") as starts:
            starts.write(f"{os.getpid()}\n")
        if (folder / "broken_start").exists():
            raise RuntimeError(WORDS)
        return weights(*args, **kwargs)

    Decoder.forward = failing  # type: ignore[method-assign]
    load.load_weights = loading


if __name__ == "__main__":
    _fail_by(Path(sys.argv[1]))
    sys.argv = ["kvweave", *sys.argv[2:]]
    from kvweave.__main__ import main

    main()
