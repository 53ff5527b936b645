"""Chunk objects in a bucket of an S3-compatible store, shared between machines.

    <prefix><chunk tag>/<key>

One PUT per object, one ranged GET per run of layers. The first 64 KiB come with `open`: a header
and most extras need no round trip of their own. The tag comes first, so that all KV of a chunk is
one short listing.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from kvweave.errors import ConfigError, TierCorrupt, TierError, error_words
from kvweave.kv.format.header import Buffer
from kvweave.kv.format.keys import ChunkKey, ChunkTag, parse_key, tag_of
from kvweave.kv.tiers.base import PreludeReader, StoredObject
from kvweave.kv.tiers.config import S3TierConfig

_PRELUDE_BYTES = 1 << 16
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_EMPTY = {"416", "InvalidRange"}  # a range of an object without bytes
_CHANGED = {"412", "PreconditionFailed"}


class S3Tier:
    """Safe from many threads: a boto3 client is. Connects on first use."""

    durable: ClassVar[bool] = True
    remote: ClassVar[bool] = True
    writes_at_once: ClassVar[int] = 1
    best_read_bytes: ClassVar[int] = 4 << 20  # a request costs tens of milliseconds

    def __init__(self, cfg: S3TierConfig) -> None:
        try:
            import boto3
            import botocore.config
            import botocore.exceptions
        except ImportError:
            raise ConfigError(
                "an s3 tier needs the boto3 package; run: pip install 'kvweave[remote]'"
            ) from None
        self.name = "s3"
        self.place = cfg.place
        self._cfg = cfg
        self._client_error: type[Exception] = botocore.exceptions.ClientError
        self._boto_error: type[Exception] = botocore.exceptions.BotoCoreError
        try:
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=cfg.endpoint_url,
                region_name=cfg.region,
                config=botocore.config.Config(
                    connect_timeout=cfg.timeout_s,
                    read_timeout=cfg.timeout_s,
                    retries={"total_max_attempts": 1},  # a retry outlasts the request's patience
                    max_pool_connections=cfg.max_connections,
                ),
            )
        except (ValueError, self._boto_error) as error:
            raise ConfigError(
                f"s3 bucket {cfg.bucket!r} cannot be used: {error_words(error)}; "
                "check the endpoint (http://HOST:PORT) and the region"
            ) from error

    def size(self, key: ChunkKey) -> int | None:
        reply = self._call("head_object", key)
        return None if reply is None else int(reply["ContentLength"])

    def open(self, key: ChunkKey) -> PreludeReader | None:
        reply = self._call("get_object", key, Range=f"bytes=0-{_PRELUDE_BYTES - 1}")
        if reply is None:
            return None
        length = int(reply["ContentLength"])
        # a server that ignores ranges gives the whole object and no ContentRange
        total = reply.get("ContentRange", f"/{length}").rpartition("/")[2]
        if not total.isdecimal() or length > int(total):
            reply["Body"].close()
            raise TierError(f"s3 says {key.hex()[:16]}… has {total!r} bytes and sends {length}")
        size, prelude = int(total), bytearray(length)
        self._fill(reply, memoryview(prelude))
        return PreludeReader(size, bytes(prelude), partial(self._read, key, reply["ETag"], size))

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        self._call("put_object", key, Body=b"".join(parts))
        return True

    def delete(self, key: ChunkKey) -> bool:
        here = self.size(key) is not None  # DeleteObject does not say
        self._call("delete_object", key)
        return here

    def quarantine(self, key: ChunkKey) -> bool:
        return self.delete(key)

    def scan(self) -> Iterator[StoredObject]:
        for item in self._list_objects(""):
            key = parse_key(item["Key"].rpartition("/")[2])
            if key is not None:
                yield StoredObject(key, int(item["Size"]), item["LastModified"].timestamp())

    def tagged_keys(self, tags: Collection[ChunkTag]) -> list[ChunkKey]:
        names = [item["Key"] for tag in tags for item in self._list_objects(f"{tag.hex()}/")]
        keys = (parse_key(name.rpartition("/")[2]) for name in names)
        return [key for key in keys if key is not None]

    def check(self) -> None:
        self._guard(lambda: self._client.head_bucket(Bucket=self._cfg.bucket))

    def close(self) -> None:
        self._client.close()

    def _list_objects(self, below: str) -> Iterator[Any]:
        """List what the bucket has below our prefix and `below`, page by page."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._cfg.bucket, Prefix=f"{self._cfg.prefix}{below}"
        )
        iterator = iter(pages)
        while (page := self._guard(lambda: next(iterator, None))) is not None:
            yield from page.get("Contents", ())

    def _read(
        self, key: ChunkKey, etag: str, size_bytes: int, offset: int, out: memoryview
    ) -> None:
        """Read from the version of an object that has this ETag."""
        end = offset + len(out)
        if end > size_bytes:
            raise TierCorrupt(f"object ends at {size_bytes}, wanted {end}")
        reply = self._call("get_object", key, Range=f"bytes={offset}-{end - 1}", IfMatch=etag)
        if reply is None:
            raise TierError(f"{key.hex()[:16]}… left the bucket while it was read")
        self._fill(reply, out)

    def _name(self, key: ChunkKey) -> str:
        return f"{self._cfg.prefix}{tag_of(key).hex()}/{key.hex()}"

    def _call(self, operation: str, key: ChunkKey, **kwargs: Any) -> Any:
        """The reply, None if there is no such object."""
        try:
            return self._guard(
                lambda: getattr(self._client, operation)(
                    Bucket=self._cfg.bucket, Key=self._name(key), **kwargs
                )
            )
        except TierError as error:
            # None where the connection broke before there was one
            response: Any = getattr(error.__cause__, "response", None) or {}
            code = response.get("Error", {}).get("Code", "")
            if code in _ABSENT:
                return None
            if code in _EMPTY:
                raise TierCorrupt(f"{key.hex()[:16]}… ends before the bytes asked for") from error
            if code in _CHANGED:
                raise TierError(f"{key.hex()[:16]}… was replaced while it was read") from error
            raise

    def _fill(self, reply: Any, out: memoryview) -> None:
        """Copy a reply's body into `out`, piece by piece, never holding it whole."""
        done = 0
        body = reply["Body"]
        try:
            for piece in body.iter_chunks(1 << 18):
                if done + len(piece) > len(out):
                    raise TierCorrupt(f"reply has more than the {len(out)} bytes asked for")
                out[done : done + len(piece)] = piece
                done += len(piece)
        except (self._boto_error, OSError) as error:
            raise TierError(f"s3 broke off: {error_words(error)}") from error
        finally:
            body.close()
        if done != len(out):
            raise TierCorrupt(f"reply has {done} bytes, wanted {len(out)}")

    def _guard(self, call: Any) -> Any:
        try:
            return call()
        except (self._client_error, self._boto_error, OSError) as error:
            raise TierError(
                f"s3 bucket {self._cfg.bucket!r} does not answer as it should: "
                f"{error_words(error)}; check the endpoint, the bucket, the credentials"
            ) from error
