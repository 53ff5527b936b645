"""Chunk objects as strings on a Valkey or Redis server, shared between machines.

One SET per object, one GETRANGE per run of layers. The server evicts by its own `maxmemory-policy`
(set `allkeys-lfu` or `allkeys-lru`); an object that went away is an ordinary miss. Objects of a
chunk are found by name alone: a list of them would be one more thing that the server may evict.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from kvweave.errors import ConfigError, TierCorrupt, TierError, error_words
from kvweave.kv.format.header import HEAD_BYTES, Buffer
from kvweave.kv.format.keys import ChunkKey, ChunkTag, parse_key
from kvweave.kv.tiers.base import PreludeReader, StoredObject, among
from kvweave.kv.tiers.config import RedisTierConfig

_SCAN_COUNT = 4096  # names that one SCAN looks at: a fraction of a millisecond of the server


class RedisTier:
    """Safe from many threads: the client keeps a pool of connections. Connects on first use."""

    durable: ClassVar[bool] = False  # as durable as the server is set up to be, which we cannot see
    remote: ClassVar[bool] = True
    writes_at_once: ClassVar[int] = 1
    best_read_bytes: ClassVar[int] = 1 << 20  # a round trip costs about as much as 100 KiB

    def __init__(self, cfg: RedisTierConfig) -> None:
        try:
            import redis
        except ImportError:
            raise ConfigError(
                "a redis tier needs the redis package; run: pip install 'kvweave[remote]'"
            ) from None
        self.name = "redis"
        self.place = cfg.place
        self._cfg = cfg
        self._error: type[Exception] = redis.RedisError
        self._no_room: type[Exception] = redis.exceptions.OutOfMemoryError
        tls: dict[str, Any] = {}
        if cfg.url.startswith("rediss://"):
            files = {
                "ssl_ca_certs": cfg.ca_file,
                "ssl_certfile": cfg.cert_file,
                "ssl_keyfile": cfg.key_file,
            }
            tls = {name: str(path) for name, path in files.items() if path is not None}
        try:
            self._client: Any = redis.Redis.from_url(
                cfg.url,
                socket_timeout=cfg.timeout_s,
                socket_connect_timeout=cfg.timeout_s,
                health_check_interval=30,
                **tls,
            )
        except ValueError:  # whose words may hold a part of the password
            raise ConfigError(
                f"redis url {cfg.shown!r} cannot be read; write redis://:PASSWORD@HOST:PORT/0, "
                "rediss:// for TLS or unix:///PATH, with % escapes in the password"
            ) from None

    def size(self, key: ChunkKey) -> int | None:
        return int(self._call("strlen", self._name(key))) or None

    def open(self, key: ChunkKey) -> PreludeReader | None:
        size, prelude = self._range(key, 0, HEAD_BYTES)
        return PreludeReader(size, prelude, partial(self._read, key, size)) if size else None

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        try:
            self._call("set", self._name(key), b"".join(parts), ex=self._cfg.ttl_s)
        except TierError as error:
            if isinstance(error.__cause__, self._no_room):
                return False
            raise
        return True

    def delete(self, key: ChunkKey) -> bool:
        return bool(self._call("unlink", self._name(key)))

    def quarantine(self, key: ChunkKey) -> bool:
        return self.delete(key)

    def scan(self) -> Iterator[StoredObject]:
        for key in self._keys():
            size = self.size(key)
            if size is not None:
                yield StoredObject(key, size, 0.0)

    def tagged_keys(self, tags: Collection[ChunkTag]) -> list[ChunkKey]:
        return among(self._keys(), tags) if tags else []

    def check(self) -> None:
        self._call("strlen", f"{self._cfg.prefix}check")  # as a read would: database and rights too

    def close(self) -> None:
        self._client.close()

    def _keys(self) -> Iterator[ChunkKey]:
        """Keys of all objects, each once."""
        seen: set[ChunkKey] = set()  # SCAN may name a key twice
        cursor = 0
        pattern = _escape_prefix(self._cfg.prefix) + "*"
        while True:
            cursor, names = self._call("scan", cursor, match=pattern, count=_SCAN_COUNT)
            for name in names:
                key = parse_key(name.decode(errors="replace").removeprefix(self._cfg.prefix))
                if key is not None and key not in seen:
                    seen.add(key)
                    yield key
            if cursor == 0:
                return

    def _range(self, key: ChunkKey, offset: int, size_bytes: int) -> tuple[int, bytes]:
        """How long the object is, 0 if it is not here, and some of its bytes, at one moment."""
        pipe = self._client.pipeline(transaction=True)
        pipe.strlen(self._name(key))
        pipe.getrange(self._name(key), offset, offset + size_bytes - 1)
        size, data = self._guard(pipe.execute)
        return int(size), data

    def _read(self, key: ChunkKey, size_bytes: int, offset: int, out: memoryview) -> None:
        size, data = self._range(key, offset, len(out))
        if not size:
            raise TierError(f"{key.hex()[:16]}… left the server while it was read")
        if size != size_bytes:
            raise TierCorrupt(f"object went from {size_bytes} to {size} bytes while it was read")
        if len(data) != len(out):
            raise TierCorrupt(f"object gave {len(data)} bytes at {offset}, wanted {len(out)}")
        out[:] = data

    def _name(self, key: ChunkKey) -> str:
        return self._cfg.prefix + key.hex()

    def _call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        return self._guard(lambda: getattr(self._client, command)(*args, **kwargs))

    def _guard(self, call: Any) -> Any:
        try:
            return call()
        except (self._error, OSError) as error:
            raise TierError(
                f"redis does not answer as it should: {error_words(error)}; check the server, the "
                f"url and the timeout ({self._cfg.timeout_s:g} s)"
            ) from error


def _escape_prefix(prefix: str) -> str:
    """Escape a prefix so that SCAN takes it literally."""
    return "".join(f"\\{c}" if c in "*?[]^\\" else c for c in prefix)
