"""The fault matrix: tier by tier, what is being done by what goes wrong, end to end over HTTP.

Each fault is put in, something is asked, the fault is taken out. Right is: one of the two right
answers (or an error of one line), within a bound, something in /metrics that says what happened,
and the tier in use again without a restart. Only faults that a proxy or a hook saw strike count.
"""

import multiprocessing as mp
import os
import queue
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from common.files import REPO
from reliability.fault_hooks import (
    ALWAYS,
    DEAD,
    FORWARD,
    NO_NUMBERS,
    OUT_OF_MEMORY,
    SELECT,
)
from reliability.fault_proxies import Layers, S3Proxy, ValkeyProxy, closing_proxy
from reliability.fault_rows import FaultRow, as_json, line_of
from reliability.fault_rules import (
    CORRUPTED,
    ERROR,
    EVICT,
    FORBIDDEN,
    FULL,
    GONE,
    HANG,
    LOAD_FIRST,
    LOAD_MIDDLE,
    LOOKUP,
    OPS,
    SAVE,
    SLOW,
    START,
    TRUNCATED,
    FaultRule,
    spoil,
)
from reliability.fault_server import Ended, FaultServer, Reply, grown
from reliability.fault_world import WORLD, Document, FaultWorld, K, learn_truths, make_world, must

RECOVERY_S = 150.0  # within which a tier must be in use again
LOADS = (LOAD_FIRST, LOAD_MIDDLE)
HOST_BYTES = 16 << 20  # of the host lane: a few chunks
SMALL_HOST = str(64 << 10)  # no chunk fits: every request reads the tier below
# seconds that a request may take longer, by tier: what docs/store.md promises, and a busy machine
BOUND_S = {"disk": 40.0, "valkey": 15.0, "s3": 15.0, "host": 15.0, "engine": 40.0}
UPLOAD_BOUND_S = 75.0  # that waits for KV to be written: `write_deadline_s` and a little
STARTUP_BOUND_S = 60.0
# what nothing need be counted of: late and within the deadline; a wrong size, which only estimates
# use: what is read has its size in its header; a wrong number of objects removed, which none do
QUIET = {(op, SLOW) for op in (*OPS, FORWARD)} | {(LOOKUP, CORRUPTED), (EVICT, CORRUPTED)}


# ---- what can go wrong where

REMOTE = [
    (op, kind)
    for op in (LOOKUP, *LOADS, SAVE, EVICT, START)
    for kind in (SLOW, HANG, ERROR, TRUNCATED, CORRUPTED, FULL, FORBIDDEN, GONE)
    if kind != FULL or op == SAVE  # only a write needs room
]
DISK = [
    (op, kind)
    for op in (LOOKUP, *LOADS, SAVE, EVICT, START)
    for kind in (SLOW, HANG, ERROR, TRUNCATED, CORRUPTED, FULL, FORBIDDEN, GONE)
    if (kind != FULL or op == SAVE)
    and not (kind in (TRUNCATED, CORRUPTED) and op in (LOOKUP, EVICT))  # no bytes to be changed
    and not (kind in (SLOW, HANG, ERROR) and op == START)  # a start lists names, which no hook has
]
HOST = [
    *((op, kind) for op in (LOAD_FIRST, SAVE) for kind in (SLOW, HANG, ERROR, FULL)),
    *((EVICT, kind) for kind in (SLOW, HANG, FULL)),
    (START, FULL),
]
ENGINE = [
    *((FORWARD, kind) for kind in (OUT_OF_MEMORY, DEAD, NO_NUMBERS, ALWAYS, SLOW)),
    (SELECT, ERROR),
    (FORWARD, HANG),
    ("admission", "out of pages"),
]
COMBINATIONS = {"valkey": REMOTE, "s3": REMOTE, "disk": DISK, "host": HOST, "engine": ENGINE}


