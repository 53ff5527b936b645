"""`kvweave audit`: what audits of a knowledge base's fused answers found. Loads no model."""

import json
import math
from pathlib import Path
from typing import Any

import click

from kvweave.cli.knowledge_bases import check_knowledge_base
from kvweave.cli.options import json_option, kb_option
from kvweave.errors import CorpusError


@click.command("audit")
@kb_option
@json_option
@click.option("--forget", is_flag=True, help="Forget all of it: the gate is calibration's again.")
def command(kb_folder: Path, as_json: bool, forget: bool) -> None:
    """Show what audits of fused answers found, and what the gate made of it."""
    check_knowledge_base(kb_folder)
    from kvweave.app.audit.audit_log import FILE

    path = kb_folder / FILE
    entries = _read(path, forget=forget)
    if forget:
        path.unlink(missing_ok=True)
        click.echo(f"forgot the audits of {kb_folder}", err=True)
        return
    told = {"kb": str(kb_folder), "audits": [_document(entry) for entry in entries]}
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    if not entries:
        click.echo(
            "no answer was audited yet; a server, or a Weave in Python, audits a share of its "
            "fused answers when it is idle"
        )
        return
    for each in told["audits"]:
        _show(each)  # type: ignore[arg-type]


def _read(path: Path, *, forget: bool) -> list[dict[str, Any]]:
    from kvweave.app.audit.audit_log import read_entries

    try:
        return read_entries(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if forget:
            return []
        raise CorpusError(
            f"{path} cannot be read: {error}; `kvweave audit --forget` starts anew"
        ) from error


def _document(entry: dict[str, Any]) -> dict[str, Any]:
    from kvweave.app.audit.audit_log import AuditFigures

    cells = [
        {
            "strategy": cell["strategy"],
            "ratio": cell["ratio"],
            "total": cell["total"],
            **AuditFigures.from_answers(cell["kl"], [bool(f) for f in cell["flips"]]).document(),
        }
        for cell in sorted(entry["cells"], key=lambda cell: (cell["strategy"], cell["ratio"]))
    ]
    about = {name: entry[name] for name in ("model", "encoding")}
    return {**about, "cells": cells, "gate": entry["gate"]}


def _show(told: dict[str, Any]) -> None:
    from kvweave.cli.tables import make_table, table_console

    rows = [
        (
            cell["strategy"],
            f"{cell['ratio']:g}",
            f"{cell['answers']:,}",
            _nats(cell["kl"]),
            f"{_nats(cell['kl_low'])} … {_nats(cell['kl_high'])}",
            str(cell["flips"]),
            _gate(cell, told["gate"]),
        )
        for cell in told["cells"]
    ]
    headings = ("strategy", "ratio", "answers", "KL", "95 %", "flips", "gate")
    console = table_console()
    console.print(
        f"model {told['model'][:12]}, chunk KV {told['encoding']}; KL in nats per token",
        style="dim",
        soft_wrap=True,
    )
    console.print(make_table(headings, rows, prose=("gate",)))


def _nats(value: float | None) -> str:
    return "?" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _gate(cell: dict[str, Any], moves: list[dict[str, Any]]) -> str:
    """What was made of one strategy and ratio, by bound."""
    words = []
    for move in moves:
        if move["strategy"] != cell["strategy"]:
            continue
        calibrated, ratio = move["calibrated"], move["ratio"]
        taken = "refused" if ratio is None else f"{ratio:g} taken"
        if cell["ratio"] in (calibrated, ratio):
            moved = f", moved {move['moves']} times" if move["moves"] > 1 else ""
            words.append(
                f"{taken} where calibration allows {calibrated:g} (bound {move['bound']:g}{moved})"
            )
    return "; ".join(words) or "as calibrated"
