"""`kvweave cache` on a small store: what people see, and what it refuses."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvweave.cli.cache import command
from kvweave.errors import ConfigError, TierError
from kvweave.kv.format.header import header_checksum
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import DiskTierConfig, RedisTierConfig
from kvweave.kv.tiers.disk import DiskReader, DiskTier
from kvweave.kv.tiers.disk_files import Quarantine
from worlds.kv import CHUNK_BYTES, make_chunk, make_context, make_key


def make_store(root: Path, num_chunks: int = 3) -> DiskTier:
    tier = DiskTier(DiskTierConfig(root))
    for number in range(num_chunks):
        chunk = make_chunk(number)
        tier.write(chunk.key, [chunk.view])
    return tier


def run(*words: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


def run_json(*words: object, exit_code: int = 0) -> Any:
    return json.loads(run(*words, "--json", exit_code=exit_code).output)


def damage(root: Path, number: int) -> None:
    (path,) = root.rglob(f"{make_key(number).hex()}.kv")
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)


def test_ls_and_stat_say_what_is_there(tmp_path: Path) -> None:
    make_store(tmp_path)
    listed = run_json("ls", "--store", tmp_path)
    assert listed["total"] == 3
    assert {o["key"] for o in listed["objects"]} == {make_key(n).hex() for n in range(3)}
    assert {(o["tokens"], o["layers"], o["codec"]) for o in listed["objects"]} == {(5, 3, "raw")}
    summary = run_json("stat", "--store", tmp_path)
    assert (summary["objects"], summary["bytes"]) == (3, 3 * CHUNK_BYTES)
    assert list(summary["contexts"]) == [make_context().context_id().hex()]
    assert "3 objects" in run("ls", "--store", tmp_path).output
    assert "3 objects" in run("stat", "--store", tmp_path).output


def test_verify_finds_damage_and_repair_moves_it_aside(tmp_path: Path) -> None:
    tier = make_store(tmp_path)
    assert run_json("verify", "--store", tmp_path)["ok"] == 3
    damage(tmp_path, 1)
    found = run_json("verify", "--store", tmp_path, exit_code=1)
    assert (found["ok"], found["damaged"]) == (2, 1)
    assert found["problems"][0]["key"] == make_key(1).hex()
    assert "checksum is wrong" in run("verify", "--store", tmp_path, exit_code=1).output
    run("verify", "--store", tmp_path, "--repair", exit_code=1)
    assert len(tier.quarantined_files()) == 1
    assert "2 ok" in run("verify", "--store", tmp_path).output


@pytest.mark.parametrize("verb", ["stat", "gc"])
def test_quarantine_that_a_server_clears_meanwhile_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    make_store(tmp_path).quarantine(make_key(0))
    real_files = Quarantine.files
    ghost = tmp_path / "quarantine" / f"{make_key(7).hex()}.1.kv"
    monkeypatch.setattr(Quarantine, "files", lambda self: [ghost, *real_files(self)])
    told = run_json(verb, "--store", tmp_path)
    assert told["freed_bytes" if verb == "gc" else "quarantined_bytes"] == CHUNK_BYTES


def test_gc_frees_by_size_context_and_age_and_a_dry_run_frees_nothing(tmp_path: Path) -> None:
    tier = make_store(tmp_path, 4)
    tier.quarantine(make_key(3))
    limit = ("gc", "--store", tmp_path, "--max-bytes", CHUNK_BYTES)
    assert run_json(*limit, "--dry-run")["deleted"] == 2
    assert len(list(tier.scan())) == 3
    assert run_json(*limit)["freed_bytes"] == 3 * CHUNK_BYTES
    assert (len(list(tier.scan())), tier.quarantined_files()) == (1, [])
    assert run_json("gc", "--store", tmp_path, "--max-age-days", 1)["deleted"] == 0
    context = make_context().context_id().hex()
    assert "1 objects" in run("gc", "--store", tmp_path, "--context", context).output
    assert list(tier.scan()) == []


def test_gc_removes_objects_of_other_versions_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_store(tmp_path, 1)
    monkeypatch.setattr("kvweave.kv.format.header.LAYOUT_VERSION", 2)
    newer = make_chunk(1)
    monkeypatch.undo()
    tier.write(newer.key, [newer.view])
    assert run_json("verify", "--store", tmp_path)["foreign"] == 1
    assert run_json("gc", "--store", tmp_path, "--foreign")["deleted"] == 1
    assert [o.key for o in tier.scan()] == [make_key(0)]


def test_rm_takes_a_key_or_its_first_digits_and_refuses_what_is_unclear(tmp_path: Path) -> None:
    tier = make_store(tmp_path)
    run("rm", "--store", tmp_path, make_key(0).hex())
    assert run_json("rm", "--store", tmp_path, make_key(1).hex()[16:32])["deleted"] == 1
    assert [o.key for o in tier.scan()] == [make_key(2)]
    with pytest.raises(ConfigError, match="names 0 objects"):
        run("rm", "--store", tmp_path, make_key(2).hex(), "ffffffff")
    assert len(list(tier.scan())) == 1


def test_a_folder_that_is_no_store_is_refused_and_not_made_one(tmp_path: Path) -> None:
    for verb in ("ls", "stat", "verify", "gc"):
        with pytest.raises(ConfigError, match="holds no chunk KV"):
            run(verb, "--store", tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_looking_at_a_store_does_not_load_torch(tmp_path: Path) -> None:
    make_store(tmp_path, 1)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvweave.cli.cache import command\n"
        f"command(['ls', '--store', {str(tmp_path)!r}])"
    )
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(src)}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"1 objects" in done.stdout


@pytest.mark.parametrize("num_layers", [0, 2**20])
def test_a_forged_header_ends_no_command(tmp_path: Path, num_layers: int) -> None:
    tier = make_store(tmp_path)
    raw = bytearray(make_chunk(7).view)
    struct.pack_into("<I", raw, 56, num_layers)
    raw[4088:4096] = header_checksum(raw[:4088])
    tier.write(make_key(7), [raw])
    listed = run_json("ls", "--store", tmp_path)["objects"]
    assert [o["codec"] for o in listed if o["key"] == make_key(7).hex()] == ["damaged"]
    assert run_json("stat", "--store", tmp_path)["objects"] == 4
    assert run_json("verify", "--store", tmp_path, exit_code=1)["damaged"] == 1
    assert run_json("gc", "--store", tmp_path, "--foreign")["deleted"] == 0


def test_looking_sweeps_nothing_and_gc_does(tmp_path: Path) -> None:
    tier = make_store(tmp_path)
    (tmp_path / "tmp" / "dead.tmp").write_bytes(b"half")
    for verb in (["ls"], ["stat"], ["verify"], ["gc", "--dry-run"], ["rm", make_key(0).hex()]):
        run(verb[0], "--store", tmp_path, *verb[1:])
        assert len(tier.temporaries()) == 1, verb
    run("gc", "--store", tmp_path)
    assert tier.temporaries() == []


def test_an_object_that_cannot_be_opened_does_not_end_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path)
    real_open = DiskTier.open

    def refuse(tier: DiskTier, key: ChunkKey) -> DiskReader | None:
        if key == make_key(1):
            raise TierError("disk cannot open it: Permission denied")
        return real_open(tier, key)

    monkeypatch.setattr(DiskTier, "open", refuse)
    found = run_json("verify", "--store", tmp_path, exit_code=1)
    assert (found["ok"], found["unreadable"]) == (2, 1)


def test_a_knowledge_base_knows_where_its_chunk_kv_lies(tmp_path: Path) -> None:
    make_store(tmp_path / "kb" / "kv")
    assert run_json("stat", "--store", tmp_path / "kb")["objects"] == 3
    make_store(tmp_path / "fast" / "uid", 2)
    places = {"disks": [str(tmp_path / "fast" / "uid")], "remotes": {}}
    (tmp_path / "kb" / "kv" / "places.json").write_text(json.dumps(places))
    with pytest.raises(ConfigError, match=r"in several folders; give one of .*fast/uid"):
        run("stat", "--store", tmp_path / "kb")
    shutil.rmtree(tmp_path / "kb" / "kv" / "objects")
    assert run_json("stat", "--store", tmp_path / "kb")["objects"] == 2


def test_a_shared_tier_of_the_settings_is_looked_at_checked_and_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no redis tier is set; set store\.redis_url"):
        run("ls", "--store", "redis")
    monkeypatch.setenv("KVWEAVE_STORE_REDIS_URL", redis_url)
    tier = open_tier(RedisTierConfig(redis_url))
    for key in [each.key for each in tier.scan()]:
        tier.delete(key)
    for number in range(3):
        tier.write(make_key(number), [make_chunk(number).view])
    assert run_json("ls", "--store", "redis")["total"] == 3
    assert "3 objects" in run("stat", "--store", "redis").output
    assert run_json("verify", "--store", "redis")["ok"] == 3
    assert run_json("rm", "--store", "redis", make_key(1).hex())["deleted"] == 1
    with pytest.raises(ConfigError, match="does not say how old"):
        run("gc", "--store", "redis", "--max-age-days", 1)
    assert run_json("gc", "--store", "redis", "--max-bytes", 0)["deleted"] == 2
    assert list(tier.scan()) == []
    tier.close()
