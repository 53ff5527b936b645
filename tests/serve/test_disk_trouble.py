"""A disk that is full or read-only, a writer elsewhere, a broken knowledge base: said as what it
is, with nothing half done, no path shown, and the others served."""

import errno
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.libraries.libraries import Libraries
from kvweave.app.library.library_kv import BackgroundKV, KVOptions
from kvweave.app.weave import Weave
from kvweave.corpus.kb_folder import writer_lock
from kvweave.errors import ModelNotFound
from kvweave.kv.format.keys import parse_key, tag_of
from kvweave.serve.access.errors import without_paths
from worlds.permissions import closed_folder, plain_user
from worlds.serving import KbServer, make_libraries, serving, user
from worlds.small_disks import fill_disk, small_disk
from worlds.tiny_corpus import WordEmbedder

NOTE = {"title": "Drain", "text": "To drain a node, cordon it first."}
OTHER = {"title": "Quota", "text": "A quota limits the pods of a namespace."}
THIRD = {"title": "Volumes", "text": "Volumes are mounted before a pod starts."}


@pytest.fixture
def own(weave: Weave, tmp_path: Path) -> Iterator[KbServer]:
    libraries = make_libraries(weave, tmp_path / "kbs")
    with serving(weave, libraries=libraries) as address:
        yield KbServer(address, weave, libraries, tmp_path / "kbs")
    libraries.close()


def place(server: KbServer, name: str = "notes") -> str:
    return f"{server.url}/v1/kb/{name}/documents"


def upload(server: KbServer, note: dict[str, str], name: str = "notes") -> httpx.Response:
    return httpx.post(place(server, name), json=note, timeout=60)


def titles(server: KbServer, name: str = "notes") -> list[str]:
    return [d["title"] for d in httpx.get(place(server, name), timeout=60).json()["data"]]


