"""`kvweave kb` as a user meets it: check, backup, restore, rm."""

import hashlib
import io
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvweave.app.library.library_kv import KVOptions
from kvweave.cli import cli
from kvweave.config import StoreSettings
from kvweave.corpus.backup import PARTS, _work_folder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import CorpusDamaged, CorpusError, CorpusFull
from kvweave.ingest import ingest
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.text.tokenizer import Tokenizer
from worlds.small_disks import fill_disk, small_disk
from worlds.tiny_corpus import make_tokenizer, open_kb

PAIRS = [("Drain", "Cordon the node, then evict its pods."), ("Taints", "A taint keeps pods away.")]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        ingest(kb, PAIRS)
    return tmp_path / "kb"


def kvweave(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, ["kb", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def damage(folder: Path) -> None:
    db = sqlite3.connect(folder / "catalogue.sqlite")
    with db:
        db.execute("UPDATE chunks SET token_ids = x'01000000' WHERE vector_id = 1")
    db.close()


def test_a_sound_knowledge_base_is_called_so(folder: Path) -> None:
    result = kvweave("check", "--kb", folder)
    assert result.output == "sound: 2 documents, 2 chunks\n"


def test_a_damaged_one_is_not(folder: Path) -> None:
    damage(folder)
    result = CliRunner().invoke(cli, ["kb", "check", "--kb", str(folder), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["problems"] == ["1 chunks whose tokens were changed"]


def test_the_order_of_chunks_is_set_and_left_to_the_configuration(folder: Path) -> None:
    result = kvweave("set", "--kb", folder, "--order", "free")
    assert result.output == f"{folder}: order free\n"
    with KnowledgeBase.open(folder) as kb:
        assert kb.settings.order == "free"
    kvweave("set", "--kb", folder, "--order", "configured")
    with KnowledgeBase.open(folder) as kb:
        assert kb.settings.order is None
    refused = CliRunner().invoke(cli, ["kb", "set", "--kb", str(folder), "--order", "any"])
    assert refused.exit_code == 2


def test_what_is_restored_is_what_was_backed_up(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with open_kb(folder, tokenizer) as kb, kb.writing():  # beside a writer
        kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
        before = kb.documents(), sorted(kb.catalogue.chunk_ids())
    kvweave("restore", tmp_path / "kb.backup", "--kb", tmp_path / "again")
    with open_kb(tmp_path / "again", tokenizer) as kb:
        assert (kb.documents(), sorted(kb.catalogue.chunk_ids())) == before
        assert kb.search("evict the pods", 1)[0].chunk.title == "Drain"
        assert kb.check() == []
        ingest(kb, [("New", "A new note.")])
        assert kb.totals().num_documents == 3
    assert not list(tmp_path.glob(".kvweave-*"))


@pytest.mark.parametrize("room", [1, 3])
def test_a_backup_to_a_full_disk_says_so_and_leaves_nothing(
    folder: Path, tmp_path: Path, room: int
) -> None:
    """`room`: pages that are left there."""
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        filler = fill_disk(disk)
        os.truncate(filler, filler.stat().st_size - room * os.sysconf("SC_PAGE_SIZE"))
        with pytest.raises(CorpusFull, match=r"cannot write .*kb.backup: .*; free some room"):
            kvweave("backup", disk / "kb.backup", "--kb", folder)
        assert list(disk.iterdir()) == [filler]


def test_nothing_that_is_there_is_overwritten(folder: Path, tmp_path: Path) -> None:
    kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
    with pytest.raises(CorpusError, match="is there already; name another file"):
        kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
    with pytest.raises(CorpusError, match="is there already; name a new folder"):
        kvweave("restore", tmp_path / "kb.backup", "--kb", folder)


def test_a_damaged_one_is_not_backed_up(folder: Path, tmp_path: Path) -> None:
    damage(folder)
    with pytest.raises(CorpusDamaged, match="damaged and not backed up: 1 chunks"):
        kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
    assert not (tmp_path / "kb.backup").exists()


def test_a_damaged_backup_is_not_restored(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "kb.backup"
    kvweave("backup", file, "--kb", folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    for broken in (bytes(data), b"", b"no archive" * 200, bytes(data[: len(data) // 2])):
        file.write_bytes(broken)
        with pytest.raises(CorpusDamaged):
            kvweave("restore", file, "--kb", tmp_path / "again")
        assert not (tmp_path / "again").exists()


def test_a_backup_writes_nowhere_else(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil", "w") as archive:
        archive.add(folder / "kb.json", "../../evil.json")
    with pytest.raises(CorpusDamaged, match="is no backup"):
        kvweave("restore", tmp_path / "evil", "--kb", tmp_path / "again")
    assert not (tmp_path.parent / "evil.json").exists()


def test_a_knowledge_base_is_removed_whole(folder: Path) -> None:
    kvweave("rm", "--kb", folder, "--yes")
    assert not folder.exists()
    with pytest.raises(CorpusError, match="no knowledge base in"):
        kvweave("rm", "--kb", folder, "--yes")


def test_what_is_no_knowledge_base_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(CorpusError, match="no knowledge base in"):
        kvweave("rm", "--kb", tmp_path / "precious", "--yes")
    assert (tmp_path / "precious").exists()


def test_one_that_is_written_is_not_removed(folder: Path, tokenizer: Tokenizer) -> None:
    with open_kb(folder, tokenizer) as kb, kb.writing(), pytest.raises(CorpusError):
        kvweave("rm", "--kb", folder, "--yes")
    with KnowledgeBase.open(folder) as kb:
        assert kb.totals().num_documents == 2


def test_a_removal_that_is_killed_leaves_no_half_under_the_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    def die(path: Path, **_: object) -> None:
        next(Path(path).glob("catalogue.sqlite")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        CliRunner().invoke(cli, ["kb", "rm", "--kb", str(folder), "--yes"])
    assert not folder.exists()
    open_kb(folder, tokenizer).close()  # the name is free
    kvweave("rm", "--kb", folder, "--yes")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".deleted-")]


# ---- backups that somebody else made


def make_backup(file: Path, folder: Path, **members: tarfile.TarInfo) -> Path:
    """A backup of the folder with sums that are right; `members` by the beginning of their names
    take the place of those that belong there."""
    sums = {part: hashlib.sha256((folder / part).read_bytes()).hexdigest() for part in PARTS}
    manifest = json.dumps({"version": 1, "sha256": sums}).encode()
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        archive.addfile(info, io.BytesIO(manifest))
        for part in PARTS:
            if (other := members.get(part.partition(".")[0])) is not None:
                archive.addfile(other, io.BytesIO(bytes(other.size)))
            else:
                archive.add(folder / part, part)
    return file


def execute(folder: Path, command: str) -> None:
    with closing(sqlite3.connect(folder / "catalogue.sqlite")) as db, db:
        db.execute(command)


def test_a_restored_one_has_names_of_its_own(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The uid of a catalogue names a folder of chunk KV: ../victim was taken as it was."""
    execute(folder, "UPDATE state SET uid = '../victim'")
    settings = json.loads((folder / "kb.json").read_text())
    kvweave("restore", make_backup(tmp_path / "evil", folder), "--kb", tmp_path / "again")
    with open_kb(tmp_path / "again", tokenizer) as kb:
        assert re.fullmatch("[0-9a-f]{32}", kb.catalogue.uid())
        assert kb.settings.uid != settings["uid"]  # collections on a server are told apart by it
        options = KVOptions(store=StoreSettings(disk_folder=tmp_path / "store"))
        disk = options.store_config(kb).tiers[1]
        assert isinstance(disk, DiskTierConfig)
        assert disk.root.resolve().parent == tmp_path / "store"


def test_a_uid_that_is_a_path_is_refused_where_it_is_used(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    trigger = "CREATE TRIGGER evil AFTER UPDATE ON state BEGIN UPDATE state SET uid = '../x'; END"
    execute(folder, trigger)
    with pytest.raises(CorpusDamaged, match="has a uid that is none"):
        kvweave("restore", make_backup(tmp_path / "evil", folder), "--kb", tmp_path / "again")
    execute(folder, "UPDATE state SET uid = '../x'")
    with open_kb(folder, tokenizer) as kb, pytest.raises(CorpusDamaged, match="uid"):
        KVOptions(store=StoreSettings(disk_folder=tmp_path / "store")).store_config(kb)


def test_a_restored_one_asks_no_server_that_the_backup_named(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = json.loads((folder / "kb.json").read_text())
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (folder / "kb.json").write_text(json.dumps({**settings, "index": url}))
        file = make_backup(tmp_path / "evil", folder)
        told = CliRunner().invoke(cli, ["kb", "restore", str(file), "--kb", str(tmp_path / "a")])
        assert url in told.output
        with open_kb(tmp_path / "a", tokenizer) as kb:
            assert kb.search("evict the pods", 1)[0].chunk.title == "Drain"
            assert kb.settings.index == "auto"
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    "wrong", [{"uid": "../x"}, {"dim": 1 << 40}, {"dim": "8"}, {"embedder": 3}, {"chunk_tokens": 0}]
)
def test_settings_that_no_kvweave_wrote_are_refused(
    folder: Path, tmp_path: Path, wrong: dict[str, object]
) -> None:
    settings = json.loads((folder / "kb.json").read_text())
    (folder / "kb.json").write_text(json.dumps({**settings, **wrong}))
    with pytest.raises(CorpusDamaged, match=r"kb\.json does not parse"):
        kvweave("restore", make_backup(tmp_path / "evil", folder), "--kb", tmp_path / "again")


def make_sparse() -> tarfile.TarInfo:
    """3 GB of nothing, in a few bytes."""
    info = tarfile.TarInfo("catalogue.sqlite")
    size = 3 << 30
    info.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "catalogue.sqlite",
        "GNU.sparse.size": str(size),
        "GNU.sparse.map": f"0,0,{size},0",
    }
    return info


def make_link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("catalogue.sqlite")
    info.type, info.linkname = kind, "catalogue.sqlite"
    return info


@pytest.mark.parametrize(
    "member",
    [make_sparse(), make_link(tarfile.SYMTYPE), make_link(tarfile.LNKTYPE)],
    ids=["sparse", "a link to itself", "a hard link to itself"],
)
def test_members_that_are_no_plain_files_are_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, member: tarfile.TarInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_backup(tmp_path / "evil", folder, catalogue=member)
    assert file.stat().st_size < 30_000
    written: list[Path] = []
    monkeypatch.setattr("shutil.copyfileobj", lambda source, target, _: written.append(target))
    with pytest.raises(CorpusDamaged, match="is no plain file"):
        kvweave("restore", file, "--kb", tmp_path / "again")
    assert written == []


def test_settings_of_a_backup_are_small(folder: Path, tmp_path: Path) -> None:
    large = tarfile.TarInfo("kb.json")
    large.size = 2 << 20
    with pytest.raises(CorpusDamaged, match="is no plain file"):
        kvweave("restore", make_backup(tmp_path / "evil", folder, kb=large), "--kb", tmp_path / "a")


def test_a_file_that_is_a_link_to_itself_is_one_line(folder: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CorpusError, match=r"cannot read .*loop"):
        kvweave("restore", loop, "--kb", tmp_path / "again")
    with pytest.raises(CorpusError, match="is there already"):
        kvweave("backup", loop, "--kb", folder)
    file = make_backup(tmp_path / "sound", folder)
    with pytest.raises(CorpusError, match="loop"):
        kvweave("restore", file, "--kb", loop)


KILLED = """
import os, sys
from pathlib import Path
import kvweave.corpus.backup as backup
backup.sha256_of = lambda path: os.kill(os.getpid(), 9)
getattr(backup, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3]))
"""


def test_what_killed_backups_left_goes_with_the_next(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "backups"
    file = make_backup(tmp_path / "sound", folder)
    for what, source, target in (("backup", folder, "file"), ("restore", file, "kb")):
        command = [sys.executable, "-c", KILLED, what, str(source), str(place / target)]
        assert subprocess.run(command, check=False).returncode == -9
    assert len(list(place.iterdir())) == 1  # the second took what the first left
    with _work_folder(place) as running:
        kvweave("backup", place / "whole", "--kb", folder)
        assert sorted(place.iterdir()) == [running, place / "whole"]  # its process is alive
    assert list(place.iterdir()) == [place / "whole"]
