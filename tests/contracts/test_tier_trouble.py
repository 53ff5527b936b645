"""What each tier does on a bad day: full, read-only, gone, slow, damaged."""

import errno
import fcntl
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.errors import ConfigError, TierCorrupt, TierError
from kvweave.kv.format.keys import ChunkKey, KeyContext, context_of
from kvweave.kv.format.memory import new_memory
from kvweave.kv.format.objects import verify_object
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import (
    DiskTierConfig,
    HostTierConfig,
    RedisTierConfig,
    S3TierConfig,
    StoreConfig,
)
from kvweave.kv.tiers.disk import DiskTier
from kvweave.kv.tiers.disk_files import Quarantine
from kvweave.kv.tiers.host import HostTier
from kvweave.kv.tiers.redis import RedisTier
from kvweave.kv.tiers.s3 import S3Tier
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import CHUNK_BYTES, make_chunk, make_key
from worlds.servers import free_port, make_certificates, running_redis, running_tls_front


def fail_with(code: int) -> object:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_full_host_tier_says_no_and_keeps_what_it_has() -> None:
    tier = HostTier(HostTierConfig(capacity_bytes=2 * CHUNK_BYTES, pinned=False))
    chunks = [make_chunk(i) for i in range(3)]
    assert [tier.write(c.key, [c.view]) for c in chunks] == [True, True, False]
    assert tier.size(chunks[0].key) == CHUNK_BYTES


def test_a_full_disk_says_no_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, chunk = DiskTier(DiskTierConfig(tmp_path)), make_chunk()
    written: list[int] = []
    real_writev = os.writev

    def writev(descriptor: int, parts: list[memoryview]) -> int:
        """Room for one page, then none: as a disk fills up."""
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real_writev(descriptor, [parts[0][:4096]]))
        return written[-1]

    monkeypatch.setattr(os, "writev", writev)
    assert tier.write(chunk.key, [chunk.view]) is False
    monkeypatch.undo()
    assert written == [4096]
    assert (tier.size(chunk.key), tier.temporaries()) == (None, [])
    assert tier.write(chunk.key, [chunk.view]) is True


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, chunk = DiskTier(DiskTierConfig(tmp_path)), make_chunk()
    real_writev = os.writev
    monkeypatch.setattr(os, "writev", lambda d, parts: real_writev(d, [parts[0][:1000]]))
    assert tier.write(chunk.key, [chunk.view[:5000], chunk.view[5000:]]) is True
    monkeypatch.undo()
    assert (tmp_path / "objects").exists()
    reader = tier.open(chunk.key)
    assert reader is not None
    out = bytearray(reader.size_bytes)
    reader.read(0, memoryview(out))
    assert out == chunk.view


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_a_folder_that_refuses_writes_still_serves_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    tier, chunk = DiskTier(DiskTierConfig(tmp_path)), make_chunk(1)
    tier.write(chunk.key, [chunk.view])
    monkeypatch.setattr(os, "replace", fail_with(code))
    with pytest.raises(TierError, match="disk cannot write"):
        tier.write(make_key(2), [chunk.view])
    assert tier.temporaries() == []
    assert tier.open(chunk.key) is not None


def test_a_read_only_store_can_be_opened_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = make_chunk()
    DiskTier(DiskTierConfig(tmp_path)).write(chunk.key, [chunk.view])
    monkeypatch.setattr(Path, "mkdir", fail_with(errno.EROFS))
    tier = DiskTier(DiskTierConfig(tmp_path))
    assert "reading only" in caplog.text
    assert tier.size(chunk.key) == len(chunk.view)


def test_a_file_in_place_of_the_folder_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    tier = DiskTier(DiskTierConfig(tmp_path / "store"))
    for call in (tier.check, lambda: list(tier.scan())):
        with pytest.raises(TierError, match=r"cannot use .*store as a store: .*; give a folder"):
            call()
    (tmp_path / "store").unlink()
    assert list(tier.scan()) == []
    assert tier.write(make_key(), [make_chunk().view]), "tried again, and made"