class Lane(ABC):
    """Faults of one tier, one after another, against one server."""

    tier: ClassVar[str]
    name: ClassVar[str]  # of the tier in /metrics and explain
    hooked: ClassVar[bool] = False

    def __init__(self, world: FaultWorld, folder: Path, env: dict[str, str]) -> None:
        self.world = world
        self.on_row: Callable[[FaultRow], None] = lambda row: None  # hears of those that struck
        self.lost: set[str] = set()  # documents that were acknowledged and are not there
        self._next = 0
        folder.mkdir(parents=True, exist_ok=True)
        common = {
            "KVWEAVE_STORE_CODEC": "raw",
            "KVWEAVE_LIBRARY_BACKGROUND_KV": "always",
            "KVWEAVE_QUALITY_AUDIT_SHARE": "0",
            "KVWEAVE_ENGINE_TREE_SHARE": "0",
            "KVWEAVE_SERVER_OPEN_KBS": "1",
        }
        self.server = FaultServer(
            folder, world.model, world.embedder, {**common, **env}, hooked=self.hooked
        )
        self.usual_s = {"ask": 0.1, "upload": 0.5, "delete": 0.2}

    # ---- a lane's own

    @abstractmethod
    def inject(self, rule: FaultRule, document: Document) -> None:
        """Put the fault in."""

    @abstractmethod
    def clear(self) -> int:
        """Take the fault out; returns how often it struck."""

    def learn_layers(self) -> None:  # noqa: B027 - most lanes have none
        """Where layers lie in objects, for faults that hit one."""

    # ---- the course of things

    def prepare(self) -> None:
        self.server.start()
        for document in self.world.base:
            must(self.server.upload(document.title, document.text))
        self.learn_layers()
        for document in self.world.base:
            must(self.server.ask(document.question, K))
        self.usual_s["ask"] = _median(
            must(self.server.ask(d.question, K)).seconds for d in self.world.base
        )
        spare = self.world.spares[0]
        self.usual_s["upload"] = must(self.server.upload(spare.title, spare.text)).seconds
        self.usual_s["delete"] = must(self.server.delete(spare.title)).seconds

    def run(self, plan: Sequence[tuple[str, str, int]]) -> None:
        """Faults by op, kind and seed."""
        for op, kind, seed in plan:
            row = self._rule_row(op, kind, seed)
            try:
                self._fault(row)
            except Exception as error:  # the matrix goes on; the row says what happened
                row.problems.append(f"{type(error).__name__}: {error}"[:300])
                traceback.print_exc()
                self._mend()
            if row.fired:
                self.on_row(row)
            print(line_of(row), flush=True)
        self.check_documents()

    def check_documents(self) -> None:
        there = self.server.documents()
        self.lost |= {d.title for d in self.world.base if d.title not in there}

    def close(self) -> None:
        with suppress(OSError):
            self.clear()
        if self.server.stop() == float("inf"):
            print(f"{self.tier}: the server did not stop in order", flush=True)

    def _rule_row(self, op: str, kind: str, seed: int) -> FaultRow:
        # of several objects that are saved, only some are read by the question behind
        is_lasting = kind in (GONE, HANG) or (op, kind) == (SAVE, CORRUPTED)
        times = None if seed % 2 == 0 or is_lasting else 1
        return FaultRow(self.tier, op, kind, seed, times)

    def _rule(self, row: FaultRow) -> FaultRule:
        rng = random.Random(row.seed)
        delay_s = rng.choice([0.05, 0.15, 0.4, 1.0])
        return FaultRule(row.op, row.kind, row.times, delay_s, row.seed)

    def _fault(self, row: FaultRow) -> None:
        if row.op == START:
            self._at_start(row)
        elif row.op == SAVE or (row.op == LOOKUP and self.tier == "disk"):
            self._at_save(row)
        elif row.op == EVICT:
            self._at_evict(row)
        else:
            self._at_load(row)

    def _at_load(self, row: FaultRow) -> None:
        document = self.world.base[row.seed % len(self.world.base)]
        if row.op == LOOKUP:
            time.sleep(2.2)  # where a chunk is, is remembered for 2 s
        before = self.server.metrics()
        self.inject(self._rule(row), document)
        reply = self.server.ask(document.question, K)
        again = self.server.ask(document.question, K)  # beside a tier that may rest by now
        row.fired = self.clear()
        cleared_s = time.monotonic()
        self._note(row, reply, "ask", document)
        self._note_answer(row, again, document, "the next answer")
        row.recovered_s = self._recovery(document, K, cleared_s, row)
        self._count(row, before)

    def _at_save(self, row: FaultRow) -> None:
        document = self._spare()
        before = self.server.metrics()
        self.inject(self._rule(row), document)
        reply = self.server.upload(document.title, document.text)
        self.damage_saved(row, document)
        asked = self.server.ask(document.question, 1)
        row.fired = self.clear()
        cleared_s = time.monotonic()
        self._note(row, reply, "upload", None)
        self._note_answer(row, asked, document, "the answer from it")
        if reply.status == 200:
            if document.title not in self.server.documents():
                self.lost.add(document.title)
                row.problems.append("the document is not there")
            row.recovered_s = self._recovery(document, 1, cleared_s, row)
        self._count(row, before)
        if document.title in self.server.documents():
            must(self.server.delete(document.title))

    def damage_saved(self, row: FaultRow, document: Document) -> None:  # noqa: B027 - as above
        """Do to what was saved what `inject` could not do to its saving."""

    def _at_evict(self, row: FaultRow) -> None:
        document = self._spare()
        must(self.server.upload(document.title, document.text))
        # there must be something to delete: a tier that rests after the fault before takes nothing
        if self._recovery(document, 1, time.monotonic(), row) is None:
            return
        before = self.server.metrics()
        self.inject(self._rule(row), document)
        reply = self.server.delete(document.title)
        asked = self.server.ask(document.question, 1)  # finds another one now
        row.fired = self.clear()
        cleared_s = time.monotonic()
        self._note(row, reply, "delete", None)
        if asked.status == 200 and document.title in asked.sources:
            row.problems.append("a deleted document was answered from")
        if reply.status == 200 and document.title in self.server.documents():
            row.problems.append("the deleted document is still listed")
        row.recovered_s = self._recovery(self.world.base[0], K, cleared_s, row)
        self._count(row, before)
        if document.title in self.server.documents():
            must(self.server.delete(document.title))

    def _at_start(self, row: FaultRow) -> None:
        document = self.world.base[row.seed % len(self.world.base)]
        self.server.stop()
        self.inject(self._rule(row), document)
        began_s = time.monotonic()
        try:
            self.server.start(300)
            row.seconds = time.monotonic() - began_s
            reply = self.server.ask(document.question, K)
            row.status = reply.status
            self._note_answer(row, reply, document, "the answer")
            row.answer = row.answer or self.world.truths[document.title].judge(reply)
            row.whys = list(reply.whys)
            row.fired = self.clear()
        except Ended as ended:
            row.seconds = time.monotonic() - began_s
            row.fired = max(1, self.clear())
            row.answer, row.error = "error", _last_line(ended.said)
            if ended.code != 2 or "Traceback" in ended.said:
                row.problems.append(f"it ended with {ended.code}: {row.error}")
        except TimeoutError as error:
            row.seconds = time.monotonic() - began_s
            row.fired = self.clear()
            row.status = -1
            row.problems.append(f"stuck: {error}")
        cleared_s = time.monotonic()
        usual_s = self.usual_start_s
        if not self.server.is_alive:  # as long as a start takes now, beside whatever else runs
            usual_s = max(usual_s, self.server.start())
        row.extra_s = max(0.0, row.seconds - usual_s)
        if row.extra_s > STARTUP_BOUND_S:
            row.problems.append(f"{row.extra_s:.1f} s more")
        row.recovered_s = self._recovery(document, K, cleared_s, row)
        self.learn_layers()  # hooks of a new process know nothing
        self.check_documents()

    usual_start_s: float = 15.0

    def _spare(self) -> Document:
        self._next += 1
        return self.world.spares[self._next % len(self.world.spares)]

    def _note(self, row: FaultRow, reply: Reply, what: str, document: Document | None) -> None:
        row.status, row.seconds, row.error = reply.status, reply.seconds, reply.error
        row.whys = list(reply.whys)
        row.extra_s = max(0.0, reply.seconds - self.usual_s[what])
        bound_s = UPLOAD_BOUND_S if what == "upload" else BOUND_S[self.tier]
        if reply.status == -1:
            row.problems.append("stuck")
        elif row.extra_s > bound_s:
            row.problems.append(f"{row.extra_s:.1f} s more, over {bound_s:g}")
        if reply.status == 200:
            if document is None:
                row.answer = "done"
                return
            row.answer = self.world.truths[document.title].judge(reply)
            if row.answer == "wrong":
                row.problems.append("wrong answer")
            return
        row.answer = "error"
        self._check_error(row, reply)

    def _check_error(self, row: FaultRow, reply: Reply) -> None:
        """An error is one line with a status of its own, and tells no path."""
        if reply.status in (0, -1):
            row.problems.append(f"no reply: {reply.error}")
        elif not reply.error or "\n" in reply.error or str(self.server.folder) in reply.error:
            row.problems.append(f"an error that is no clear line: {reply.error[:80]!r}")

    def _note_answer(self, row: FaultRow, reply: Reply, document: Document, which: str) -> None:
        if reply.status != 200:
            row.problems.append(f"{which}: {reply.status} {reply.error}"[:200])
        elif self.world.truths[document.title].judge(reply) == "wrong":
            row.problems.append(f"{which} is wrong")

    def _recovery(self, document: Document, k: int, since_s: float, row: FaultRow) -> float | None:
        """Seconds until an answer comes from the tier again, all of it, and is right."""
        until_s = time.monotonic() + RECOVERY_S
        while time.monotonic() < until_s:
            reply = self.server.ask(document.question, k)
            if reply.status != 200:
                row.problems.append(f"afterwards: {reply.status} {reply.error}"[:200])
                return None
            if self.world.truths[document.title].judge(reply) == "wrong":
                row.problems.append("wrong answer afterwards")
                return None
            if self.is_whole(reply):
                return time.monotonic() - since_s
            time.sleep(1.0)
        row.problems.append(f"not in use again after {RECOVERY_S:g} s: {reply.tiers} {reply.whys}")
        return None

    def is_whole(self, reply: Reply) -> bool:
        """Whether an answer shows that the tier is in use."""
        return bool(reply.tiers) and all(tier == self.name for tier in reply.tiers)

    def _count(self, row: FaultRow, before: dict[str, float]) -> None:
        row.counters = {
            name: value
            for name, value in grown(before, self.server.metrics()).items()
            if not name.startswith("answers_total") or "failed" in name
        }
        # what host memory refuses in every lane is no news
        told = [name for name in row.counters if not name.startswith("kv_admissions_refused")]
        if not (told or row.whys or row.error) and (row.op, row.kind) not in QUIET:
            row.problems.append("no counter tells of it")

    def _mend(self) -> None:
        """After a row that went astray: nothing injected, a server that runs."""
        with suppress(OSError):
            self.clear()
        if not self.server.is_alive:
            self.server.start()
            self.learn_layers()


