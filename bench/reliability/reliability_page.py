"""docs/reliability.md out of the results of bench/fault_matrix.py, and the sums over its parts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reliability.fault_rules import KINDS, OPS

Json = Mapping[str, Any]

TIERS = ("host", "disk", "valkey", "s3", "engine")
ON_DEVICE = tuple(
    f"device, {what}" for what in ("shared chunks", "copied chunks", "exact KV", "engine")
)


def latest(runs: Iterable[Json]) -> dict[str, Any]:
    """Each part as its last run has it; faults, kills and power cuts of all runs together, faults
    with the commit they were put in at, and what a person has noted about their runs."""
    found: dict[str, Any] = {}
    for run in runs:
        where = {"commit": run["commit"], "device": run["device"]}
        if "faults" in run:
            rows = [{**row, "commit": run["commit"]} for row in run["faults"]["rows"]]
            notes = [f"{run['commit']}: {run['note']}"] if "note" in run else []
            run = {**run, "faults": {**run["faults"], "rows": rows, "notes": notes}}
        for part in ("tenants", "bombs"):
            if part in run:
                found[part] = {**run[part], **where}
        for part in ("faults", "kills", "power"):
            if part in run:
                before = found.get(part, {"commit": "", "device": ""})
                both = {
                    name: _listed(*before[name].split(sep), run[name], sep=sep)
                    for name, sep in (("commit", ", "), ("device", "; "))
                }
                found[part] = {**_together(before, run[part]), **both}
    return found


def _listed(*names: str, sep: str) -> str:
    """Each name once, in the order of their coming."""
    return sep.join(dict.fromkeys(filter(None, names)))


def _together(before: Json, more: Json) -> dict[str, Any]:
    """Two runs of one part as one: lists behind each other, numbers added."""
    found = dict(before)
    for name, value in more.items():
        match value:
            case list():
                found[name] = [*before.get(name, []), *value]
            case dict():
                found[name] = dict(Counter(before.get(name, {})) + Counter(value))
            case int() | float() if name != "seed":
                found[name] = before.get(name, 0) + value
    return found


def summary(runs: Iterable[Json]) -> dict[str, Any]:
    """What a reader looks at first: how much was tried, and what went wrong."""
    parts = latest(runs)
    rows = parts.get("faults", {}).get("rows", [])
    crashes = [parts.get("kills", {}), parts.get("power", {})]
    bombs = parts.get("bombs", {})
    return {
        "faults": len(rows),
        "kills": crashes[0].get("kills", 0),
        "power_cuts": crashes[1].get("power_cuts", 0),
        "wrong_answers": sum(is_wrong(row) for row in rows)
        + sum(part.get("wrong_answers", 0) for part in crashes),
        "lost_documents": len(parts.get("faults", {}).get("lost", []))
        + sum(part.get("lost_documents", 0) for part in crashes),
        "stuck_requests": sum(is_stuck(row) for row in rows),
        "tenant_leaks": parts.get("tenants", {}).get("tenant_leaks"),
        "not_as_expected": sum(bool(row["problems"]) for row in rows),
        "not_as_expected_now": sum(
            bool(row["problems"]) for last in newest(rows).values() for row in last
        ),
        "healthz_worst_ms": bombs.get("healthz_worst_ms"),
        "control_worst_ms": bombs.get("control_worst_ms"),
        "sigterm_worst_s": bombs.get("sigterm_worst_s"),
        "p99_extra_s": {kind: p99(extra(rows, kind)) for kind in kinds_of(rows)},
    }


def newest(rows: Sequence[Json]) -> dict[tuple[str, str, str], list[Json]]:
    """Each fault as it went at the last commit that it was put in at, with all its seeds."""
    found: dict[tuple[str, str, str], list[Json]] = {}
    for row in rows:
        last = found.setdefault(which_fault(row), [])
        if last and last[-1]["commit"] != row["commit"]:
            last.clear()
        last.append(row)
    return found


def which_fault(row: Json) -> tuple[str, str, str]:
    return row["tier"], row["op"], row["kind"]


def is_wrong(row: Json) -> bool:
    return any("wrong" in words for words in row["problems"])


def is_stuck(row: Json) -> bool:
    return row["status"] == -1 or any("stuck" in words for words in row["problems"])


def kinds_of(rows: Sequence[Json]) -> list[str]:
    """In the order of the plan, those of the engine behind."""
    seen = dict.fromkeys(row["kind"] for row in rows)
    return [kind for kind in KINDS if kind in seen] + [kind for kind in seen if kind not in KINDS]


def extra(rows: Sequence[Json], kind: str) -> list[float]:
    return sorted(row["extra_s"] for row in rows if row["kind"] == kind)


def p99(ordered: Sequence[float]) -> float:
    """The value that one of a hundred exceeds; of fewer than a hundred the largest."""
    return round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3)


def page_of(results: Json, on_device: Json | None = None, restarts: Sequence[Json] = ()) -> str:
    """The whole page; `on_device` are the results of a GPU, `restarts` those of bench/restart.py on
    each machine."""
    device_runs = [] if on_device is None else on_device["runs"]
    parts = latest(results["runs"])
    total = summary([*results["runs"], *device_runs])
    lines = [*_filled(HEAD, {}), *_sums(total), *_faults(parts.get("faults"))]
    lines += [*_device_faults(latest(device_runs).get("faults")), *_crashes(parts)]
    lines += _restarts(restarts)
    lines += [*_tenants(parts.get("tenants")), *_bombs(parts.get("bombs"))]
    return "\n".join(lines).rstrip() + "\n"


HEAD = """
# Reliability: what was broken on purpose, and what became of it

