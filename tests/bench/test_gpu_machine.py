"""bench/gpu_machine: what is cut into pieces is whole again where they were put away."""

import shutil
from pathlib import Path

import pytest

from gpu_machine import unpack
from gpu_machine.pack import cut

BYTES = bytes(range(256)) * 10


@pytest.fixture
def pieces(tmp_path: Path) -> list[Path]:
    whole = tmp_path / "model.gguf"
    whole.write_bytes(BYTES)
    return list(cut(whole, "some-model", tmp_path / "carry", piece_bytes=1000))


def test_pieces_are_joined_when_the_last_one_comes_in_whatever_order(
    pieces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[bytes] = []
    monkeypatch.setattr(
        unpack, "_unfold", lambda name, whole, at: joined.append(whole.read_bytes())
    )
    assert [piece.name for piece in pieces] == [f"some-model-{n:02}" for n in (1, 2, 3)]
    for piece in (pieces[2], pieces[0], pieces[1]):
        assert not joined
        unpack.keep(piece, tmp_path / "at")
    assert joined == [BYTES]


def test_a_piece_with_other_bytes_is_refused(pieces: list[Path], tmp_path: Path) -> None:
    (pieces[0] / "piece").write_bytes(b"other")
    with pytest.raises(SystemExit, match="other bytes"):
        unpack.keep(pieces[0], tmp_path / "at")


def test_wheels_are_unfolded_without_scripts(tmp_path: Path) -> None:
    source = tmp_path / "wheel"
    for name in ("pkg/__init__.py", "pkg-1.data/purelib/more.py", "pkg-1.data/scripts/run"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x = 1\n")
    shutil.make_archive(str(tmp_path / "pkg-1-py3-none-any"), "zip", source)
    unpack.unfold_wheel(tmp_path / "pkg-1-py3-none-any.zip", tmp_path / "site")
    found = {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*.py")}
    assert found == {"pkg/__init__.py", "more.py"}
    assert not list((tmp_path / "site").rglob("run"))
