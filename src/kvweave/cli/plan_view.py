"""A plan as text and as JSON: what is done, what else there was, what each would cost."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvweave.plan.loading_cost import Load
    from kvweave.plan.plan import Decision, Option, Plan


def plan_document(plan: "Plan") -> dict[str, Any]:
    """The plan as JSON."""
    return {
        "chosen": plan.chosen.name,
        "strategy": plan.strategy,
        "ratio": plan.chosen.ratio,
        "predicted_s": _round_seconds(plan.chosen.predicted_s),
        "ordered_by": plan.ordered_by,
        "options": [_option(option) for option in plan.options],
        "spans": [
            {
                "kind": str(span.kind),
                "start": span.start,
                "tokens": span.num_tokens,
                "chunk": span.chunk_id,
                "history": span.in_history,
                "tier": span.tier or None,
                "load_bytes": span.load_bytes,
                "reason": str(span.reason),
            }
            for span in plan.spans
        ],
    }


def decision_document(decision: "Decision") -> dict[str, Any]:
    """Return the document of a plan that was carried out, with how long it took."""
    judged = decision.judged
    return {
        **plan_document(decision.plan),
        "actual_s": _round_seconds(judged.actual_s),
        "error": round(judged.error, 4),
    }


def decision_line(decision: "Decision") -> str:
    """One line: which, why, and how good the prediction was."""
    plan, judged = decision.plan, decision.judged
    full = next(option for option in plan.options if option.name == "full")
    others = sorted({str(o.reason) for o in plan.options if o.predicted_s is None})
    told = [
        f"auto took {judged.option} ({plan.chosen.reason}): predicted {judged.predicted_s:.3f} s, "
        f"actual {judged.actual_s:.3f} s, full prefill priced {full.predicted_s:.3f} s",
        *([f"declined: {', '.join(others)}"] if others else []),
    ]
    return " · ".join(told)


def plan_line(plan: "Plan") -> str:
    """The plan in plain words: what is taken, how much of the prompt it computes, how long."""
    full, chosen = next(o for o in plan.options if o.name == "full"), plan.chosen
    line = f"{_name(chosen)}: {chosen.rows:,} of {full.rows:,} tokens computed"
    if chosen.predicted_s is not None and full.predicted_s is not None:
        line += f", about {chosen.predicted_s:.2f} s (all of them: {full.predicted_s:.2f} s)"
    return line


def declined_lines(plan: "Plan") -> list[str]:
    """Why the other strategies were not priced, those of one reason in one line."""
    declined: dict[str, list[str]] = {}
    for option in plan.options:
        if option.predicted_s is None:
            declined.setdefault(str(option.reason), []).append(option.name.removeprefix("fused "))
    return [f"{reason}: {', '.join(names)}" for reason, names in declined.items()]


def options_table(plan: "Plan") -> "Table":
    """The options that have a price, the cheapest first."""
    from kvweave.reasons import Reason

    plain = (Reason.CHEAPEST, Reason.DEARER)  # their order says it
    priced = [o for o in plan.options if o.predicted_s is not None]
    rows = [
        (
            f"{'→' if option == plan.chosen else ' '} {_name(option)}",
            _seconds(option),
            f"{option.rows:,}",
            f"{option.load_bytes / 1e6:.1f} MB" if option.load_bytes else "",
            _loading(option),
            "" if option.reason in plain else str(option.reason),
        )
        for option in sorted(priced, key=lambda o: o.expected_s)
    ]
    return _table_of_used_columns(("way", "seconds", "rows", "load", "loading", "why"), rows)


def _seconds(option: "Option") -> str:
    """Its price, and what close calls add to it on average."""
    again = f" + {option.again_s:.3f}" if option.again_s else ""
    return f"{option.predicted_s:.3f}{again}"


def spans_table(plan: "Plan") -> "Table":
    """What becomes of each part of the prompt."""
    rows, place = [], 0
    for span in plan.spans:
        part = "preamble" if span.start == 0 else "question"
        if span.in_history:
            part = "history"
        elif span.chunk_id is not None:
            place += 1
            part = f"chunk {place}"
        size = f"{span.load_bytes / 1e6:.1f} MB" if span.load_bytes else ""
        reason = str(span.reason)
        rows.append((part, f"{span.num_tokens:,}", str(span.kind), span.tier, size, reason))
    return _table_of_used_columns(("part", "tokens", "fate", "from", "load", "why"), rows)


def _table_of_used_columns(headings: "Sequence[str]", rows: "Sequence[Sequence[str]]") -> "Table":
    """A table of those columns in which something stands."""
    from kvweave.cli.tables import make_table

    used = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    return make_table(
        [headings[i] for i in used],
        [[row[i] for i in used] for row in rows],
        right=("tokens", "seconds", "rows", "load", "loading"),
        prose=("why",),
    )


def _option(option: "Option") -> dict[str, Any]:
    return {
        "name": option.name,
        "predicted_s": _round_seconds(option.predicted_s),
        "again_s": _round_seconds(option.again_s),
        "ratio": option.ratio,
        "rows": option.rows,
        "load_bytes": option.load_bytes,
        "load": None if option.load is None else _load(option.load),
        "reason": str(option.reason),
    }


def _load(load: "Load") -> dict[str, Any]:
    """What of a price is loading: seconds over a link, and the share of them that is paid."""
    return {
        "link": load.link,
        "seconds": _round_seconds(load.seconds),
        "share": round(load.share, 3),
    }


def _loading(option: "Option") -> str:
    """`0.130 s × 1.25`: the load by itself, and the share of it that the price holds."""
    load = option.load
    return "" if load is None else f"{load.seconds:.3f} s × {load.share:.2f}"


def _name(option: "Option") -> str:
    return option.name if option.ratio is None else f"{option.name} at {option.ratio:g}"


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
