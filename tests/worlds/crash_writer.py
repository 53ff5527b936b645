"""A writer to be killed: imports once, then forks a child per order, so that a trial costs
milliseconds. Orders come on stdin as `folder first_number`; each child's pid goes to stdout."""

import os
import sys
from pathlib import Path

from kvweave.kv.store import KVStore
from worlds.kv import make_chunk, make_config


def write_until_killed(root: Path, first: int) -> None:
    """Save chunk after chunk; note each one that the store acknowledged."""
    store = KVStore(make_config(root, host_chunks=2, disk_chunks=10_000))
    notes = os.open(root / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(1, b"ready\n")  # in one piece: two processes speak here
    for number in range(first, first + 1000, 2):
        tickets = [(n, store.save(make_chunk(n), wait_s=10)) for n in (number, number + 1)]
        for n, ticket in tickets:
            if ticket.wait(10):
                os.write(notes, f"{n}\n".encode())


def main() -> None:
    for order in sys.stdin:
        folder, first = order.split()
        child = os.fork()
        if child == 0:
            write_until_killed(Path(folder), int(first))
            os._exit(0)
        os.write(1, f"{child}\n".encode())
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main()