def test_bytes_are_on_the_medium_before_their_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, chunk = DiskTier(DiskTierConfig(tmp_path)), make_chunk()
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        steps.append("sync folder" if is_folder else "sync file")
        real_fsync(descriptor)

    def replace(source: object, target: object) -> None:
        steps.append("rename")
        real_replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    tier.write(chunk.key, [chunk.view])
    assert steps[-3:] == ["sync file", "rename", "sync folder"]


def test_the_sweep_takes_dead_temporaries_and_leaves_live_ones(tmp_path: Path) -> None:
    DiskTier(DiskTierConfig(tmp_path))
    dead, live = tmp_path / "tmp" / "dead.tmp", tmp_path / "tmp" / "live.tmp"
    dead.write_bytes(b"half")
    with live.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        tier = DiskTier(DiskTierConfig(tmp_path))
        assert tier.temporaries() == [live]
    assert DiskTier(DiskTierConfig(tmp_path)).temporaries() == []


def test_a_file_between_its_last_byte_and_its_name_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, chunk = DiskTier(DiskTierConfig(tmp_path)), make_chunk()
    real_replace = os.replace

    def replace(source: object, target: object) -> None:
        DiskTier(DiskTierConfig(tmp_path))  # another process opens the store just now
        real_replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", replace)
    assert tier.write(chunk.key, [chunk.view]) is True
    assert tier.size(chunk.key) == len(chunk.view)


def test_a_file_between_its_birth_and_its_lock_may_be_swept_and_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, chunk = DiskTier(DiskTierConfig(tmp_path)), make_chunk()
    real_flock, sweeps = fcntl.flock, iter([True])

    def flock(descriptor: int, operation: int) -> None:
        if next(sweeps, False):
            DiskTier(DiskTierConfig(tmp_path))  # another process opens the store just now
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert tier.write(chunk.key, [chunk.view]) is True
    assert tier.size(chunk.key) == len(chunk.view)
    assert tier.temporaries() == []


def test_every_folder_that_got_an_entry_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    root, chunk = tmp_path / "deep" / "store", make_chunk()
    DiskTier(DiskTierConfig(root)).write(chunk.key, [chunk.view])
    (file,) = root.rglob("*.kv")
    assert {tmp_path, *(p for p in file.parents if p.is_relative_to(tmp_path))} <= synced


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["objects/*", "objects/*/*", "tmp", "quarantine"])
def test_an_unreadable_folder_is_left_out_and_named_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    code: int,
) -> None:
    tier = DiskTier(DiskTierConfig(tmp_path))
    other = KeyContext("another", "float32", "raw", "tokens", (), "none")
    good, bad, aside = make_key(0), make_key(0, other), make_key(5)
    for key in (good, bad, aside):
        tier.write(key, [make_chunk().view])
    tier.quarantine(aside)
    hit = tmp_path / where.replace("*", context_of(bad).hex(), 1)
    (hit,) = hit.parent.glob(hit.name)
    real_scandir = os.scandir

    def scandir(path: object) -> object:
        if Path(str(path)) == hit:
            raise OSError(code, os.strerror(code))
        return real_scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", scandir)
    tier = DiskTier(DiskTierConfig(tmp_path))
    for _ in range(2):
        found = {each.key for each in tier.scan()}
        assert found == ({good} if where.startswith("objects") else {good, bad})
        tier.quarantined_files()
    assert caplog.text.count("is left out") == 1
    with KVStore(StoreConfig(tiers=(DiskTierConfig(tmp_path),))) as store:
        assert store.peek([good])[0].residency is Residency.HERE


def test_objects_that_cannot_be_listed_at_all_are_a_tier_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(DiskTierConfig(tmp_path))
    monkeypatch.setattr(os, "scandir", fail_with(errno.EIO))
    with pytest.raises(TierError, match="cannot list"):
        list(tier.scan())