def is_told(reply: httpx.Response, status: int, code: str, server: KbServer) -> None:
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["code"] == code
    assert str(server.root) not in reply.text
    assert int(reply.headers["retry-after"]) > 0


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections from now on find the disk full as soon as the file would grow."""
    real = sqlite3.connect

    def connect(*args: object, **how: object) -> sqlite3.Connection:
        connection = real(*args, **how)  # type: ignore[arg-type]
        connection.execute("PRAGMA max_page_count = 1")  # it is what it has already, and no more
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)


def test_a_full_disk_is_a_507_and_nothing_is_half_done(
    own: KbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert upload(own, NOTE).status_code == 200
    own.libraries.close()
    with monkeypatch.context() as patch:
        fill(patch)
        libraries = make_libraries(own.weave, own.root)
        with serving(own.weave, libraries=libraries) as url:
            server = KbServer(url, own.weave, libraries, own.root)
            long = {"title": "Long", "text": "word salad of many nodes. " * 4000}
            is_told(upload(server, long), 507, "no_room", server)
            assert titles(server) == ["Drain"]
        libraries.close()
    libraries = make_libraries(own.weave, own.root)
    with serving(own.weave, libraries=libraries) as url:
        server = KbServer(url, own.weave, libraries, own.root)
        assert upload(server, OTHER).status_code == 200, "there is room again"
        assert sorted(titles(server)) == ["Drain", "Quota"]
    libraries.close()


def test_a_delete_that_was_done_is_not_called_a_failure(
    own: KbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index could not be saved: a 500, and the document was gone."""
    assert upload(own, NOTE).status_code == 200
    (document,) = httpx.get(place(own), timeout=60).json()["data"]

    def save(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvweave.corpus.catalogue_index.save_index", save)
    gone = httpx.delete(f"{place(own)}/{document['id']}", timeout=60)
    assert gone.status_code == 200
    assert titles(own) == []
    monkeypatch.undo()
    assert upload(own, OTHER).status_code == 200
    found = httpx.post(f"{own.url}/v1/kb/notes/search", json={"query": "drain"}, timeout=60)
    assert [hit["title"] for hit in found.json()["data"]] == ["Quota"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_a_503_and_the_document_stays(
    own: KbServer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert upload(own, NOTE).status_code == 200
    (document,) = httpx.get(place(own), timeout=60).json()["data"]

    def refuse(*args: object, **how: object) -> None:
        raise OSError(number, "Read-only file system", str(own.root))

    monkeypatch.setattr("kvweave.corpus.knowledge_base.sweep_temporaries", refuse)
    is_told(upload(own, OTHER), 503, "read_only", own)
    gone = httpx.delete(f"{place(own)}/{document['id']}", timeout=60)
    is_told(gone, 503, "read_only", own)
    assert titles(own) == ["Drain"]


def ask(server: KbServer, question: str) -> dict[str, Any]:
    """What `explain` says of the chunk that the answer was made from."""
    body = {"messages": user(question), "kb": "notes", "k": 1, "max_tokens": 2, "temperature": 0}
    body |= {"reuse": "reuse", "explain": True}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    (chunk,) = reply.json()["explain"]["chunks"]
    return dict(chunk)


def upload_with_kv(server: KbServer, note: dict[str, str], name: str = "notes") -> None:
    reply = httpx.post(f"{place(server, name)}?wait_for_kv=true", json=note, timeout=60)
    assert reply.status_code == 200, reply.text


def is_resting(server: KbServer) -> bool:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    (value,) = [line for line in lines if "kv_tier_resting" in line and 'tier="disk"' in line]
    return float(value.split()[-1]) > 0


def test_chunk_kv_that_cannot_be_read_at_the_start_is_found_again_without_a_restart(
    own: KbServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for note in (NOTE, OTHER, THIRD):
        upload_with_kv(own, note)
    own.libraries.close()
    usual = KVOptions.store_config
    monkeypatch.setattr(
        KVOptions, "store_config", lambda *of: replace(usual(*of), breaker_rest_s=0.02)
    )
    objects = own.root / "notes" / "kv" / "objects"
    libraries = make_libraries(own.weave, own.root)
    with plain_user(), serving(own.weave, libraries=libraries) as url:
        server = KbServer(url, own.weave, libraries, own.root)
        with closed_folder(objects):
            libraries.open_ahead()
            _goes_on_without(server)
        give_up_s = time.monotonic() + 30
        while is_resting(server):  # a question has the folder tried again
            assert time.monotonic() < give_up_s, "not in use again"
            ask(server, "drain a node?")
        assert ask(server, "are volumes mounted?")["tier"] == "disk"
        upload_with_kv(server, {"title": "Probe", "text": "A probe looks."})
    libraries.close()
    said = [r.getMessage() for r in caplog.records if "without a restart" in r.getMessage()]
    assert len(said) == 1
    assert "Permission denied" in said[0]
    chunks = {tag_of(key) for path in objects.rglob("*.kv") if (key := parse_key(path.stem))}
    assert len(chunks) == 3, "Drain, Volumes and Probe; not Quota, which went meanwhile, nor Pods"


def _goes_on_without(server: KbServer) -> None:
    chunk = ask(server, "drain a node?")
    assert (chunk["tier"], chunk["why"]) == (None, "tier failed")
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'verb="scan"' in metrics
    assert 'reason="tier failed"' in metrics
    listed = httpx.get(place(server), timeout=60).json()["data"]
    (quota,) = [each["id"] for each in listed if each["title"] == "Quota"]
    assert httpx.delete(f"{place(server)}/{quota}", timeout=60).status_code == 200
    # the disk owes the removal of its KV, which is no reason to refuse what comes
    upload_with_kv(server, {"title": "Pods", "text": "Pods run."})
    assert sorted(titles(server)) == ["Drain", "Pods", "Volumes"]


@contextmanager
def small_server(weave: Weave, folder: Path, options: str) -> Iterator[KbServer]:
    """A server whose knowledge bases lie on a small disk."""
    with small_disk(folder / "disk", options) as root:
        libraries = make_libraries(weave, root, BackgroundKV())
        with serving(weave, libraries=libraries) as url:
            yield KbServer(url, weave, libraries, root)
        libraries.close()


def long_note(name: str) -> dict[str, str]:
    return {"title": name, "text": " ".join(f"node {name}{n} has pods." for n in range(2000))}


def test_what_is_written_on_a_disk_that_is_really_full_is_a_507(
    weave: Weave, tmp_path: Path
) -> None:
    """A change of settings and an upload with its KV were a 500."""
    with small_server(weave, tmp_path, "size=4m") as server:
        upload_with_kv(server, NOTE)
        fill_disk(server.root)
        changed = httpx.patch(f"{server.url}/v1/kb/notes", json={"order": "free"}, timeout=60)
        is_told(changed, 507, "no_room", server)
        reply = httpx.post(f"{place(server)}?wait_for_kv=true", json=long_note("x"), timeout=60)
        is_told(reply, 507, "no_room", server)
        assert titles(server) == ["Drain"]


@pytest.mark.parametrize("names", [12, 16, 20])
def test_without_inodes_chunk_kv_is_a_507_and_never_waited_for(
    weave: Weave, tmp_path: Path, names: int
) -> None:
    with small_server(weave, tmp_path, f"size=32m,nr_inodes={names}") as server:
        for number in range(6):
            note = {"title": f"n{number}", "text": f"The node {number} has pods."}
            reply = httpx.post(f"{place(server)}?wait_for_kv=true", json=note, timeout=60)
            assert reply.status_code in (200, 507), reply.text
        is_told(reply, 507, "no_room", server)
        listed = httpx.get(f"{server.url}/v1/kb", timeout=60)
        assert str(server.root) not in listed.text, "kv.why names no path"


def test_documents_and_knowledge_bases_are_deleted_from_a_full_disk(
    weave: Weave, tmp_path: Path
) -> None:
    """SQLite writes a log of what it deletes: without room for it nothing could be freed. Chunk KV,
    once it is made, makes that room."""
    with small_server(weave, tmp_path, "size=24m") as server:
        for name in ("notes", "other"):
            for note in map(long_note, "ab"):
                upload_with_kv(server, note, name)
            with closing(sqlite3.connect(server.root / name / "catalogue.sqlite")) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the log has no room of its own
        fill_disk(server.root)
        for document in httpx.get(place(server), timeout=60).json()["data"]:
            gone = httpx.delete(f"{place(server)}/{document['id']}", timeout=60)
            assert gone.status_code == 200, gone.text
        assert titles(server) == []
        fill_disk(server.root)
        gone = httpx.delete(f"{server.url}/v1/kb/other", timeout=60)
        assert gone.status_code == 200, gone.text
        assert not (server.root / "other").exists()


def test_a_writer_elsewhere_is_a_409(own: KbServer) -> None:
    assert upload(own, NOTE).status_code == 200
    (document,) = httpx.get(place(own), timeout=60).json()["data"]
    with writer_lock(own.root / "notes"):
        is_told(upload(own, OTHER), 409, "knowledge_base_busy", own)
        gone = httpx.delete(f"{place(own)}/{document['id']}", timeout=60)
        is_told(gone, 409, "knowledge_base_busy", own)
    assert upload(own, OTHER).status_code == 200


def test_tokens_that_were_changed_are_no_answer(own: KbServer) -> None:
    assert upload(own, NOTE).status_code == 200
    db = sqlite3.connect(own.root / "notes" / "catalogue.sqlite")
    with db:
        db.execute("UPDATE chunks SET token_ids = x'01000000'")
    db.close()
    body = {"messages": [{"role": "user", "content": "drain?"}], "kb": "notes", "max_tokens": 1}
    asked = httpx.post(f"{own.url}/v1/chat/completions", json=body, timeout=60)
    found = httpx.post(f"{own.url}/v1/kb/notes/search", json={"query": "drain"}, timeout=60)
    for reply in (asked, found):
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "knowledge_base_damaged"


BREAKS = {
    "no database": lambda folder: _replace_catalogue(folder, b"no database"),
    "no catalogue": lambda folder: _replace_catalogue(folder, None),
    "cut off": lambda folder: _cut_catalogue(folder),
    "no settings": lambda folder: (folder / "kb.json").write_text("{"),
    "of another version": lambda folder: (folder / "kb.json").write_text('{"version": 99}'),
}


def _replace_catalogue(folder: Path, data: bytes | None) -> None:
    for file in folder.glob("catalogue.sqlite*"):
        file.unlink()
    if data is not None:
        (folder / "catalogue.sqlite").write_bytes(data)


def _cut_catalogue(folder: Path) -> None:
    path = folder / "catalogue.sqlite"
    data = path.read_bytes()
    _replace_catalogue(folder, data[: len(data) // 2])


@pytest.mark.parametrize("how", list(BREAKS))
def test_one_broken_knowledge_base_is_listed_as_such_and_the_others_are_served(
    weave: Weave, tmp_path: Path, how: str
) -> None:
    libraries = make_libraries(weave, tmp_path)
    with serving(weave, libraries=libraries) as url:
        server = KbServer(url, weave, libraries, tmp_path)
        for name in ("bad", "good"):
            assert upload(server, NOTE, name).status_code == 200
    libraries.close()
    BREAKS[how](tmp_path / "bad")
    libraries = make_libraries(weave, tmp_path)
    libraries.open_ahead()
    with serving(weave, libraries=libraries) as url:
        listed = httpx.get(f"{url}/v1/kb", timeout=60)
        assert listed.status_code == 200, listed.text
        bad, good = listed.json()["data"]
        assert (bad["name"], bad["documents"]) == ("bad", 0)
        assert bad["problem"]
        assert bad["kv"]["state"] == "failed"
        assert (good["name"], good["documents"], good["problem"]) == ("good", 1, None)
        assert str(tmp_path) not in listed.text
        alone = httpx.get(f"{url}/v1/kb/bad", timeout=60)
        assert alone.json() == bad
        found = httpx.post(f"{url}/v1/kb/good/search", json={"query": "drain"}, timeout=60)
        assert found.status_code == 200
        refused = httpx.post(f"{url}/v1/kb/bad/search", json={"query": "drain"}, timeout=60)
        assert refused.status_code == 500
        assert str(tmp_path) not in refused.text
    libraries.close()


@pytest.mark.parametrize("how", list(BREAKS))
@pytest.mark.parametrize("is_open", [False, True])
def test_a_broken_knowledge_base_can_be_deleted(own: KbServer, how: str, is_open: bool) -> None:
    for name in ("bad", "good"):
        assert upload(own, NOTE, name).status_code == 200
    if not is_open:
        own.libraries.close()
    BREAKS[how](own.root / "bad")
    libraries = own.libraries if is_open else make_libraries(own.weave, own.root)
    with serving(own.weave, libraries=libraries) as url:
        gone = httpx.delete(f"{url}/v1/kb/bad", timeout=60)
        assert gone.status_code == 200, gone.text
        assert not (own.root / "bad").exists()
        listed = httpx.get(f"{url}/v1/kb", timeout=60).json()["data"]
        assert [each["name"] for each in listed] == ["good"]
        again = KbServer(url, own.weave, libraries, own.root)
        assert upload(again, NOTE, "bad").status_code == 200, "the name is free"
    libraries.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot write /srv/kbs/notes: no", "cannot write notes: no"),
        ("/srv/kbs/a.sqlite is gone", "a.sqlite is gone"),
        ("see '/srv/kbs' (/tmp/x/y)", "see 'kbs' (y)"),
        ("go to https://host/a/b or s3://bucket/x", "go to https://host/a/b or s3://bucket/x"),
        ("3/4 of a/b", "3/4 of a/b"),
    ],
)
def test_paths_are_not_shown(text: str, shown: str) -> None:
    assert without_paths(text) == shown


def test_a_knowledge_base_of_another_embedder_or_model_says_so_everywhere(
    weave: Weave, tmp_path: Path
) -> None:
    libraries = make_libraries(weave, tmp_path)
    with serving(weave, libraries=libraries) as url:
        server = KbServer(url, weave, libraries, tmp_path)
        for name in ("cut", "embedded", "good"):
            assert upload(server, NOTE, name).status_code == 200
    libraries.close()
    for name, field in (("cut", "tokenizer"), ("embedded", "embedder_identity")):
        path = tmp_path / name / "kb.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), field: "another"}))
    libraries = make_libraries(weave, tmp_path)
    libraries.embed([""])
    with serving(weave, libraries=libraries) as url:
        cut, embedded, good = httpx.get(f"{url}/v1/kb", timeout=60).json()["data"]
        assert (cut["name"], embedded["name"], good["problem"]) == ("cut", "embedded", None)
        for unfit in (cut, embedded):
            assert "made with an embedder or a model that this server does not" in unfit["problem"]
            body = {"messages": user("How?"), "kb": unfit["name"], "max_tokens": 2}
            for path, sent in (
                ("chat/completions", body),
                (f"kb/{unfit['name']}/search", {"query": "drain"}),
            ):
                refused = httpx.post(f"{url}/v1/{path}", json=sent, timeout=60)
                assert refused.status_code == 409, refused.text
                assert refused.json()["error"]["code"] == "knowledge_base_mismatch"
                assert str(tmp_path) not in refused.text
    libraries.close()


def test_a_knowledge_base_whose_embedder_is_gone_says_so_once_it_was_asked(
    weave: Weave, tmp_path: Path
) -> None:
    libraries = make_libraries(weave, tmp_path)
    libraries.ingest("", "lost", [("Note", "Drain the node.")])
    libraries.close()

    def open_embedder(name: str) -> WordEmbedder:
        raise ModelNotFound(f"no embedder {name!r}")

    libraries = Libraries(weave, libraries.config, open_embedder=open_embedder)
    with serving(weave, libraries=libraries) as url:
        refused = httpx.post(f"{url}/v1/kb/lost/search", json={"query": "drain"}, timeout=60)
        assert refused.status_code == 409, refused.text
        assert httpx.get(f"{url}/v1/kb/lost", timeout=60).json()["problem"]
    libraries.close()
