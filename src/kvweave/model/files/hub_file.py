"""A file on the model hub, got by huggingface_hub in a process of its own.

Inside ours its retries could not be stopped: a hub that nobody can reach would cost half a minute,
and Ctrl-C would not end it.
"""

import socket
import sys
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvweave.child_process import DOWNLOADS, make_child_environment
from kvweave.errors import ModelNotFound
from kvweave.model.files.model_cache import PullStep, link_or_copy
from kvweave.model.files.sources import Workplace, largest_file, run_child

_REACH_S = 4.0  # for a hub to take a connection
_SILENCE_S = 15.0  # without a byte from a hub that took one


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file on the model hub, by huggingface_hub: HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and its
    cache hold here as they do elsewhere."""

    repo: str  # org/name
    file: str
    size_bytes: int  # for the progress bar only
    place: ClassVar[str] = "hub"

    @property
    def label(self) -> str:
        return f"hub {self.repo}"

    def fetch(self, at: Workplace) -> Path:
        from huggingface_hub import constants, try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, self.file)
        if isinstance(cached, str):
            return link_or_copy(Path(cached), at.scratch / self.file)
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFound(f"{self.label}: HF_HUB_OFFLINE is set")
        if not _is_reachable(constants.ENDPOINT):
            raise ModelNotFound(f"{self.label}: no hub answers at {constants.ENDPOINT}")
        return self._download(at)

    def _download(self, at: Workplace) -> Path:
        """In a process of its own, which can be stopped: inside ours, its retries could not be."""
        log_path = at.scratch / "hub.log"
        kept = str(at.kept.absolute())
        command = [sys.executable, "-P", "-c", _HUB_CHILD, self.repo, self.file, kept]
        environment = make_child_environment(*DOWNLOADS, "HF_", "HUGGING_FACE_")
        # plain HTTP goes on where it stopped and shows how far it is
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        came, came_s = largest_file(at.kept), time.monotonic()

        def look() -> None:
            nonlocal came, came_s
            size = largest_file(at.kept)
            if size != came:
                came, came_s = size, time.monotonic()
            elif time.monotonic() - came_s > _SILENCE_S:
                raise ModelNotFound(f"{self.label}: nothing came for {_SILENCE_S:g} s")
            at.report(PullStep("downloading", min(size, self.size_bytes), self.size_bytes))

        at.report(PullStep("downloading", came, self.size_bytes))
        status = run_child(command, environment, log_path, look)
        found = at.kept / self.file
        if status != 0 or not found.is_file():
            lines = log_path.read_text(errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "no reason")
            raise ModelNotFound(f"{self.label}: {said[:200]}")
        return found


_HUB_CHILD = """
import sys
from huggingface_hub import hf_hub_download
try:
    hf_hub_download(sys.argv[1], sys.argv[2], local_dir=sys.argv[3])
except Exception as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
"""


def _is_reachable(endpoint: str) -> bool:
    """Whether something listens there. Behind a proxy it cannot be known so cheaply: perhaps."""
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme in urllib.request.getproxies() or url.hostname is None:
        return True
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname, port), timeout=_REACH_S).close()
    except OSError:
        return False
    return True
