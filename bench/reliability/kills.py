"""kill -9 under load, again and again, and what the next start finds.

Two kinds of rounds over one knowledge base each. In one, `kvweave serve` answers clients that
upload, update, delete, search and chat, and is killed at a random moment: most often under load,
sometimes while it starts. In the other, `kvweave ingest` and `kvweave docs rm` are killed. After a
kill either the next process is the first that looks, or the folder is opened and checked before.

What was acknowledged must be there, be found and say what was sent; what was deleted must not be
there, nor its chunk KV; catalogue, index and chunk KV must agree; the server must start.
"""

import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from reliability.agreement import Findings, check_folder
from reliability.crash_world import KB, CrashServer, CrashWorld
from reliability.ledger import Ledger
from reliability.load import KEYS, Load
from reliability.notes import Version, fault_in, versions_in

SERVED_SHARE = 0.4  # of the kills, through HTTP
PLAIN_EVERY = 15  # rounds, of which one starts its server as a person does; the others are forked
MOST_CHANGES = 6  # that clients get done before a kill
LOAD_S = 20.0  # the longest time under load
Tell = Callable[[str], None]


class KillBook:
    """What one kind of rounds was told and has found."""

    def __init__(self, seed: int, tell: Tell) -> None:
        self.seed = seed
        self._tell = tell
        self.ledger = Ledger()
        self.findings = Findings()
        self.failures: list[dict[str, Any]] = []
        self.kills: Counter[str] = Counter()  # by what was killed
        self.done: Counter[str] = Counter()  # by clients

    def told(self, num_kills: int) -> str:
        return f"{self.kills.total()} of {num_kills} kills, {len(self.failures)} failures"

    def note(self, found: Findings, number: int, moment: str) -> None:
        """Keep what a look found behind round `number`, whose kill came at `moment`."""
        self.findings.add(found)
        if words := found.all():
            failure = {"round": number, "seed": self.seed, "moment": moment, "found": words[:8]}
            self.failures.append(failure)
            self._tell(f"{failure}")