class ProxyLane(Lane):
    """A tier behind a proxy."""

    proxy: ValkeyProxy | S3Proxy

    def inject(self, rule: FaultRule, document: Document) -> None:
        self.proxy.strikes.set(rule)
        if rule.kind == GONE and isinstance(self.proxy, ValkeyProxy):
            self.proxy.cut_all()

    def clear(self) -> int:
        return self.proxy.strikes.clear()


class ValkeyLane(ProxyLane):
    tier, name = "valkey", "redis"

    def __init__(self, world: FaultWorld, folder: Path, port: int, proxy: ValkeyProxy) -> None:
        self.proxy, self._port = proxy, port
        url = f"redis://127.0.0.1:{proxy.port}/0"
        env = {"KVWEAVE_STORE_REDIS_URL": url, "KVWEAVE_STORE_DISK_BYTES": "0"}
        super().__init__(world, folder, {**env, "KVWEAVE_STORE_HOST_BYTES": SMALL_HOST})

    def learn_layers(self) -> None:
        import redis

        with redis.Redis(port=self._port) as client:
            name = next(iter(client.keys("*")))
            self.proxy.layers = layers_of(name.decode(), client.get(name))


class S3Lane(ProxyLane):
    tier, name = "s3", "s3"

    def __init__(self, world: FaultWorld, folder: Path, endpoint: str, proxy: S3Proxy) -> None:
        self.proxy, self._endpoint = proxy, endpoint
        self._bucket = f"chunks-{folder.name}"
        _s3(endpoint).create_bucket(Bucket=self._bucket)
        env = {
            **S3_ENV,
            "KVWEAVE_STORE_S3_URL": f"s3://{self._bucket}/faults",
            "KVWEAVE_STORE_S3_ENDPOINT": proxy.url,
            "KVWEAVE_STORE_S3_REGION": "us-east-1",
            "KVWEAVE_STORE_DISK_BYTES": "0",
            "KVWEAVE_STORE_HOST_BYTES": SMALL_HOST,
        }
        super().__init__(world, folder, env)

    def learn_layers(self) -> None:
        client = _s3(self._endpoint)
        name = client.list_objects_v2(Bucket=self._bucket)["Contents"][0]["Key"]
        data = client.get_object(Bucket=self._bucket, Key=name)["Body"].read()
        self.proxy.layers = layers_of(name, data)


