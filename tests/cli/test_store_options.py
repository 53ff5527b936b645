"""Tiers as people set them on the command line: what cannot be used is one line, at the start."""

import sys
from pathlib import Path

import pytest

from kvweave.corpus.settings import KnowledgeBaseSettings, write_settings
from worlds.running import Run
from worlds.servers import running_redis


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["--redis-url", "redis://me:hidden@127.0.0.1:1/0"],
            "store.redis_url redis://127.0.0.1:1/0: redis does not answer",
        ),
        (["--redis-url", "redis://:hid:den@h:port"], "store.redis_url: redis url 'redis://:***@h:"),
        (
            ["--redis-url", "me:hidden@h"],
            "store.redis_url 'me:***@h' must begin with one of redis://",
        ),
        (["--s3-url", "bucket"], "store.s3_url 'bucket' names no bucket; write s3://BUCKET/PREFIX"),
        (
            ["--s3-url", "s3://no-such-bucket", "--s3-endpoint", "S3"],
            "store.s3_url s3://no-such-bucket/kvweave/: s3 bucket 'no-such-bucket' does not answer",
        ),
        (
            ["--s3-url", "s3://chunks", "--s3-endpoint", "nowhere"],
            "store.s3_url: s3 bucket 'chunks' cannot be used",
        ),
        (["--s3-endpoint", "http://h"], "store.s3_endpoint is for a tier that is not set"),
        (["--disk-folder", "file/kv"], "store.disk_folder file/kv cannot be made"),
        (["KVWEAVE_STORE_POLICY=best"], "store.policy: no policy 'best'; known: gdsf, lfu, lru"),
        (["KVWEAVE_STORE_CODEC=zip"], "store.codec: no codec 'zip'; known: raw, "),
        (["KVWEAVE_STORE_REDIS_TTL_S=60"], "store.redis_ttl_s is for a tier that is not set"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "ask", "ingest"])
def test_a_tier_that_cannot_be_used_is_one_line_before_anything_loads(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3_endpoint: str,
    command: str,
    args: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "kb").mkdir()
    write_settings(tmp_path / "kb", KnowledgeBaseSettings("tokenizer", "words", "words-1", 8))
    for each in [each for each in args if each.startswith("KVWEAVE_")]:
        monkeypatch.setenv(*each.split("=", 1))
    typed = [s3_endpoint if a == "S3" else a for a in args if not a.startswith("KVWEAVE_")]
    front = {
        "serve": ["serve", "--port", "0"],
        "ask": ["ask", "Well?", "--kb", "kb"],
        "ingest": ["ingest", "file", "--kv", "--kb", "new"],
    }[command]
    ran = run(*front, "--model", "no-such", *typed)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert ran.err.count("\n") == 1
    assert "hid" not in ran.err.replace("no such", "")
    assert not (tmp_path / "new").exists()


def test_a_missing_package_of_a_tier_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    ran = run("serve", "--port", "0", "--redis-url", "redis://h")
    says = "store.redis_url: a redis tier needs the redis package; run: pip install "
    assert (ran.code, ran.err) == (2, f"kvweave: {says}'kvweave[remote]'\n")


def test_a_wrong_password_is_one_line_and_stays_unsaid(run: Run, tmp_path: Path) -> None:
    with running_redis(tmp_path, "--requirepass", "right") as port:
        ran = run("serve", "--port", "0", "--redis-url", f"redis://:wrong@127.0.0.1:{port}/0")
    assert ran.code == 2
    assert ran.err.startswith(f"kvweave: store.redis_url redis://127.0.0.1:{port}/0: redis does")
    assert "invalid username-password pair" in ran.err
    assert "wrong" not in ran.err.replace("invalid", "")
    assert ran.err.count("\n") == 1
