"""The connector's settings: kvweave's configuration, then what vLLM was given."""

from pathlib import Path
from typing import Any

import pytest

from kvweave.errors import ConfigError
from kvweave.hosts.vllm.settings import read_settings
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, RedisTierConfig


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file and no variable of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))


def test_nothing_said_is_what_kvweaves_own_server_does(tmp_path: Path) -> None:
    settings = read_settings({})
    assert (settings.codec, str(settings.preparation.variant)) == ("int8", "filler:4")
    assert (settings.reuse, settings.ratio, settings.making) == ("auto", None, "idle")
    assert settings.bound == 0.02
    host, disk = settings.store_config().tiers
    assert host == HostTierConfig()
    assert isinstance(disk, DiskTierConfig)
    assert disk.root == tmp_path / "home" / "vllm-kv"


def test_vllms_flag_goes_before_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_STORE_REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    monkeypatch.setenv("KVWEAVE_STORE_CODEC", "int4")
    settings = read_settings(
        {"codec": "raw", "host_bytes": "64MiB", "disk_bytes": 0, "reuse": "epic:0.3", "bound": 0.01}
    )
    assert (settings.codec, settings.reuse, settings.ratio) == ("raw", "epic", 0.3)
    assert settings.bound == 0.01
    host, remote = settings.store_config().tiers
    assert host.capacity_bytes == 64 << 20
    assert isinstance(remote, RedisTierConfig)


def test_a_look_takes_next_to_no_memory() -> None:
    host = read_settings({"host_bytes": "8GiB"}).store_config(is_look=True).tiers[0]
    assert host.capacity_bytes is not None
    assert host.capacity_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"capacity": 1}, "has no 'capacity'; known: host_bytes"),
        ({"host_bytes": "much"}, "store.host_bytes"),
        ({"making": "soon"}, "idle, never"),
        ({"encoding": "neighbours"}, "no knowledge base"),
        ({"encoding": "magic"}, "unknown"),
        ({"reuse": "magic"}, "unknown; known: auto, full"),
        ({"bound": -1}, "quality.bound|bound"),
        ({"reuse": "weave:lots"}, "weave:0.15"),
    ],
)
def test_what_cannot_be_is_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(extra)