def run_kills(
    rounds: int,
    *,
    seed: int = 0,
    served_share: float = SERVED_SHARE,
    folder: Path | None = None,
    tell: Tell = lambda _: None,
    on_result: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Until there were so many kills. The result has `kills`, `lost_documents`, `wrong_answers`,
    `disagreements`, what clients did, and each failure with its round, seed and moment. Files go to
    `folder`; `on_result` hears the result so far whenever `tell` hears how far it is."""
    began_s = time.monotonic()
    books = KillBook(seed, tell), KillBook(seed, tell)

    def say(words: str) -> None:
        tell(words)
        on_result(_result(seed, books, time.monotonic() - began_s))

    num_served = round(rounds * served_share)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
        world = CrashWorld(Path(temporary) / "served")
        try:
            ServedRounds(world, books[0]).run(num_served, say)
        finally:
            world.close()
        world = CrashWorld(Path(temporary) / "written")
        try:
            WrittenRounds(world, books[1]).run(rounds - num_served, say)
        finally:
            world.close()
    return _result(seed, books, time.monotonic() - began_s)


def _result(seed: int, books: Sequence[KillBook], took_s: float) -> dict[str, Any]:
    found = Findings()
    for book in books:
        found.add(book.findings)
    kills = books[0].kills + books[1].kills
    return {
        "kills": kills.total(),
        "kills_by_kind": dict(kills),
        "seed": seed,
        "acknowledged_uploads": sum(book.ledger.acknowledged_uploads for book in books),
        "acknowledged_deletions": sum(book.ledger.acknowledged_deletions for book in books),
        "requests": dict(books[0].done),
        "lost_documents": len(found.lost),
        "deleted_documents_back": len(found.back),
        "wrong_answers": len(found.wrong) + len(found.back),  # what is deleted is not to be there
        "disagreements": len(found.apart),
        "kv_left_for_next_start": found.kv_for_next_start,
        "failures": [failure for book in books for failure in book.failures],
        "took_s": round(took_s, 1),
    }


class ServedRounds:
    """`kvweave serve` is killed under clients."""

    def __init__(self, world: CrashWorld, book: KillBook) -> None:
        self._world = world
        self._book = book
        self._start_s = 2.0  # how long the last start took
        self._moment = "no kill yet"

    def run(self, num_kills: int, tell: Tell) -> None:
        for number in count():
            if self._book.kills.total() >= num_kills:
                break
            rng = random.Random(f"served/{self._book.seed}/{number}")
            try:
                self._round(number, rng)
            except (RuntimeError, httpx.HTTPError) as error:
                found = Findings(apart=[f"the server does not serve: {error}"])
                self._book.note(found, number, self._moment)
            if number % 10 == 9:
                tell(f"served: {self._book.told(num_kills)}")
        self._look_over_folder(number)

    def _round(self, number: int, rng: random.Random) -> None:
        server = CrashServer(self._world, free_port(), plain=number % PLAIN_EVERY == 7)
        try:
            if rng.random() < 0.15:
                after_s = rng.uniform(0, self._start_s)
                self._moment = f"{after_s:.3f} s behind the start"
                server.wait_ready(after_s)
                server.process.kill()
                self._book.kills["server, starting"] += 1
                return
            began_s = time.monotonic()
            if not server.wait_ready():
                raise RuntimeError("it is not ready in time")
            self._start_s = time.monotonic() - began_s
            self._look_through(server.http, number)
            load = Load(server.url, self._book.ledger, seed=self._book.seed * 10_000 + number)
            load.start()
            # a number of changes and a part of one: whatever the speed of the machine
            num, began_s = rng.randrange(MOST_CHANGES + 1), time.monotonic()
            load.wait_for(num, LOAD_S)
            a_change_s = (time.monotonic() - began_s) / max(1, num)
            more_s = rng.uniform(0, max(0.1, a_change_s))
            self._moment = f"{more_s:.3f} s behind change {load.changes} of the load"
            time.sleep(more_s)
            server.process.kill()
            load.stop()
            self._book.kills["server, under load"] += 1
            self._book.done += load.done
            self._book.note(Findings(wrong=load.wrong, apart=load.refused), number, "under load")
        finally:
            server.close()
        if rng.random() < 0.5:
            self._look_over_folder(number)

    def _look_over_folder(self, number: int) -> None:
        found, _ = check_folder(self._world.kb, self._book.ledger, self._world.embedder)
        found.apart += self._world.check_command()
        self._book.note(found, number, self._moment)

    def _look_through(self, http: httpx.Client, number: int) -> None:
        """Ask the server that was started for all that clients were told of."""
        found, ledger = Findings(), self._book.ledger
        reply = http.get(f"/v1/kb/{KB}/documents")
        if reply.status_code == 404:
            found.lost, found.back = ledger.faults({})
            self._book.note(found, number, self._moment)
            return
        reply.raise_for_status()
        seen: dict[int, Version] = {}
        for document in reply.json()["data"]:
            for version in versions_in(document["title"]):
                if version.key in seen:
                    found.wrong.append(f"note {version.key} is listed twice")
                seen[version.key] = version
        found.lost, found.back = ledger.faults(seen)
        there = set(seen.values())
        for version in there:
            self._search(http, version, there, found)
        for version in random.Random(number).sample(
            sorted(ledger.gone()), min(8, len(ledger.gone()))
        ):
            if version not in there and _hits(http, version.mark, "words"):
                found.back.append(f"a search finds {version.mark}, which was deleted")
        if there:
            self._compare_answers(http, found)
        self._book.note(found, number, self._moment)
        ledger.settle(seen)

    def _search(
        self, http: httpx.Client, version: Version, there: set[Version], found: Findings
    ) -> None:
        hits = _hits(http, version.mark, "words")
        if not hits or version not in versions_in(hits[0]["text"]):
            found.apart.append(f"a search by words does not find {version.mark}")
            return
        nearest = _hits(http, hits[0]["text"], "vector")
        if not nearest or nearest[0]["score"] < 0.999:
            found.apart.append(f"a search by vector does not find {version.mark}")
        for hit in (*hits, *nearest):
            if fault := fault_in(hit["text"], hit["title"], there):
                found.wrong.append(fault)

    def _compare_answers(self, http: httpx.Client, found: Findings) -> None:
        """An answer from stored KV of which every row is recomputed is the exact answer."""
        texts = []
        for reuse in ("full", {"strategy": "weave", "ratio": 1.0}):
            body = {
                "messages": [{"role": "user", "content": "how do I drain a node?"}],
                "kb": KB,
                "k": 3,
                "max_tokens": 8,
                "temperature": 0,
                "reuse": reuse,
            }
            reply = http.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            texts.append(reply.json()["choices"][0]["message"]["content"])
        if texts[0] != texts[1]:
            found.wrong.append(f"in full {texts[0]!r}, from stored KV {texts[1]!r}")


class WrittenRounds:
    """`kvweave ingest` and `kvweave docs rm` are killed. A command that ended before its kill is an
    acknowledgement."""

    def __init__(self, world: CrashWorld, book: KillBook) -> None:
        self._world = world
        self._book = book
        self._docs = world.folder / "docs"
        self._docs.mkdir()
        self._typical_s = {"ingest": 0.6, "ingest --kv": 1.0, "docs rm": 0.4}

    def run(self, num_kills: int, tell: Tell) -> None:
        for number in count():
            if self._book.kills.total() >= num_kills:
                break
            self._round(number, random.Random(f"written/{self._book.seed}/{number}"))
            if number % 10 == 9:
                tell(f"written: {self._book.told(num_kills)}")

    def _round(self, number: int, rng: random.Random) -> None:
        ledger = self._book.ledger
        there = [key for key in range(KEYS) if ledger.now(key) is not None]
        if there and rng.random() < 0.35:
            kind, keys = "docs rm", rng.sample(there, min(len(there), rng.randrange(1, 4)))
            for key in keys:
                ledger.begin(key, None)
            files = [str(self._file(key)) for key in keys]
            command = ["docs", "rm", *files, "--kb", str(self._world.kb)]
        else:
            kind = rng.choice(["ingest", "ingest", "ingest --kv"])
            keys = self._change_files(rng)
            command = ["ingest", str(self._docs), "--kb", str(self._world.kb), "--prune"]
            command += ["--model", str(self._world.model), "--embedder", str(self._world.embedder)]
            command += ["--kv", "--encoding", "isolated"] if kind == "ingest --kv" else []
        after_s = rng.uniform(0, self._typical_s[kind])
        began_s = time.monotonic()
        process = self._world.start(*command, plain=number % (4 * PLAIN_EVERY) == 7)
        code = process.wait(after_s)
        moment = f"{kind}, {after_s:.3f} s behind its start"
        found = Findings()
        if code is None:
            process.kill()
            self._book.kills[kind] += 1
            self._typical_s[kind] *= 1.05  # else a slow spell of the machine would hide the end
        elif code == 0:
            self._typical_s[kind] = 0.5 * (self._typical_s[kind] + time.monotonic() - began_s)
            for key in keys:
                ledger.acknowledge(key)
        else:
            found.apart.append(f"{kind} ended with {code}: {self._world.log.read_text()[-300:]}")
        more, _ = check_folder(self._world.kb, ledger, self._world.embedder)
        found.add(more)
        if number % 5 == 4:
            found.apart += self._world.check_command()
        self._book.note(found, number, moment)
        self._settle()
        if kind == "docs rm":
            for key in keys:  # else the next ingest brings them back
                self._file(key).unlink(missing_ok=True)  # gone: an ingest was killed before it saw

    def _change_files(self, rng: random.Random) -> list[int]:
        """Write, change and remove some files; ingest is told to follow."""
        ledger = self._book.ledger
        keys = rng.sample(range(KEYS), rng.randrange(1, 6))
        for key in keys:
            if self._file(key).exists() and rng.random() < 0.3:
                self._file(key).unlink()
                ledger.begin(key, None)
            else:
                version = ledger.next_version(key)
                self._file(key).write_text(f"# {version.title}\n\n{version.text}\n")
                ledger.begin(key, version)
        # what an earlier kill left undone is done by this run as well
        for key in range(KEYS):
            path = self._file(key)
            if key not in keys and path.exists():
                (version,) = versions_in(path.read_text())
                if ledger.now(key) != version:
                    ledger.begin(key, version)
                    keys.append(key)
            elif key not in keys and ledger.now(key) is not None:
                ledger.begin(key, None)
                keys.append(key)
        return keys

    def _settle(self) -> None:
        """What is there now is what later rounds begin from."""
        from kvweave.corpus.knowledge_base import KnowledgeBase

        seen: dict[int, Version] = {}
        if (self._world.kb / "kb.json").is_file():
            with KnowledgeBase.open(self._world.kb) as kb:
                titles = [document.title for document in kb.documents()]
            seen = {v.key: v for title in titles for v in versions_in(title)}
        self._book.ledger.settle(seen)

    def _file(self, key: int) -> Path:
        return self._docs / f"note{key}.md"


def _hits(http: httpx.Client, query: str, retrieval: str) -> list[dict[str, Any]]:
    body = {"query": query, "k": 2, "retrieval": retrieval}
    reply = http.post(f"/v1/kb/{KB}/search", json=body)
    reply.raise_for_status()
    found: list[dict[str, Any]] = reply.json()["data"]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