Made by `python bench/fault_matrix.py --page` from `bench/results/fault_matrix-cpu.json` and
`fault_matrix-h200.json`; a test holds it to those files. Every server is `kvweave serve` as a
process, asked over HTTP; faults of a device are put into the engine itself. A fault counts if a
proxy or a hook saw it strike. What the server promises is in [security.md](security.md) and
[store.md](store.md). All but the device's ran on a machine of two cores beside other work: times
are rough.
"""
FAULTS = """
## Faults

Commit {commit}, {device}. Right is: the answer of an undisturbed server (in full, or from stored
KV), or an error of one line; a bound on the time; a counter or a reason; and the tier in use again
without a restart. Numbers are faults that struck, by tier and by what was being done:
"""
LEFT_OUT = """
Device memory is a GPU's, and has a part of its own below. Host memory cannot be truncated, changed
or forbidden from outside a process: its bytes are checked on the way in and trusted from then on. A
hanging host is a process that is stopped and goes on. Slow, hanging, failing and full disks are
hooks at the edge to the system (`bench/reliability/fault_hooks.py`); the other faults of a disk are
done to its files, those of Valkey and S3 to their traffic.

Seconds that a request took longer, and seconds until the tier was in use again:
"""
RESTARTS = """
## Restarts

What `bench/restart.py` found: clients ask without a pause and never again by themselves, half of
them in streams; then the device is lost for good, or the server's process is killed. *Under way*
are requests that were there at that moment: some were answered just before it took effect.
"""
WHY_RESTARTS = """
Why it is made so:

- A device that failed stays failed within its process, so another process must compute. That one
  needs the device's memory, so the old one must be gone: a third must hold the connections.
- That third one, the keeper, is out of the way while a server serves: both have the same listening
  socket, and the server takes its connections itself. A connection whose reply has not begun passes
  as a file descriptor with the bytes that came on it, and is read again. A proxy would have cost
  every request something for the sake of the few.
- Nothing can be saved of a process that is killed: its connections end with it. A proxy could, for
  the price above. Clients and gateways that try again cover that, and the line that says so is on
  stderr.
- One failure is enough to suspect a device, and its client waits until three trial requests told:
  otherwise the requests that found the fault would be the ones that are lost.
- A request is begun again once. Whatever a request does to a device, it does not do it to all that
  follow.
- Exact KV passes in memory without a name that the keeper holds: no file to remove, none that
  outlives the command, none that another model could read. What deletions the old process had heard
  of passes along, so that what was deleted since is forgotten.
"""
DEVICE_FAULTS = """
## Faults of a device

Commit {commit}, {device}. The machine has bare PyTorch: no server, the engine itself is asked, and
what watches it in a server watches it here (`serve/workers/engine_watch.py`). The model has random
weights; what is compared is what it thinks of every token. Right is, besides what it is above: a
request that is being answered beside it is answered, and afterwards the engine's books balance, all
pages and leases counted. {real} of the faults are done to the device itself: a tensor holds the
rest of its memory, pages and files are changed, CUDA reports an error until the process ends. The
others are hooks where the device is given orders (`bench/reliability/device_hooks.py`); one that is
slow spins in a kernel.
"""
LEFT_OUT_ON_DEVICE = """
A lookup on a device is a look into the books; what goes wrong is the copy of a page that a prefix
ends in. A save is exact KV that goes to host memory in idle time, an evict the same under pressure.
A wrong number in device memory is not noticed, as nothing there has a check sum: that is left to
the device's own error correction. What is no number is: the request that reads it fails, and what
it read is dropped. An engine whose device hangs or is lost is given up, and the process ends
({restarted} of these faults; here another engine, or another process, has the device again); all
others go on without a restart.

Seconds that a request took longer, and seconds until the same was answered rightly:
"""
CONTROL = """
The judge: answers are told apart from {tolerance} on (0: the same, 1.4: unrelated). The same
question asked again was {again} off at most, another one {other} at least, and one layer of values
set to 0 was {zeroed} off.
"""
TENANTS = """
## Tenants

