"""Settings of the chunk KV store, one frozen dataclass per part, one comment per field."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from kvweave.kv.tiers.base import Tier

GIB = 1 << 30
MIB = 1 << 20


def masked_url(url: str) -> str:
    """A url with *** in place of its password, wherever it stands; at worst with less."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    secrets, at, place = rest.rpartition("@")  # a password that was not escaped may hold any sign
    user = secrets.partition(":")[0]
    hidden = f"{user}:***@" if ":" in secrets else "***@" if at else ""
    place = re.sub(r"(?i)([?&]password=)[^&]*", r"\1***", place)
    return f"{scheme}{separator}{hidden}{place}"


@dataclass(frozen=True, slots=True)
class HostTierConfig:
    """Host memory: one arena, taken from the system as it fills."""

    kind: ClassVar[str] = "host"
    place: ClassVar[None] = None  # of this process
    capacity_bytes: int = 2 * GIB  # never holds more than this
    pinned: bool | None = None  # page-locked for fast copies to the GPU; None: where CUDA is


@dataclass(frozen=True, slots=True)
class DiskTierConfig:
    """A folder of chunk objects."""

    kind: ClassVar[str] = "disk"
    place: ClassVar[None] = None  # of this machine: known by its folder
    root: Path  # made if missing
    capacity_bytes: int = 64 * GIB  # start evicting above this
    direct_io: bool = False  # read past the page cache: for stores far larger than memory
    fsync: bool = True  # off: a power cut may lose what was acknowledged (never serves it torn)
    quarantine_bytes: int = 256 * MIB  # damaged objects kept for a look, oldest dropped first


@dataclass(frozen=True, slots=True)
class RedisTierConfig:
    """A Valkey or Redis server, shared between machines. It evicts by its own rules."""

    kind: ClassVar[str] = "redis"
    capacity_bytes: ClassVar[int | None] = None  # the server's own `maxmemory`
    # redis://, rediss:// (TLS) or unix://, with user, password and database if needed
    url: str = field(repr=False)
    prefix: str = "kvweave:"  # in front of every key: keep other users of the server apart
    timeout_s: float = 2.0  # one command; later is a miss
    ttl_s: int | None = None  # let the server forget objects this long after they were written
    ca_file: Path | None = None  # TLS: certificate authority, None for the system's
    cert_file: Path | None = None  # TLS: client certificate, with its key in key_file
    key_file: Path | None = None

    @property
    def shown(self) -> str:
        """The url as people and logs may see it."""
        return masked_url(self.url)

    @property
    def place(self) -> str:
        """The server and the part of it, whoever asks."""
        scheme, _, rest = self.shown.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]} {self.prefix}"


@dataclass(frozen=True, slots=True)
class S3TierConfig:
    """A bucket of an S3-compatible object store. Credentials come from boto3's usual places."""

    kind: ClassVar[str] = "s3"
    capacity_bytes: ClassVar[int | None] = None  # the bucket's own
    bucket: str  # must exist
    prefix: str = "kvweave/"  # in front of every object name
    endpoint_url: str | None = None  # None: Amazon's
    region: str | None = None
    timeout_s: float = 5.0  # connect, and each read from the connection
    max_connections: int = 16

    @property
    def place(self) -> str:
        """The bucket and the part of it, whoever asks."""
        return f"s3://{self.bucket}/{self.prefix} {self.endpoint_url or ''}".rstrip()


class OwnTierConfig(Protocol):
    """The config of a tier that is none of ours: it opens its tier itself."""

    @property
    def kind(self) -> str: ...

    @property
    def capacity_bytes(self) -> int | None: ...

    @property
    def place(self) -> str | None: ...

    def open(self) -> Tier: ...


TierConfig = HostTierConfig | DiskTierConfig | RedisTierConfig | S3TierConfig | OwnTierConfig


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The store: its tiers, fastest first, and how it moves bytes between them."""

    tiers: tuple[TierConfig, ...] = (HostTierConfig(),)
    policy: str = "pgdsf"  # what stays: lru, lfu, gdsf or pgdsf
    io_threads: int = min(4, os.cpu_count() or 1)  # readers per tier
    lookahead_layers: int = 64  # layers asked for ahead of the one being waited for
    staging_bytes: int = 256 * MIB  # idle buffers kept for loads that no tier keeps
    write_behind_bytes: int = 512 * MIB  # per tier: accepted but not yet written
    local_deadline_s: float = 30.0  # a disk that gives nothing for this long counts as a miss
    remote_deadline_s: float = 3.0  # the same for remote tiers
    local_budget_s: float = 60.0  # what one request waits for disks in all, however they drip
    remote_budget_s: float = 10.0  # the same for remote tiers
    write_deadline_s: float = 60.0  # a write that takes longer hangs: later ones are dropped
    locate_deadline_s: float = 0.25  # how long peek and acquire wait for a remote's answer
    breaker_failures: int = 3  # failures in a row until a tier is left alone
    breaker_rest_s: float = 5.0  # for how long, doubled with each failed probe up to a minute