class DiskLane(Lane):
    """What a program can do to files is done to them; slow, hanging and failing calls by hooks."""

    tier, name, hooked = "disk", "disk", True

    def __init__(self, world: FaultWorld, folder: Path) -> None:
        super().__init__(world, folder, {"KVWEAVE_STORE_HOST_BYTES": SMALL_HOST})
        self._undo: list[Callable[[], None]] = []
        self._struck = 0  # by what was done to files
        self._layers = Layers()

    @property
    def _root(self) -> Path:
        return next(self.server.kbs.rglob("objects")).parent

    def _objects(self) -> list[Path]:
        """Newest last."""
        found = (self._root / "objects").rglob("*.kv")  # not what lies in quarantine
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def learn_layers(self) -> None:
        if not self._layers.layer_bytes:
            path = self._objects()[0]
            self._layers = layers_of(path.name, path.read_bytes())
        self.server.order("layers", layers=self._layers)

    def inject(self, rule: FaultRule, document: Document) -> None:
        self._struck, self._undo = 0, []
        if rule.kind in (SLOW, HANG, ERROR, FULL):
            self.server.set_rule(rule)
            return
        if rule.kind == GONE:
            self._move_away()
        elif rule.kind == FORBIDDEN:
            self._forbid(rule, document)
        elif rule.op in LOADS or rule.op == START:
            files = self._files_of(document, rule)
            for path in files if rule.times is None else files[:1]:
                self._damage(path, rule)

    def clear(self) -> int:
        fired = self._struck
        for undo in self._undo:
            undo()
        self._undo = []
        if self.server.is_alive:
            fired += self.server.order("clear")
        return fired

    def damage_saved(self, row: FaultRow, document: Document) -> None:
        if row.kind in (TRUNCATED, CORRUPTED):
            self._damage(self._objects()[-1], self._rule(row))

    def _files_of(self, document: Document, rule: FaultRule) -> list[Path]:
        """What a question reads; while no server runs: all there is."""
        if not self.server.is_alive:
            return self._objects()
        self.server.order("opened")
        must(self.server.ask(document.question, K))
        return [Path(name) for name in dict.fromkeys(self.server.order("opened"))]

    def _damage(self, path: Path, rule: FaultRule) -> None:
        """In place, as a bad medium does."""
        size = path.stat().st_size
        start = self._layers.middle if rule.op == LOAD_MIDDLE else self._layers.first
        at = start + random.Random(rule.seed).randrange(self._layers.layer_bytes)
        if at >= size:  # cut by an earlier fault, and not read since
            return
        spoil(path, at, rule.kind, rule.seed)
        self._struck += 1

    def _forbid(self, rule: FaultRule, document: Document) -> None:
        root = self._root
        if rule.op in LOADS:
            places, mode = self._files_of(document, rule), 0o000
        elif rule.op in (LOOKUP, START):
            places, mode = [root / "objects"], 0o000
        else:
            folders = [path for path in (root / "objects").rglob("*") if path.is_dir()]
            places, mode = [root / "tmp", root / "objects", *folders], 0o555
        for path in places:
            before = path.stat().st_mode
            path.chmod(mode)
            self._undo.append(lambda path=path, before=before: _chmod(path, before))  # type: ignore[misc]
        self._struck += 1

    def _move_away(self) -> None:
        root = self._root
        away = root.with_name("away")
        root.rename(away)

        def back() -> None:
            if root.exists():  # made again meanwhile
                shutil.copytree(root, away, dirs_exist_ok=True)
                shutil.rmtree(root)
            away.rename(root)

        self._undo.append(back)
        self._struck += 1


