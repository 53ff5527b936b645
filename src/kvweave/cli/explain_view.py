"""An explain record as coloured text: which tokens were reused, recomputed or computed."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvweave.reasons import MISSES, Reason

if TYPE_CHECKING:
    from kvweave.fuse.record import FuseRecord

COLOURS = {"exact": "green", "reused": "blue", "recomputed": "yellow", "computed": "white"}
MARKS = {"exact": "=", "reused": ".", "recomputed": "#", "computed": "+"}  # where no colour is


def show(record: "FuseRecord", pieces: Sequence[str], *, colour: bool) -> str:
    """The prompt's text, token by token in the colour of its state, with a legend and figures.

    `pieces` is the text of each token.
    """
    why = [] if record.why is None else [f"no more is reused: {record.why}"]
    lines = [_legend(record, colour), *why, ""]
    text = []
    for state, start, end in record.runs():
        part = "".join(pieces[start:end])
        mark = MARKS[str(state)]
        text.append(
            click.style(part, fg=COLOURS[str(state)], bold=str(state) == "recomputed")
            if colour
            else f"[{mark}{part}{mark}]"
        )
    lines += ["".join(text), "", *_chunk_lines(record), _stage_line(record)]
    return "\n".join(lines)


def as_document(record: "FuseRecord") -> dict[str, Any]:
    """The record as JSON: states run-length encoded."""
    return {
        "strategy": record.strategy,
        "ratio": record.ratio,
        "why": record.why,
        "way": record.way,
        "encoding": record.encoding,
        "tokens": record.counts,
        "work": round(record.work, 4),
        "loaded_bytes": record.loaded_bytes,
        "left_out": record.left_out,
        "chunks": [
            {
                "start": chunk.start,
                "tokens": chunk.num_tokens,
                "state": str(chunk.state),
                "recomputed": chunk.recomputed,
                "tier": chunk.tier,
                "why": chunk.why,
            }
            for chunk in record.chunks
        ],
        "states": [[str(state), start, end] for state, start, end in record.runs()],
        "stages_ms": {
            "retrieve": round(record.stages.retrieve, 1),
            "load": round(record.stages.load, 1),
            "select": round(record.stages.select, 1),
            "compute": round(record.stages.compute, 1),
        },
    }


def missing_line(record: "FuseRecord", way_out: str) -> str | None:
    """One line if stored KV was wanted and not there; None if there is nothing to complain of.

    What a strategy does not ask for and what a plan computes of its own accord is no complaint.
    `way_out` is the command that stores chunk KV.
    """
    found = Counter(chunk.why for chunk in record.chunks if chunk.why in MISSES)
    if not found:
        return None
    total, all_chunks = found.total(), len(record.chunks)
    reasons = [f"{count} {why}" for why, count in sorted(found.items(), key=str)]
    why = ", ".join(reasons) if len(found) > 1 else next(iter(found))
    noun, verb = "chunk" if all_chunks == 1 else "chunks", "was" if total == 1 else "were"
    said = f"{total} of {all_chunks} {noun} had no stored KV ({why}) and {verb} computed"
    # the others: mend the tier
    can_store = found.keys() & {Reason.ABSENT, Reason.CORRUPT}
    return f"{said}; `{way_out}` stores it" if can_store else said


def _legend(record: "FuseRecord", colour: bool) -> str:
    counts, total = record.counts, len(record.states)
    parts = []
    for name, count in counts.items():
        words = f"{name} {count:,} ({count / total:.0%})"
        parts.append(click.style(words, fg=COLOURS[name]) if colour else f"{MARKS[name]} {words}")
    ratio = f" at {record.ratio:g}" if record.ratio else ""
    return f"{record.strategy}{ratio}, {record.encoding} chunk KV: " + " · ".join(parts)


def _chunk_lines(record: "FuseRecord") -> list[str]:
    lines = []
    for i, chunk in enumerate(record.chunks, 1):
        told = f"chunk {i}: {chunk.num_tokens} tokens {chunk.state}"
        if chunk.recomputed:
            told += f", {chunk.recomputed} recomputed"
        if chunk.tier:
            told += f", from {chunk.tier}"
        if chunk.why:
            told += f" ({chunk.why})"
        lines.append(told)
    return lines


def _stage_line(record: "FuseRecord") -> str:
    s = record.stages
    loaded = ", ".join(f"{size / 1e6:.1f} MB from {t}" for t, size in record.loaded_bytes.items())
    return (
        f"retrieve {s.retrieve:.0f} ms · load {s.load:.0f} ms · select {s.select:.0f} ms · "
        f"compute {s.compute:.0f} ms · {record.work:.0%} of the rows of a full prefill"
        + (f" · {loaded}" if loaded else "")
        + (f" · {record.way}" if record.way else "")
    )
