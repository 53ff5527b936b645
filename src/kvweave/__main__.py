"""`python -m kvweave` is the command line."""

from kvweave.cli import main

main()