def test_quarantine_is_bounded(tmp_path: Path) -> None:
    tier = DiskTier(DiskTierConfig(tmp_path, quarantine_bytes=2 * CHUNK_BYTES))
    for i in range(4):
        chunk = make_chunk(i)
        tier.write(chunk.key, [chunk.view])
        tier.quarantine(chunk.key)
        time.sleep(0.01)
    kept = [path.name[:64] for path in tier.quarantined_files()]
    assert sorted(kept) == sorted(make_key(i).hex() for i in (2, 3))
    assert tier.clear_quarantine() == 2 * CHUNK_BYTES


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_quarantine_is_ordered_by_when_objects_were_put_aside(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    tier = DiskTier(DiskTierConfig(tmp_path, quarantine_bytes=CHUNK_BYTES))
    roomy = DiskTier(DiskTierConfig(tmp_path))
    for i in (0, 1):
        tier.write(make_key(i), [make_chunk(i).view])
        os.utime(next((tmp_path / "objects").rglob(f"{make_key(i).hex()}*")), (i, i))
    for i in order:
        roomy.quarantine(make_key(i))
    assert [path.name[:64] for path in tier.quarantined_files()] == [
        make_key(i).hex() for i in order
    ]
    tier.write(make_key(2), [make_chunk(2).view])
    os.utime(next((tmp_path / "objects").rglob(f"{make_key(2).hex()}*")), (0, 0))  # oldest of all
    tier.quarantine(make_key(2))
    assert [path.name[:64] for path in tier.quarantined_files()] == [make_key(2).hex()]


def test_quarantine_that_another_process_clears_meanwhile_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, chunk = DiskTier(DiskTierConfig(tmp_path, quarantine_bytes=0)), make_chunk()
    ghost = tmp_path / "quarantine" / f"{make_key(7).hex()}.1.kv"
    real_files = Quarantine.files
    monkeypatch.setattr(Quarantine, "files", lambda self: [ghost, *real_files(self)])
    tier.write(chunk.key, [chunk.view])
    assert tier.quarantine(chunk.key) is True
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert tier.clear_quarantine() == 0


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    tier = DiskTier(DiskTierConfig(tmp_path))
    stranger = tmp_path / "objects" / "notes.txt"
    stranger.write_text("mine")
    assert list(tier.scan()) == []
    assert stranger.exists()


def test_a_redis_that_is_down_fails_in_time_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    tier = RedisTier(RedisTierConfig(f"redis://127.0.0.1:{port}", timeout_s=0.3))
    chunk = make_chunk()
    start_s = time.monotonic()
    with pytest.raises(TierError, match="check the server"):
        tier.size(chunk.key)
    assert time.monotonic() - start_s < 3
    with running_redis(tmp_path, port=port):
        assert tier.write(chunk.key, [chunk.view]) is True
        assert tier.size(chunk.key) == len(chunk.view)
    tier.close()


def test_a_redis_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    import redis

    with running_redis(tmp_path) as port:
        tier = RedisTier(RedisTierConfig(f"redis://127.0.0.1:{port}", timeout_s=0.2))
        tier.size(make_key())
        with redis.Redis(port=port) as admin:
            admin.execute_command("CLIENT", "PAUSE", 3000)
        start_s = time.monotonic()
        with pytest.raises(TierError, match="Timeout"):
            tier.size(make_key())
        assert time.monotonic() - start_s < 2.5
        tier.close()


def test_a_redis_without_room_says_no(tmp_path: Path) -> None:
    with running_redis(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as port:
        tier = RedisTier(RedisTierConfig(f"redis://127.0.0.1:{port}"))
        assert False in [tier.write(make_key(i), [bytes(1 << 20)]) for i in range(8)]
        tier.close()


def test_redis_speaks_tls_with_a_server_it_can_check_and_with_no_other(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    files, others = make_certificates(ours), make_certificates(theirs)
    chunk = make_chunk()
    with running_redis(tmp_path) as plain, running_tls_front(plain, files) as port:
        url = f"rediss://127.0.0.1:{port}"
        good = RedisTierConfig(
            url, ca_file=files.ca, cert_file=files.certificate, key_file=files.key
        )
        tier = RedisTier(good)
        assert tier.write(chunk.key, [chunk.view])
        reader = tier.open(chunk.key)
        assert reader is not None
        assert verify_object(reader, chunk.key) == chunk.header
        tier.close()
        for bad in (
            replace(good, ca_file=others.ca),  # a server we have no reason to trust
            replace(good, cert_file=None, key_file=None),  # a server that has none to trust us
            replace(good, url=f"redis://127.0.0.1:{port}"),  # plain words to a TLS port
        ):
            tier = RedisTier(replace(bad, timeout_s=1.0))
            with pytest.raises(TierError):
                tier.size(chunk.key)
            tier.close()


def test_a_bad_redis_url_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read; write redis://"):
        RedisTier(RedisTierConfig("http://somewhere"))


def test_an_s3_that_is_down_or_has_no_bucket_is_a_tier_error(s3_endpoint: str) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for cfg in (
        S3TierConfig("chunks", endpoint_url=nobody, region="us-east-1", timeout_s=1),
        S3TierConfig("no-such-bucket", endpoint_url=s3_endpoint, region="us-east-1"),
    ):
        tier = S3Tier(cfg)
        with pytest.raises(TierError, match="does not answer as it should"):
            tier.write(make_key(), [b"x"])
        tier.close()


def test_an_s3_that_hangs_up_is_a_tier_error() -> None:
    """boto3 has no reply to show then, which was an AttributeError, and the end of the writer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(4):
                with listener.accept()[0] as connection:
                    connection.recv(1 << 16)

        threading.Thread(target=hang_up, daemon=True).start()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        tier = S3Tier(S3TierConfig("chunks", endpoint_url=endpoint, region="us-east-1"))
        for call in (
            lambda: tier.write(make_key(0), [b"x"]),
            lambda: tier.size(make_key(0)),
            lambda: tier.open(make_key(0)),
            tier.check,
        ):
            with pytest.raises(TierError, match="does not answer as it should"):
                call()
        tier.close()


def test_an_empty_s3_object_is_corrupt(s3_endpoint: str) -> None:
    tier = S3Tier(S3TierConfig("chunks", "empty/", endpoint_url=s3_endpoint, region="us-east-1"))
    tier.write(make_key(), [b""])
    with pytest.raises(TierCorrupt):
        verify_object(tier.open(make_key()), make_key())  # type: ignore[arg-type]
    tier.close()


def test_an_s3_that_ignores_ranges_or_counts_wrongly_is_no_surprise(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = S3Tier(S3TierConfig("chunks", "odd/", endpoint_url=s3_endpoint, region="us-east-1"))
    chunk = make_chunk()
    tier.write(chunk.key, [chunk.view])
    real_call = S3Tier._call
    said: list[str | None] = [None]

    def call(self: S3Tier, operation: str, key: ChunkKey, **kwargs: object) -> object:
        reply = real_call(self, operation, key, **kwargs)
        if operation == "get_object":
            del reply["ContentRange"]
            reply |= {} if said[0] is None else {"ContentRange": said[0]}
        return reply

    monkeypatch.setattr(S3Tier, "_call", call)
    reader = tier.open(chunk.key)
    assert reader is not None
    verify_object(reader, chunk.key)
    for said[0] in ("bytes 0-16383/*", "bytes 0-1/2"):
        with pytest.raises(TierError, match="s3 says"):
            tier.open(chunk.key)
    tier.close()


def make_faulty(**faults: float) -> FaultyTier:
    inner = HostTier(HostTierConfig(capacity_bytes=4 * CHUNK_BYTES, pinned=False))
    chunk = make_chunk()
    inner.write(chunk.key, [chunk.view])
    return FaultyTier(inner, FaultPlan(**faults))  # type: ignore[arg-type]


def test_each_fault_does_what_it_says() -> None:
    key, out = make_key(0), new_memory(CHUNK_BYTES, pinned=False).view
    assert make_faulty(drop=1.0).open(key) is None
    with pytest.raises(TierError, match="injected"):
        make_faulty(fail=1.0).size(key)
    reader = make_faulty(truncate=1.0).open(key)
    assert reader is not None
    with pytest.raises(TierCorrupt, match="read ended"):
        reader.read(0, out)
    reader = make_faulty(corrupt=1.0).open(key)
    assert reader is not None
    reader.read(0, out)
    changed = [a ^ b for a, b in zip(out, make_chunk().view, strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0].bit_count() == 1


def test_faults_repeat_with_their_seed() -> None:
    runs = []
    for _ in range(2):
        tier = make_faulty(drop=0.5, seed=3)
        runs.append([tier.size(make_key(0)) is None for _ in range(32)])
    assert runs[0] == runs[1]
    assert 0 < sum(runs[0]) < 32
