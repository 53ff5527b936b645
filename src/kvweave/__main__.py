"""`python -m kvweave` and `kvweave` are the command line."""

import os
import sys


def main() -> None:
    """Ctrl-C is quiet from the first import on; see cli/interrupts.py for the rest."""
    try:
        from kvweave.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("kvweave: interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # half imported modules need not be ended in order
    run()


if __name__ == "__main__":
    main()