Commit {commit}. What one tenant tried to learn of another, or to do to it:
"""
TIMING = """
Timing: {texts} texts, half of them cached by another tenant. Medians {cached_ms} ms (cached there)
and {fresh_ms} ms (nowhere); p = {p} that nothing differs. The control, on a tenant's own texts:
{control_cached_ms} and {control_fresh_ms} ms, p = {control_p}.
"""
BOMBS = """
## Bombs

Commit {commit}. `/healthz` asked from another process while each is sent; left alone, the slowest
was {healthz_quiet_ms} ms. The control is a bare HTTP server in a process of its own, asked in turn
with it: what the machine makes anybody wait. SIGTERM comes a second after the bomb.
"""


def _filled(text: str, values: Json) -> list[str]:
    """Lines of a text with `{names}` in it, and one that is empty."""
    return [*text.strip("\n").format_map(values).splitlines(), ""]


def _sums(total: Json) -> list[str]:
    def shown(value: Any, unit: str = "") -> str:
        return "not run" if value is None else f"{value:,}{unit}"

    return [
        "| | |",
        "|---|---|",
        f"| faults put in | {shown(total['faults'])} |",
        f"| kills (`kill -9` under load) | {shown(total['kills'])} |",
        f"| power cuts | {shown(total['power_cuts'])} |",
        f"| wrong answers | {shown(total['wrong_answers'])} |",
        f"| acknowledged documents lost | {shown(total['lost_documents'])} |",
        f"| requests stuck | {shown(total['stuck_requests'])} |",
        f"| leaks between tenants | {shown(total['tenant_leaks'])} |",
        f"| faults with anything not as it should be | {shown(total['not_as_expected'])} |",
        f"| … when last put in | {shown(total['not_as_expected_now'])} |",
        f"| slowest `/healthz` under a bomb | {shown(total['healthz_worst_ms'], ' ms')} |",
        f"| slowest reply of a bare server beside it | {shown(total['control_worst_ms'], ' ms')} |",
        f"| slowest end after SIGTERM under a bomb | {shown(total['sigterm_worst_s'], ' s')} |",
        "",
    ]


def _faults(part: Json | None) -> list[str]:
    if part is None:
        return []
    lines = [*_filled(FAULTS, part), *_by_tier(part["rows"], TIERS), *_filled(LEFT_OUT, {})]
    return [*lines, *_times_and_problems(part, "`/metrics`")]


def _device_faults(part: Json | None) -> list[str]:
    if part is None:
        return []
    rows, controls = part["rows"], part["control"]
    numbers = {
        "real": sum(row["real"] for row in rows),
        "restarted": sum(row["restarted"] for row in rows),
        "tolerance": controls[0]["tolerance"],
        "again": max(each["same_question_asked_again"] for each in controls),
        "other": min(each["nearest_other_question"] for each in controls),
        "zeroed": min(each["one_layer_of_values_zeroed"] for each in controls),
    }
    lines = [*_filled(DEVICE_FAULTS, {**part, **numbers}), *_by_tier(rows, ON_DEVICE)]
    left = [tier for tier in ON_DEVICE if not any(row["tier"] == tier for row in rows)]
    if left:
        lines += [f"Not put in yet: {'; '.join(left)}.", ""]
    lines += _filled(LEFT_OUT_ON_DEVICE, numbers)
    lines += _times_and_problems(part, "the engine's numbers and its list of evictions")
    return [*lines, *_filled(CONTROL, numbers)]


def _by_tier(rows: Sequence[Json], tiers: Iterable[str]) -> list[str]:
    lines = [
        "| tier | " + " | ".join(OPS) + " | other | all |",
        "|---|" + "---|" * (len(OPS) + 2),
    ]
    for tier in tiers:
        own = [row for row in rows if row["tier"] == tier]
        by_op = [sum(row["op"] == op for row in own) for op in OPS]
        cells = [*by_op, len(own) - sum(by_op), len(own)]
        lines.append(f"| {tier} | " + " | ".join(str(n) if n else "–" for n in cells) + " |")
    return [*lines, ""]


def _times_and_problems(part: Json, told_in: str) -> list[str]:
    rows = part["rows"]
    lines = [
        "| what went wrong | faults | longer: median | p99 | longest | back: median | longest |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds_of(rows):
        more = extra(rows, kind)
        back = sorted(
            row["recovered_s"]
            for row in rows
            if row["kind"] == kind and row["recovered_s"] is not None
        )
        cells = [f"{_middle(more):.2f}", f"{p99(more):.2f}", f"{more[-1]:.2f}"]
        cells += [f"{_middle(back):.1f}", f"{back[-1]:.1f}"] if back else ["–", "–"]
        lines.append(f"| {kind} | {len(more)} | " + " | ".join(cells) + " |")
    told: dict[str, int] = {}
    for row in rows:
        for name in row["counters"]:
            told[name] = told.get(name, 0) + 1
    lines += ["", f"What told of them in {told_in}, and for how many faults:", ""]
    most = sorted(told.items(), key=lambda pair: (-pair[1], pair[0]))
    lines += [f"- `{name}`: {count}" for name, count in most[:24]]
    wrong = [row for row in rows if row["problems"]]
    if wrong:
        lines += [
            "",
            "Not as it should be, and what the same fault did when it was last put in:",
            "",
            "| tier | doing | what went wrong | commit, seed | what was found | last |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        last = newest(rows)
        lines += [
            f"| {row['tier']} | {row['op']} | {row['kind']} | {row['commit']}, {row['seed']} "
            f"| {_cell(row)} | {_since(row, last[which_fault(row)])} |"
            for row in wrong
        ]
    if part.get("notes"):
        lines += ["", "About these runs:", "", *(f"- {note}" for note in part["notes"])]
    return [*lines, ""]


def _since(row: Json, last: Sequence[Json]) -> str:
    """How a fault went at the last commit, told beside an earlier `row` of it."""
    if last[0]["commit"] == row["commit"]:
        return "this"
    is_well = not any(each["problems"] for each in last)
    return f"{'as it should be' if is_well else 'not as it should be'}, {last[0]['commit']}"


def _crashes(parts: Json) -> list[str]:
    lines: list[str] = []
    for name, title, field in (
        ("kills", "Kills", "kills"),
        ("power", "Power cuts", "power_cuts"),
    ):
        part = parts.get(name)
        if part is None:
            continue
        numbers = {
            key.replace("_", " "): value
            for key, value in part.items()
            if isinstance(value, int | float) and key not in ("seed", "took_s", field)
        }
        lines += [f"## {title}", "", f"Commit {part['commit']}. {part[field]:,} in all.", ""]
        lines += ["| | |", "|---|---|"]
        lines += [f"| {key} | {value:,} |" for key, value in numbers.items()]
        lines += [""]
        if part.get("failures"):
            lines += ["Not as it should be:", ""]
            lines += [f"- {_failure(failure)}" for failure in part["failures"]]
            lines += [""]
    return lines


def _restarts(results: Sequence[Json]) -> list[str]:
    """The last run of each way of each machine."""
    last: dict[tuple[str, str], Json] = {}
    for run in (run for each in results for run in each["runs"]):
        last[run["device"], run["restart"]["how"]] = run
    if not last:
        return []
    lines = [*_filled(RESTARTS, {})]
    lines += [
        "| commit | machine | lost | under way then | asked behind it | answers again after "
        "| longest wait | exact KV of prompts, before → right after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (device, how), run in last.items():
        row = run["restart"]
        shares = f"{row['exact_share_before']:.0%} → {row['exact_share_right_after']:.0%}"
        counts = [
            ", ".join(f"{count} {became}" for became, count in sorted(row[when].items()))
            for when in ("under_way", "asked_behind_it")
        ]
        cells = [run["commit"], device, {"kill": "the process"}.get(how, "the device"), *counts]
        cells += [f"{row['seconds_until_answers']:.1f} s", f"{row['longest_wait_s']:.1f} s"]
        lines.append(f"| {' | '.join(cells)} | {shares.replace('%', ' %')} |")
    return [*lines, "", *_filled(WHY_RESTARTS, {})]


def _tenants(part: Json | None) -> list[str]:
    if part is None:
        return []
    lines = [
        *_filled(TENANTS, part),
        "| about | what was tried | apart |",
        "|---|---|---|",
    ]
    lines += [
        f"| {r['about']} | {r['what']} | {'yes' if r['apart'] else 'NO'} |" for r in part["rows"]
    ]
    return [*lines, "", *_filled(TIMING, part["timing"])]


def _bombs(part: Json | None) -> list[str]:
    if part is None:
        return []
    lines = [
        *_filled(BOMBS, part),
        "| bomb | reply | `/healthz` median | p99 | slowest | control, slowest | SIGTERM to end |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['bomb']} | {row['status']} | {row['healthz_p50_ms']} ms "
        f"| {row['healthz_p99_ms']} ms | {row['healthz_max_ms']} ms | {row['control_max_ms']} ms "
        f"| {row['sigterm_s']} s |"
        for row in part["rows"]
    ]
    return [*lines, ""]


def _failure(failure: Json) -> str:
    at = ", ".join(f"{name} {value}" for name, value in failure.items() if name != "found")
    return f"{at}: {'; '.join(failure['found'])}"


def _middle(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) // 2]


def _cell(row: Json) -> str:
    """What was wrong, for a table."""
    return " ".join("; ".join(row["problems"]).split()).replace("|", "/")
