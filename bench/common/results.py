"""How a bench reports: one JSON object as its last line, and a run in the file of its question.

A file under bench/results/ holds one question on one kind of device, with all runs, oldest first:

    {"question": "How …?", "runs": [{"date": …, "args": […], "bench": …, "commit": …, …}, …]}

A bench of several parts has fields of its own between the two, which sum them up. `date` is when
the run began. `stolen` is the share of the processor time wanted meanwhile that a virtual machine's
host gave to others: times of a run with much of it are rough, its slowest ones worthless. A person
may add a `note`: what a run was for.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.files import REPO

STARTED = datetime.now(UTC).isoformat(timespec="seconds")  # names the run of this process


def _processor_ticks() -> tuple[int, int]:
    """Stolen so far, and wanted: used or stolen. Both 0 where the system does not tell."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0, 0
    user, nice, system, _, _, irq, softirq, stolen = map(int, line.split()[1:9])
    return stolen, user + nice + system + irq + softirq + stolen


_AT_START = _processor_ticks()


def stolen_share() -> float:
    """Since this process began."""
    stolen, wanted = (now - then for now, then in zip(_processor_ticks(), _AT_START, strict=True))
    return round(stolen / max(1, wanted), 3)


Summary = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


def finish(
    question: str,
    result: Mapping[str, Any],
    out: Path | None = None,
    summary: Summary = lambda runs: {},
) -> None:
    """Print the last line of a bench; with `out`, save the run there too.

    `question` is the bench's docstring: its first line asks it. `summary` is that of `save_run`.
    """
    if out is not None:
        save_run(question, result, out, summary)
    print(json.dumps({**result, "stolen": stolen_share()}))


def save_run(
    question: str,
    result: Mapping[str, Any],
    out: Path,
    summary: Summary = lambda runs: {},
) -> None:
    """Add a run to `out`, which is made if there is none.

    Called again by the same process it replaces that run: a long bench saves as it goes. What
    `summary` says of all runs stands in front of them.
    """
    asked: dict[str, Any] = {"question": question.splitlines()[0], "runs": []}
    kept = read_results(out) if out.is_file() else asked
    runs = [run for run in kept["runs"] if run["date"] != STARTED]
    args = portable_args(sys.argv[1:])
    runs.append({"date": STARTED, "args": args, **result, "stolen": stolen_share()})
    write_results({"question": kept["question"], **summary(runs), "runs": runs}, out)


def portable_args(args: Sequence[str]) -> list[str]:
    """As anybody may type them: where the data lies is this machine's own."""
    return ["DATA" if i and args[i - 1] == "--data" else arg for i, arg in enumerate(args)]


def read_results(path: Path) -> dict[str, Any]:
    """A result file: `question`, and `runs`, oldest first."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write_results(results: Mapping[str, Any], out: Path) -> None:
    """Fields on a line each, elements of a long list too: readable, short in a diff."""
    runs = ",\n".join(_run_text(run) for run in results["runs"])
    front = [f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in results.items() if k != "runs"]
    text = f'{{\n{"".join(front)}"runs": [\n{runs}\n]\n}}\n'
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(out)


def _run_text(run: Mapping[str, Any]) -> str:
    fields = [f" {json.dumps(name)}: {_value_text(value, '  ')}" for name, value in run.items()]
    return "{\n" + ",\n".join(fields) + "\n}"


def _value_text(value: Any, indent: str) -> str:
    text = json.dumps(value)
    if isinstance(value, list) and len(text) > 200:
        elements = map(json.dumps, value)
        return f"[\n{indent}" + f",\n{indent}".join(elements) + f"\n{indent[:-1]}]"
    if isinstance(value, dict) and "rows" in value and len(text) > 4000:  # a part of a bench
        lines = (f"{json.dumps(k)}: {_value_text(v, indent + ' ')}" for k, v in value.items())
        return f"{{\n{indent}" + f",\n{indent}".join(lines) + f"\n{indent[:-1]}}}"
    return text


def result_header(bench: str, device: str) -> dict[str, Any]:
    """What a result says of where it came from."""
    import torch

    return {
        "bench": bench,
        "commit": commit(),
        "device": device_words(device),
        "torch": torch.__version__,
    }


def commit() -> str:
    """Short id of the commit that ran, with a + if the tree had changes.

    A machine that got a bare copy of the tree is told by BENCH_COMMIT.
    """
    if told := os.environ.get("BENCH_COMMIT"):
        return told
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if _git("status", "--porcelain", "-uno") else ""
    )


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPO), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def device_words(device: str = "cpu") -> str:
    """The machine in words, without its name."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    flags = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} CPU ({flags}), {torch.get_num_threads()} threads"


def cpu_device() -> str:
    return f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} CPU"


def versions(*names: str) -> dict[str, str]:
    """Of installed packages; one that is missing is left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
