"""Plain transformers beside kvweave: the same prompts, token for token, over the same folder."""

import importlib.util
import os
import sys
from pathlib import Path

from common.files import REPO
from kvweave.model.files.locate import locate
from product_parts.servers import RunningServer, ServerProcess, free_port, wait_for_health

START_S = 300.0
CHILD = REPO / "bench" / "product_parts" / "transformers_child.py"


def find_transformers() -> tuple[Path | None, str]:
    """This environment's Python, or None and why it will not do."""
    if importlib.util.find_spec("transformers") is None:
        return None, "transformers is left out: it is not installed; make others does that"
    return Path(sys.executable), ""


def start_transformers(python: Path, model: str, folder: Path) -> RunningServer:
    """A server around `generate`, in float32 and with as many threads as there are cores."""
    port, threads = free_port(), len(os.sched_getaffinity(0))
    command = [str(python), str(CHILD), "--model", str(locate(model))]
    command += ["--port", str(port), "--threads", str(threads)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = ServerProcess("transformers", command, env, folder / "transformers.log", folder)
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    wait_for_health(server, START_S)
    return server
