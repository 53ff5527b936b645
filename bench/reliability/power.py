"""Power loss at many moments of a real run, on a disk that keeps no more than it was made to.

One run of `kvweave serve` and of commands beside it is recorded call by call (`disk_log.c`): what
was written, renamed, removed and synced, and between the calls what clients were told. For each cut
the folder is made as a disk could have it then (`disk_model.py`), opened with the product and held
against what had been acknowledged by then.

Half of the cuts are right behind an acknowledgement, where a promise has just been made; the others
anywhere.
"""

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import KVWeaveError
from kvweave.text.tokenizer import Tokenizer
from reliability.agreement import Findings, check_folder, open_embedder
from reliability.crash_world import KB, CrashServer, CrashWorld
from reliability.disk_log import Kind, Record, Recorder
from reliability.disk_model import DiskImage, weathers
from reliability.kills import Tell, free_port
from reliability.ledger import Ledger
from reliability.load import Load, Mark
from reliability.notes import Version

CHANGES = 90  # that are acknowledged while the run is recorded
OTHER = "other"  # a knowledge base that is made and deleted as a whole
OTHER_NOTES = (Version(100, 1), Version(101, 1))
PROMISES = frozenset(("ack", "uploaded", "deleted"))  # marks behind which something must hold


def run_power_cuts(
    cuts: int,
    *,
    seed: int = 0,
    changes: int = CHANGES,
    folder: Path | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Cut the power that often. The result has `power_cuts`, `lost_documents`,
    `deleted_documents_back`, `wrong_answers`, `disagreements`, and each failure with its place in
    the log, seed and weather. Files go to `folder`."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        world = CrashWorld(place / "world", forks=False)
        records = record_run(world, place, seed, changes)
        tell(f"recorded {len(records)} calls and marks")
        found, failures, by_weather = Findings(), [], Counter[str]()
        for number, cut in enumerate(choose_cuts(records, cuts, seed)):
            rng = random.Random(f"cut/{seed}/{number}")
            kinds = weathers(cut, rng)
            weather = kinds[number % len(kinds)]
            image = place / "image"
            DiskImage(records, cut).write(image, weather, rng)
            here, _ = check_folder(image / KB, ledger_at(records, cut), world.embedder)
            here.add(check_other(image / OTHER, records[:cut], world))
            shutil.rmtree(image)
            by_weather[weather.name] += 1
            found.add(here)
            if words := here.all():
                at = {"cut": cut, "seed": seed, "number": number, "weather": weather.name}
                failures.append({**at, "found": words[:6]})
            if number % 25 == 24:
                tell(f"power: {number + 1} of {cuts} cuts, {len(failures)} failures")
    marks = Counter(_mark(r)[0] for r in records if r.kind is Kind.MARK)
    return {
        "power_cuts": by_weather.total(),
        "cuts_by_weather": dict(by_weather),
        "seed": seed,
        "recorded_calls": sum(r.kind is not Kind.MARK for r in records),
        "recorded_syncs": sum(r.kind is Kind.SYNC for r in records),
        "acknowledged_changes": marks["ack"],
        "lost_documents": len(found.lost),
        "deleted_documents_back": len(found.back),
        "wrong_answers": len(found.wrong),
        "disagreements": len(found.apart),
        "failures": failures,
        "took_s": round(time.monotonic() - began_s, 1),
    }


def record_run(world: CrashWorld, folder: Path, seed: int, changes: int) -> list[Record]:
    """A server and its clients, stopped in order and started once more, and recorded."""
    recorder = Recorder(folder, world.root)
    ledger = Ledger()
    for part in range(2):
        server = CrashServer(world, free_port(), env=recorder.environment())
        try:
            server.wait_ready()
            load = Load(server.url, ledger, seed=seed * 100 + part, mark=recorder.mark)
            make_and_delete(server.http, recorder.mark)
            load.run_for(changes // 2)
            make_and_delete(server.http, recorder.mark)
            if load.wrong or load.refused:
                raise RuntimeError(f"the run itself went wrong: {[*load.wrong, *load.refused][:3]}")
            server.process.terminate()
            server.process.wait(60)
        finally:
            server.close()
    recorder.close()
    return recorder.read()


def make_and_delete(http: httpx.Client, mark: Mark) -> None:
    """A whole knowledge base comes and goes."""
    for _ in range(2):
        mark("other upload-begun")
        for version in OTHER_NOTES:
            body = {"title": version.title, "text": version.text, "key": str(version.key)}
            path = f"/v1/kb/{OTHER}/documents"
            http.post(path, json=body, params={"wait_for_kv": True}).raise_for_status()
        mark("other uploaded")
        mark("other deletion-begun")
        http.delete(f"/v1/kb/{OTHER}").raise_for_status()
        mark("other deleted")


@cache
def open_tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def check_other(folder: Path, records: Sequence[Record], world: CrashWorld) -> Findings:
    """The knowledge base that comes and goes is whole, gone, or on its way; never in the way."""
    found = Findings()
    marks = [_mark(r)[1] for r in records if r.kind is Kind.MARK and _mark(r)[0] == "other"]
    last = marks[-1] if marks else "deleted"
    try:
        with KnowledgeBase.open(
            folder,
            tokenizer=open_tokenizer(world.model),
            embedder=open_embedder(world.embedder),
            create=True,
        ) as kb:
            num = len(kb.documents())
            found.apart += [p for p in kb.check() if "left behind" not in p]
    except KVWeaveError as error:
        found.apart.append(f"{OTHER} ({last}) does not open: {error}")
        return found
    if last == "uploaded" and num != len(OTHER_NOTES):
        found.lost.append(f"{OTHER} has {num} documents, {len(OTHER_NOTES)} were acknowledged")
    if last == "deleted" and num:
        found.back.append(f"{OTHER} was deleted and has {num} documents")
    return found


def choose_cuts(records: Sequence[Record], cuts: int, seed: int) -> list[int]:
    """Places in the log, ascending: half of them behind an acknowledgement or up to three calls
    later, the others anywhere."""
    rng = random.Random(f"cuts/{seed}")
    promises = [
        place + 1
        for place, record in enumerate(records)
        if record.kind is Kind.MARK and not PROMISES.isdisjoint(_mark(record))
    ]
    chosen = [
        min(len(records), rng.choice(promises) + rng.randrange(4))
        if number % 2
        else rng.randrange(1, len(records) + 1)
        for number in range(cuts)
    ]
    rng.shuffle(chosen)
    return chosen


def ledger_at(records: Sequence[Record], cut: int) -> Ledger:
    """What clients had begun and been told by then."""
    ledger = Ledger()
    for record in records[:cut]:
        if record.kind is not Kind.MARK:
            continue
        word, key, *number = _mark(record)
        match word:  # of the other knowledge base: `check_other`
            case "begin":
                state = None if number == ["-"] else Version(int(key), int(number[0]))
                ledger.begin(int(key), state)
            case "ack":
                ledger.acknowledge(int(key))
            case "refuse":
                ledger.refuse(int(key))
    return ledger


def _mark(record: Record) -> list[str]:
    return record.data.decode().split()
