"""What bench/product.py says of its requests: percentiles, speed-ups, and what fired."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from product_parts.asking import SOURCES, Event, Reply

Metrics = Mapping[str, float]  # series of /metrics, labels and all
LEAST_MS = 5.0  # a documents' share below this is not told from noise


class Asked(NamedTuple):
    """One request as one of the servers answered it."""

    workload: str
    group: str  # what it is measured with
    arm: str  # which server: default, full, prefix, vllm or llamacpp
    step: int
    reply: Reply


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the nearest two."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def cells(asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Per workload, group and arm: time to first token, and tokens by where they came from."""
    keys = list(dict.fromkeys((a.workload, a.group, a.arm) for a in asked))
    return [
        _cell(key, [a.reply for a in asked if (a.workload, a.group, a.arm) == key]) for key in keys
    ]


def _cell(key: tuple[str, str, str], replies: Sequence[Reply]) -> dict[str, Any]:
    workload, group, arm = key
    ttft = [reply.ttft_ms for reply in replies]
    told = [reply.tokens for reply in replies if reply.tokens]
    return {
        "workload": workload,
        "group": group,
        "arm": arm,
        "requests": len(replies),
        "ttft_p50_ms": round(percentile(ttft, 50), 1),
        "ttft_p95_ms": round(percentile(ttft, 95), 1),
        "ttft_mean_ms": round(statistics.mean(ttft), 1),
        "total_p50_ms": round(percentile([reply.total_ms for reply in replies], 50), 1),
        "prompt_tokens": round(statistics.mean(reply.prompt_tokens for reply in replies)),
        "tokens": {name: sum(t[name] for t in told) for name in SOURCES} if told else None,
    }


def p50(asked: Iterable[Asked], group: str, arm: str) -> float | None:
    """Of the time to first token; None where nothing was asked."""
    ttft = [a.reply.ttft_ms for a in asked if (a.group, a.arm) == (group, arm)]
    return percentile(ttft, 50) if ttft else None


def speedup(asked: Sequence[Asked], group: str, over: str = "full") -> float | None:
    """p50 of another arm ÷ p50 of the default one."""
    theirs, ours = p50(asked, group, over), p50(asked, group, "default")
    return None if theirs is None or ours is None else round(theirs / ours, 3)


def documents_speedup(asked: Sequence[Asked], over: tuple[str, str]) -> float | None:
    """How much faster the documents' share of a first token is at the second ask.

    The share is what is left when the question by itself is taken off, by medians; `over` is the
    group and the arm to compare with. A share of less than LEAST_MS counts as that.
    """
    alone, second = p50(asked, "alone", "default"), p50(asked, "second", "default")
    theirs, their_alone = p50(asked, *over), p50(asked, "alone", over[1])
    if alone is None or second is None or theirs is None or their_alone is None:
        return None
    return round((theirs - their_alone) / max(second - alone, LEAST_MS), 3)


def over_full(asked: Sequence[Asked], groups: Iterable[str]) -> dict[str, float]:
    """By group, p50 of the default arm ÷ p50 of full prefill; those that were asked."""
    found = {group: speedup(asked, group) for group in groups}
    return {group: round(1 / value, 3) for group, value in found.items() if value}


def answer_speedups(asked: Sequence[Asked], groups: Iterable[str]) -> dict[str, float]:
    """By group, the median over its requests of how long the whole answer took without copying ÷
    with it; those that were asked both ways."""
    total = {(a.group, a.step, a.arm): a.reply.total_ms for a in asked}
    found = {}
    for group in groups:
        steps = [step for (name, step, arm) in total if (name, arm) == (group, "plain")]
        pairs = [total[group, i, "plain"] / total[group, i, "default"] for i in steps]
        if pairs:
            found[group] = round(statistics.median(pairs), 3)
    return found


def same_answers(asked: Sequence[Asked]) -> dict[str, float]:
    """By group, the share of requests that the default arm and full prefill answered alike."""
    texts: dict[tuple[str, int, str], str] = {(a.group, a.step, a.arm): a.reply.text for a in asked}
    found: dict[str, list[bool]] = {}
    for (group, step, arm), text in texts.items():
        if arm == "default" and (group, step, "full") in texts:
            found.setdefault(group, []).append(text == texts[group, step, "full"])
    return {group: round(statistics.mean(alike), 3) for group, alike in found.items()}


class Mechanism(NamedTuple):
    """What should have fired, and how that shows."""

    name: str
    series: str  # of /metrics, a pattern of the whole series: their sum must grow
    expected: tuple[str, ...]  # in these workloads
    everywhere: bool  # in all of them, not only in one
    seen: Callable[[Event], float]  # the same from an answer's explain block
    # why a request did without, by its explain block; None: it does not say, "": it has no say
    refused: Callable[[Event], str | None] = lambda _: None


def grown(series: str, before: Metrics, after: Metrics) -> float | None:
    """How much the matching series grew together; None: the server has none."""
    names = [name for name in after if re.fullmatch(series, name)]
    if not names:
        return None
    return sum(after[name] - before.get(name, 0.0) for name in names)


def judge(
    mechanism: Mechanism,
    counted: Mapping[str, tuple[Metrics, Metrics]],
    asked: Sequence[Asked],
) -> dict[str, Any]:
    """Whether a mechanism fired where it was expected; `counted` has /metrics before and after, by
    workload. `fired` is None where the server has no such counter. `refused` are the reasons where
    every answer of the workloads that has a say gives one: then it was right not to fire."""
    by_counter = {name: grown(mechanism.series, *pair) for name, pair in counted.items()}
    ran = [name for name in mechanism.expected if name in counted]
    grew = [by_counter[name] for name in ran]
    fired: bool | None = None
    if grew and all(value is not None for value in grew):
        hits = [bool(value and value > 0) for value in grew]
        fired = all(hits) if mechanism.everywhere else any(hits)
    by_explain = dict.fromkeys(counted, 0.0)
    reasons: list[str | None] = []
    for one in asked:
        if one.arm == "default" and one.workload in by_explain and one.reply.explain:
            by_explain[one.workload] += mechanism.seen(one.reply.explain)
            if one.workload in ran:
                reasons.append(mechanism.refused(one.reply.explain))
    refused = [] if None in reasons else sorted({reason for reason in reasons if reason})
    return {
        "mechanism": mechanism.name,
        "counter": mechanism.series,
        "expected": list(mechanism.expected),
        "fired": fired,
        "refused": [] if fired else refused,
        "by_counter": by_counter,
        "by_explain": by_explain,
    }