class HostLane(DiskLane):
    """Host memory over a disk: room for a few chunks, so that requests load and push out."""

    tier, name = "host", "host"

    def __init__(self, world: FaultWorld, folder: Path) -> None:
        super().__init__(world, folder)
        # lru: what comes is let in, however little it is worth
        self.server.env_more = {
            "KVWEAVE_STORE_HOST_BYTES": str(HOST_BYTES),
            "KVWEAVE_STORE_POLICY": "lru",
        }

    def inject(self, rule: FaultRule, document: Document) -> None:
        self._struck, self._undo = 0, []
        if rule.op == START:
            self.server.env_more["KVWEAVE_STORE_HOST_BYTES"] = str(1 << 60)
            self._struck = 1
        elif rule.kind == HANG:  # the process does not get on, as in a machine that swaps
            for other in self.world.base[3:6]:
                self.server.ask(other.question, K)
            self._pause(1.0 + rule.seed % 3)
        else:
            for other in self.world.base[3:6]:  # push out what is asked for next
                self.server.ask(other.question, K)
            op = EVICT if rule.op == EVICT else SAVE
            self.server.set_rule(FaultRule(op, rule.kind, rule.times, rule.delay_s, rule.seed))

    def _pause(self, seconds: float) -> None:
        pid = self.server.pid

        def pause() -> None:
            time.sleep(0.05)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=pause)
        thread.start()
        self._undo.append(thread.join)
        self._struck += 1

    def clear(self) -> int:
        self.server.env_more["KVWEAVE_STORE_HOST_BYTES"] = str(HOST_BYTES)
        return super().clear()

    def _at_evict(self, row: FaultRow) -> None:
        """What is evicted is pushed out by other chunks."""
        self._at_load(row)

    def is_whole(self, reply: Reply) -> bool:
        return bool(reply.tiers) and all(tier in ("host", "disk") for tier in reply.tiers)

    def _count(self, row: FaultRow, before: dict[str, float]) -> None:
        super()._count(row, before)
        if row.kind == HANG and "no counter tells of it" in row.problems:
            row.problems.remove("no counter tells of it")  # a process cannot tell that it stood


