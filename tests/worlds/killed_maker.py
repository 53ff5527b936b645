"""Makes chunk KV in the background until it is killed: python killed_maker.py KB MODEL WRITES"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvweave.app.library.library_kv import BackgroundKV, KVOptions
from kvweave.app.library.runtime import ModelRuntime
from kvweave.kv.format.header import Buffer
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.tiers.disk import DiskTier
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import open_kb
from worlds.weaves import library_of


def main(folder: Path, model: Path, num_writes: int) -> None:
    """SIGKILL in the middle of a write: behind the bytes of `num_writes`, before the next."""
    write, written = DiskTier.write, 0

    def killed(self: DiskTier, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        nonlocal written
        if written == num_writes:
            os.kill(os.getpid(), signal.SIGKILL)
        written += 1
        return write(self, key, parts)

    DiskTier.write = killed  # type: ignore[method-assign]
    runtime = ModelRuntime(load_decoder(model, device="cpu"), Tokenizer(model), "tiny")
    kb = open_kb(folder, runtime.tokenizer, chunk_tokens=256)
    library = library_of(kb, runtime, KVOptions("isolated", background=BackgroundKV()))
    library.start()
    library.maker.wait(120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
