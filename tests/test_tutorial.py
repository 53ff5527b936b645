"""docs/tutorial.md goes through: all its blocks run in order, as one shell, on a fresh home."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvweave.model.files.embedded import find_embedded, peek
from kvweave.model.files.model_cache import ModelCache
from kvweave.paths import home

REPO = Path(__file__).resolve().parents[1]
PAGE = (REPO / "docs" / "tutorial.md").read_text()
MODEL = "smollm2"  # the page's default takes minutes where this one takes seconds
PORTS = ("8321", "8331", "8332")


def free_ports(count: int) -> Sequence[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def typed(page: str) -> str:
    """The blocks of the page as one script, each announced on stdout before it runs."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```sh"), "every block of a shell is closed"
    return "\n".join(f"echo '── block {i}'\n{block}" for i, block in enumerate(blocks))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tutorial_runs_as_printed(tmp_path: Path) -> None:
    if any(peek(find_embedded(name), ModelCache()) is None for name in (MODEL, "minilm")):
        pytest.fail("smollm2 and minilm are not on this machine; run: make models")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(ModelCache().root)
    (tmp_path / "docs").symlink_to(REPO / "docs")
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    assert shutil.which("kvweave", path=str(Path(sys.prefix) / "bin")), "the page's PATH finds it"
    script = typed(PAGE)
    ports = free_ports(len(PORTS))
    for shown, port in zip(PORTS, ports, strict=True):
        assert shown in script
        script = script.replace(shown, port)
    settings = {name: value for name, value in os.environ.items() if "KVWEAVE" not in name}
    settings |= {
        "KVWEAVE_HOME": str(tmp_path / "home"),
        "KVWEAVE_NATIVE": os.environ.get("KVWEAVE_NATIVE", str(home() / "native")),
        "KVWEAVE_MODEL": MODEL,
        "KVWEAVE_SERVER_PORT": ports[0],
    }
    # job control gives each server a group of its own: the last line ends those that are left
    whole = f"set -em\ntrap 'kill $(jobs -p) 2>/dev/null' EXIT\n{script}\n"
    ran = subprocess.run(
        ["bash", "-c", whole], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    said = dict(enumerate(ran.stdout.split("── block ")[1:]))
    assert "3 documents" in said[2]
    assert '"sources"' in said[4]
    assert "not in the knowledge tree" in said[5] or "exact" in said[5]
    assert "weave" in said[6]
    assert " reused" in said[6]
    assert "weave" in said[7]
    assert "quality.bound" in said[8]
    assert "smollm2" in said[8]
