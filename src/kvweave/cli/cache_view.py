"""How `kvweave cache` shows things: tables, sizes, ages."""

import time
from collections.abc import Iterator
from typing import Any


def show_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*("–" if cell is None else str(cell) for cell in row))
    Console().print(table)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.1f} MiB"


def ago(written_s: float) -> str:
    elapsed_s = max(0.0, time.time() - written_s)
    for unit, seconds in _units():
        if elapsed_s >= seconds:
            return f"{elapsed_s / seconds:.0f} {unit} ago"
    return "now"


def _units() -> Iterator[tuple[str, int]]:
    yield from (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