class EngineLane(DiskLane):
    """Faults of the engine: what a device, a selector or a single request does to it."""

    tier, name = "engine", "disk"

    def __init__(self, world: FaultWorld, folder: Path) -> None:
        super().__init__(world, folder)
        self.server.env_more = {
            "KVWEAVE_STORE_HOST_BYTES": str(256 << 20),
            "KVWEAVE_SERVER_ENGINE_S": "5",
            "KVWEAVE_ENGINE_POOL_TOKENS": "2048",
        }

    def is_whole(self, reply: Reply) -> bool:
        return reply.status == 200

    def _fault(self, row: FaultRow) -> None:
        document = self.world.base[row.seed % len(self.world.base)]
        before = self.server.metrics()
        match row.kind:
            case "out of pages":
                self._crowd(row)
            case "hang":
                self._hang(row, document)
            case "a request that always fails":
                self._always(row, document)
            case _:
                reuse = "weave" if row.op == SELECT else "full"
                times = row.times or 2  # three in a row are a device that is gone
                self.server.set_rule(FaultRule(row.op, row.kind, times, 1.0, row.seed))
                reply = self.server.ask(document.question, K, reuse)
                row.fired = self.clear()
                self._note(row, reply, "ask", document)
        cleared_s = time.monotonic()
        row.recovered_s = self._recovery(document, K, cleared_s, row)
        if row.kind != HANG:
            self._count(row, before)

    def _crowd(self, row: FaultRow) -> None:
        """More prompts at once than the pool has pages for; and one that never fits."""
        documents = [self.world.base[(row.seed + n) % len(self.world.base)] for n in range(12)]
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda d: self.server.ask(d.question, K, "full"), documents))
        self.usual_s["crowd"] = len(documents) * self.usual_s["ask"]  # where all wait in turn
        for document, reply in zip(documents, replies, strict=True):
            self._note(row, reply, "crowd", document)
        huge = self.server.chat(
            {"messages": [{"role": "user", "content": "node " * 3000}], "max_tokens": 4}
        )
        row.fired = 1
        if huge.status != 400:
            row.problems.append(f"a prompt that never fits: {huge.status} {huge.error}")
        row.error = huge.error

    def _always(self, row: FaultRow, document: Document) -> None:
        """Others are served beside it, and the server stays."""
        marked = self._mark()
        self.server.set_rule(FaultRule(FORWARD, ALWAYS, None, 0.0, row.seed), marked=marked)
        body = {"messages": [{"role": "user", "content": "\u00e9"}], "max_tokens": 4}
        bad = [self.server.chat(body) for _ in range(5)]
        reply = self.server.ask(document.question, K, "full")
        time.sleep(2.5)  # the watch has looked, and tried one
        row.fired = self.clear()
        self._note(row, reply, "ask", document)
        if any(each.status != 500 for each in bad):
            row.problems.append(f"those that fail: {[each.status for each in bad]}")
        row.error = bad[0].error

    def _mark(self) -> int:
        """A token that only the failing request has."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.world.model / "tokenizer.json"))
        return int(tokenizer.encode("\u00e9").ids[0])

    def _hang(self, row: FaultRow, document: Document) -> None:
        """A pass that never ends: all who wait hear of it, the process ends, another serves."""
        self.server.set_rule(FaultRule(FORWARD, HANG, None, 0.0, row.seed))
        reply = self.server.ask(document.question, K, "full")
        row.fired, row.status, row.seconds = 1, reply.status, reply.seconds
        row.extra_s, row.answer, row.error = reply.seconds, "error", reply.error
        if reply.status != 503:
            row.problems.append(f"{reply.status} {reply.error}")
        code = self.server.wait(90)
        if code != 70:
            row.problems.append(f"the process ended with {code}")
            self.server.kill()
        self.server.start()
        self.learn_layers()


S3_ENV = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def _s3(endpoint: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def layers_of(name: str, data: bytes) -> Layers:
    """Where the layers of an object lie; its name ends with its key."""
    from kvweave.kv.format.header import parse_header
    from kvweave.kv.format.keys import parse_key

    key = parse_key(re.split("[:/]", name)[-1].removesuffix(".kv"))
    assert key is not None, f"{name} is no object of ours"
    layers = parse_header(data, key, len(data)).layers
    first, second, middle = layers[0], layers[1], layers[len(layers) // 2]
    return Layers(first.offset, second.offset, middle.offset, first.size_bytes)


Plan = Sequence[tuple[str, str]]  # op and kind


def run_faults(
    folder: Path,
    tiers: Iterable[str] = tuple(COMBINATIONS),
    reps: int = 3,
    only: Callable[[str, str, str], bool] = lambda tier, op, kind: True,
    on_rows: Callable[[dict[str, Any]], None] = lambda found: None,
    seed: int = 0,
) -> dict[str, Any]:
    """All combinations, `reps` times with other seeds. Each tier has a server and a process of its
    own. `only` says which of them, by tier, op and kind; `on_rows` hears of what is found so far.
    """
    world = make_world(WORLD)
    reference = FaultServer(
        folder / "reference",
        world.model,
        world.embedder,
        {"KVWEAVE_STORE_CODEC": "raw", "KVWEAVE_LIBRARY_BACKGROUND_KV": "always"},
        hooked=False,
    )
    usual_start_s = reference.start()
    try:
        learn_truths(world, reference)
    finally:
        reference.stop()
    context = mp.get_context("spawn")
    news: Any = context.Queue()
    found: dict[str, Any] = {"rows": [], "lost": [], "failed": []}
    running = []
    for tier in tiers:
        plan = [(op, kind) for op, kind in COMBINATIONS[tier] if only(tier, op, kind)]
        job = TierJob(tier, plan, reps, usual_start_s, seed)
        running.append(context.Process(target=drive_tier, args=(world, folder, job, news)))
        running[-1].start()
    while any(process.is_alive() for process in running) or not news.empty():
        try:
            what, value = news.get(timeout=1.0)
        except queue.Empty:
            continue
        found[what].append(value)
        on_rows(found)
    for process in running:
        process.join()
    return found


class TierJob(NamedTuple):
    """The faults of one tier."""

    tier: str
    plan: Plan
    reps: int
    usual_start_s: float
    seed: int


def drive_tier(world: FaultWorld, folder: Path, job: TierJob, news: Any) -> None:
    """In a process of its own: rows, lost documents and lanes that failed go to `news`."""
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.servers import running_redis, running_s3

    tier = job.tier
    with ExitStack() as stack:
        endpoint = stack.enter_context(running_s3()) if tier == "s3" else ""

        def lane_of(place: Path) -> Lane:
            place.mkdir(parents=True)
            if tier == "valkey":
                port = stack.enter_context(running_redis(place))
                valkey = stack.enter_context(closing_proxy(ValkeyProxy(port)))
                return ValkeyLane(world, place, port, valkey)
            if tier == "s3":
                s3 = stack.enter_context(closing_proxy(S3Proxy(endpoint)))
                return S3Lane(world, place, endpoint, s3)
            return {"disk": DiskLane, "host": HostLane, "engine": EngineLane}[tier](world, place)

        def drive(name: str, plan: Sequence[tuple[str, str, int]]) -> None:
            lane = lane_of(folder / f"{tier}-{name}")
            lane.usual_start_s = job.usual_start_s
            lane.on_row = lambda row: news.put(("rows", as_json(row)))
            try:
                lane.prepare()
                lane.run(plan)
            except Exception as error:
                traceback.print_exc()
                news.put(("failed", f"{tier} {name}: {type(error).__name__}: {error}"[:300]))
            finally:
                lane.close()
                for title in sorted(lane.lost):
                    news.put(("lost", f"{tier} {name}: {title}"))

        numbered = list(enumerate(job.plan))
        plans = [
            [(op, kind, job.seed + 1000 * rep + n) for n, (op, kind) in numbered if op != START]
            for rep in range(job.reps)
        ]
        # once: a start takes as long as ten other faults
        starts = [(op, kind, job.seed + n) for n, (op, kind) in numbered if op == START]
        drive("server", [*plans[0], *starts, *chain.from_iterable(plans[1:])])


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _chmod(path: Path, mode: int) -> None:
    if path.exists():
        path.chmod(mode)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
