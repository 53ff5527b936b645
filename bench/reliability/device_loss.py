"""A device that is really lost: an error that CUDA keeps reporting until the process ends.

    python -c "from reliability.device_loss import main; main()" lose|answer DEVICE FOLDER

One process answers, loses the device, and asks on under the server's own watch: everybody who waits
must hear of it, and the process ends with the code that the server ends with. A second one answers
again. Each prints a line of JSON. A GPU only: nothing else has such an error.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvweave.errors import KVWeaveError
from reliability.device_faults import LOOK_S, STUCK_S, DeviceLane
from reliability.device_hooks import DeviceHooks
from reliability.device_world import FULL, DeviceWorld, all_questions, of_kind, read

BROKEN_CODE = 70  # as cli/serve.py
BETWEEN_S = 0.3  # questions come one after another
LIMIT_S = 20.0  # within which the loss must be noticed


def main() -> None:
    what, device, folder = sys.argv[1:4]
    on = torch.device(device)
    world = DeviceWorld(on, Path(folder))
    lane = DeviceLane(world, DeviceHooks(on, world.spec.num_layers), shares=True)
    engine = lane.start()
    questions = all_questions()
    answers = [world.ask(engine, each, "t") for each in questions[:6]]
    found: dict[str, Any] = {"tokens": [each.tokens for each in answers]}
    if what == "answer":
        print(json.dumps(found), flush=True)
        return
    lane.watch()
    _break(on)
    began_s = time.monotonic()
    errors: list[BaseException | None] = []
    while not lane.broken and time.monotonic() < began_s + LIMIT_S:
        try:
            question = of_kind(questions, FULL, len(errors))
            ticket = engine.submit(world.request(question, "t"))
            errors.append(read(ticket, LIMIT_S).error)
        except KVWeaveError as error:  # closed by now
            errors.append(error)
        time.sleep(BETWEEN_S)
    found["noticed_s"] = round(time.monotonic() - began_s, 2) if lane.broken else None
    found["said"] = lane.broken
    found["errors"] = [
        "none" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:120]
        for error in errors
    ]
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(BROKEN_CODE if lane.broken else 1)


def _break(device: torch.device) -> None:
    """An index that is out of bounds, seen on the device: from now on every call reports it."""
    try:
        torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)].sum().item()
    except RuntimeError:
        return
    raise RuntimeError("the device took an index that is out of bounds")


class Loss(NamedTuple):
    """What the two processes said."""

    before: dict[str, Any]
    after: dict[str, Any]
    code: int
    seconds: float  # of the first one
    back_s: float  # until the second one had answered, its start included


def lose_device(folder: Path, device: str) -> Loss:
    """Both processes, one after the other."""
    began_s = time.monotonic()
    first = _run("lose", folder, device)
    ended_s = time.monotonic()
    second = _run("answer", folder, device)
    return Loss(
        _last(first), _last(second), first.returncode, ended_s - began_s, time.monotonic() - ended_s
    )


def _run(what: str, folder: Path, device: str) -> "subprocess.CompletedProcess[str]":
    place = folder / what
    place.mkdir(parents=True)
    code = "from reliability.device_loss import main; main()"
    command = [sys.executable, "-c", code, what, device, str(place)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=180, check=False
    )


def _last(process: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": process.stderr[-300:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


BOUND_S = STUCK_S["cuda"] + 10 * LOOK_S + 3 * BETWEEN_S + 5.0  # for the watch to see it
