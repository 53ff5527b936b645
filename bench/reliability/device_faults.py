"""Faults of a device: what lies in its memory by what is being done by what goes wrong.

Chunk KV on a device is shared or copied, exact KV goes to host memory and comes back, and the
engine computes. Requests go to the engine itself (`device_world.py`). Each fault is put in,
something is asked, the fault is taken out. Right is what is right in `faults.py`: an answer of an
undisturbed engine or an error of one line, in time, with a counter or a reason; requests beside it
are answered; afterwards the books balance and the same engine gives the right answer.
"""

import gc
import random
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvweave.engine.config import for_device
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.errors import KVWeaveError, PromptTooLong
from kvweave.kv.format.keys import parse_key
from kvweave.kv.store import KVStore
from kvweave.reasons import Reason
from kvweave.serve.workers.engine_watch import EngineWatch
from reliability.device_hooks import HAND_OUT, POOL, DeviceHooks, no_memory
from reliability.device_world import (
    ANSWER,
    FULL,
    FUSED,
    WEAVE,
    Answer,
    DeviceWorld,
    Question,
    all_questions,
    distance,
    of_kind,
    read,
)
from reliability.fault_hooks import ALWAYS, DEAD, FORWARD, NO_NUMBERS, OUT_OF_MEMORY, SELECT
from reliability.fault_rows import FaultRow, as_json, line_of
from reliability.fault_rules import (
    CORRUPTED,
    ERROR,
    EVICT,
    GONE,
    HANG,
    LOAD_FIRST,
    LOAD_MIDDLE,
    LOOKUP,
    SAVE,
    SLOW,
    START,
    TRUNCATED,
    FaultRule,
    spoil,
)
from reliability.fault_rules import FULL as NO_ROOM

SHARED, COPIES, EXACT, ENGINE = "shared chunks", "copied chunks", "exact KV", "engine"
WAYS = (SHARED, COPIES, EXACT, ENGINE)
LOOK_S = 0.1  # between two looks of the watch
STUCK_S = {"cpu": 2.5, "cuda": 1.2}  # that a step may take: a busy CPU takes its time
BOUND_S = 10.0  # seconds that a request may take longer
OUT_OF_PAGES = "out of pages"
ADMISSION = "admission"
BESIDE = 100  # tokens of a request that is being answered meanwhile
MARK = 3  # a token that only the request has that always fails
# what tells of a fault; other numbers of the engine grow with every request
TELLING = (
    "requests_failed", "preemptions", "steps_parted", "tree_copies_failed", "tree_copies_refused",
    "recordings_failed", "recordings_without_memory", "chunk_evictions", "kv_distrusted",
)  # fmt: skip
# of a device as a whole: whoever is on it hears of it
FOR_ALL = (GONE, DEAD, HANG)


class DeviceFault(NamedTuple):
    """One cell of the matrix."""

    way: str  # what lies on the device, and how
    op: str
    kind: str
    real: bool = False  # done to the device or to bytes, not raised by a hook


@dataclass
class DeviceRow(FaultRow):
    """As a row of a server's faults. `status` is 200 for an answer, 500 for an error, -1 if it was
    stuck: there is no HTTP here."""

    real: bool = False
    shares: bool = False  # chunks were shared on the device
    beside: str = ""  # what became of a request beside it; empty: there was none
    restarted: bool = False  # the engine was given up, and another one made


HOOKED = (SLOW, HANG, ERROR, OUT_OF_MEMORY, GONE)
ON_ENGINE = [
    *((EXACT, LOOKUP, kind) for kind in HOOKED),
    *((EXACT, LOAD_FIRST, kind) for kind in HOOKED),
    *((EXACT, SAVE, kind) for kind in (*HOOKED, CORRUPTED, NO_ROOM)),
    *((EXACT, EVICT, kind) for kind in (*HOOKED, NO_ROOM)),
    *((ENGINE, START, kind) for kind in (SLOW, ERROR, OUT_OF_MEMORY)),
    *((ENGINE, FORWARD, kind) for kind in (SLOW, HANG, ERROR, OUT_OF_MEMORY, GONE)),
    *((ENGINE, FORWARD, kind) for kind in (DEAD, NO_NUMBERS, ALWAYS)),
    (ENGINE, SELECT, ERROR),
    *((ENGINE, HAND_OUT, kind) for kind in (ERROR, OUT_OF_MEMORY)),
    (ENGINE, ADMISSION, OUT_OF_PAGES),
]
# done to pages, files or the device's memory; some need a GPU
DONE_ON_ENGINE = [
    (EXACT, LOOKUP, CORRUPTED),
    (EXACT, SAVE, OUT_OF_MEMORY),
    (EXACT, EVICT, OUT_OF_MEMORY),
    (ENGINE, FORWARD, OUT_OF_MEMORY),
    (ENGINE, FORWARD, HANG),
    (ENGINE, START, OUT_OF_MEMORY),
    (ENGINE, START, NO_ROOM),
    (ENGINE, START, CORRUPTED),
]
LOADS = [
    *((LOAD_FIRST, kind) for kind in (*HOOKED, CORRUPTED, NO_ROOM)),
    *((LOAD_MIDDLE, kind) for kind in (*HOOKED, CORRUPTED)),
    (EVICT, NO_ROOM),
]
DONE_LOADS = [
    *((op, kind) for op in (LOAD_FIRST, LOAD_MIDDLE) for kind in (CORRUPTED, TRUNCATED)),
    (LOAD_FIRST, OUT_OF_MEMORY),
]
NEEDS_GPU = {each for each in DONE_ON_ENGINE if each[2] in (OUT_OF_MEMORY, HANG)}


def plan_of(*, shares: bool, on_gpu: bool) -> list[DeviceFault]:
    """All that makes sense on a device, in one of the two ways that chunks lie there."""
    way = SHARED if shares else COPIES
    plan = [DeviceFault(way, op, kind) for op, kind in LOADS]
    plan += [DeviceFault(way, op, kind, real=True) for op, kind in DONE_LOADS]
    if shares:  # a copy is brought for each request: there is nothing to be found
        plan += [DeviceFault(way, LOOKUP, kind) for kind in HOOKED]
        plan.append(DeviceFault(way, LOOKUP, CORRUPTED, real=True))
    plan += [DeviceFault(*each) for each in ON_ENGINE]
    plan += [DeviceFault(*each, real=True) for each in DONE_ON_ENGINE]
    if on_gpu:
        return plan
    return [
        each
        for each in plan
        if not (each.real and (each[:3] in NEEDS_GPU or each.kind == OUT_OF_MEMORY))
    ]


class _Probe:
    """What the watch asks of a `Weave`: its engine, and one token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def complete(self, ids: Sequence[int], *, sampling: Sampling, reuse: str) -> "_Probe":
        self._ticket = self.engine.submit(EngineRequest(tuple(ids), sampling, frozenset()))
        return self

    def finish(self) -> None:
        for _ in self._ticket:
            pass


class DeviceLane:
    """Faults one after another, against engines of one decoder."""

    def __init__(self, world: DeviceWorld, hooks: DeviceHooks, *, shares: bool) -> None:
        self.world, self.hooks, self.shares = world, hooks, shares
        self.questions = all_questions()
        self.on_row: Callable[[DeviceRow], None] = lambda row: None
        self.engine: Engine | None = None
        self._tenants = (f"tenant {n}" for n in count())
        self._watch: EngineWatch | None = None
        self.broken: list[str] = []  # what the watch said
        self.usual_s: dict[Question, float] = {}
        self.stuck_s = STUCK_S[world.device.type]

    # ---- engines

    def start(self, **more: Any) -> Engine:
        """Another engine; the one before is gone."""
        self.stop()
        cfg = for_device(self.world.config(shares=self.shares, **more), self.world.device.type)
        self.pool = make_pool(cfg, self.world.decoder)
        engine = self.engine = Engine(self.world.decoder, cfg, pool=self.pool)
        engine.run_alone(lambda: engine.pin_preamble(self.world.preamble))
        return engine

    def stop(self) -> None:
        self.unwatch()
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def watch(self) -> None:
        """As a server does it."""
        self.broken = []
        assert self.engine is not None, "there is one"
        probe: Any = _Probe(self.engine)
        self._watch = EngineWatch(probe, self.stuck_s, self.broken.append, LOOK_S)
        self._watch.start()

    def unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def learn(self) -> None:
        """Right answers, and what an undisturbed one takes; kernels are compiled by then."""
        engine = self.start()
        self.world.learn(engine, self.questions)
        crowd = [self._submit(each, next(self._tenants)) for each in self.questions * 2]
        for ticket in crowd:
            read(ticket)
        for question in self.questions:
            took = [self.world.ask(engine, question, next(self._tenants)) for _ in range(2)]
            self.usual_s[question] = min(each.seconds for each in took)
            self._must(question, took[0])

    def control(self) -> dict[str, float]:
        """Whether the judge would see it: one layer of all pages of one question set to 0."""
        engine = self.start()
        question = of_kind(self.questions, FULL, 0)
        self._must(question, self.world.ask(engine, question, "control"))
        layer = self.world.spec.num_layers // 2
        engine.run_alone(lambda: self.pool.values[layer].zero_())
        seen = self.world.ask(engine, question, "control")
        truths = self.world.truths
        others = [q for q in truths if q.number != question.number]
        return {
            "tolerance": self.world.tolerance,
            "one_layer_of_values_zeroed": round(distance(seen, truths[question][0]), 4),
            "nearest_other_question": round(
                min(distance(truths[q][0], truths[question][0]) for q in others), 4
            ),
            "same_question_asked_again": round(
                max(distance(a, truths[q][1]) for q in truths for a in truths[q][1:]), 4
            ),
        }

    # ---- the course of things

    def run(self, plan: Iterable[tuple[DeviceFault, int]]) -> None:
        for fault, seed in plan:
            tier = f"device, {fault.way}"
            times = 1 if fault.kind in (ERROR, OUT_OF_MEMORY, CORRUPTED, SLOW) else None
            if (fault.op, fault.kind) == (SAVE, CORRUPTED):
                times = None  # of several copies only some are read afterwards
            row = DeviceRow(tier, fault.op, fault.kind, seed, times, real=fault.real)
            row.shares = self.shares
            try:
                if self.engine is None:
                    self.start()
                self._fault(fault, row)
                self._at_rest(row)
            except Exception as error:  # the matrix goes on; the row says what happened
                row.problems.append(f"{type(error).__name__}: {error}"[:300])
                traceback.print_exc()
                self.hooks.clear()
                self.stop()
            if row.fired:
                self.on_row(row)
            print(f"{'real ' if row.real else ''}{line_of(row)} {row.error[:60]}", flush=True)
        self.stop()

    def _fault(self, fault: DeviceFault, row: DeviceRow) -> None:
        if fault.op == START:
            self._at_start(row)
        elif fault.way == ENGINE:
            self._of_engine(row)
        elif fault.op == LOOKUP and fault.kind == CORRUPTED:
            self._poisoned(row, fault.way)
        elif fault.kind == NO_ROOM:
            self._without_room(row, fault.way)
        elif fault.op == SAVE:
            self._at_save(row)
        elif fault.op == EVICT:
            self._at_evict(row)
        else:
            self._at_load(row, fault.way)

    def _at_load(self, row: DeviceRow, way: str) -> None:
        """Something is looked up on the device, or brought there."""
        question = self._question(row, way)
        tenant, store = next(self._tenants), None
        if row.real and row.kind in (CORRUPTED, TRUNCATED):
            store = self.world.on_disk
        if way == EXACT and row.op == LOAD_FIRST:
            self.start()  # little of others is on its way out of this one
        if row.op == LOOKUP or way == EXACT:  # there must be something
            self._must(question, self._ask(question, tenant))
        if way == EXACT and row.op == LOAD_FIRST:
            self._all_out()
        beside = self._beside(row)
        before = self._counters()
        with no_memory(self.world.device) if self._takes_memory(row) else nullcontext() as wanted:
            if store is not None:
                row.fired = damage(self.world, question, row)
            elif wanted is None:
                self._inject(row)
            answer = self._ask(question, tenant, store)
            if row.kind == GONE:
                self._note_gone(question, tenant, row)
            row.fired += self.hooks.clear() if wanted is None else wanted()
        cleared_s = time.monotonic()
        self._note(row, question, answer)
        self._note_beside(row, beside)
        if store is not None:
            self.world.save_again(store)
        self._recovery(row, question, tenant, cleared_s)
        self._count(row, before)

    def _poisoned(self, row: DeviceRow, way: str) -> None:
        """Pages hold what is no number: whoever reads them is told, and they are read once."""
        question, tenant = self._question(row, way), next(self._tenants)
        engine = self._engine()
        self._must(question, self._ask(question, tenant))
        before = self._counters()
        layer = random.Random(row.seed).randrange(self.world.spec.num_layers)
        engine.run_alone(lambda: self.pool.values[layer].fill_(float("nan")))
        row.fired = 1
        answer = self._ask(question, tenant)
        cleared_s = time.monotonic()
        self._note(row, question, answer)
        self._recovery(row, question, tenant, cleared_s)
        self._count(row, before)
        self._at_rest(row)
        self.stop()  # other tenants' pages are as bad, and no fault of theirs

    def _without_room(self, row: DeviceRow, way: str) -> None:
        """More than the pool, or host memory behind it, has room for, all at once."""
        more = {}
        if way == EXACT:
            more = {"host_tokens": self.world.page if row.op == SAVE else self.world.prompt_tokens}
        self.start(**more)
        some = [self._question(row, way, n) for n in range(16)]
        tenants = [next(self._tenants) for _ in some]
        before = self._counters()
        pairs = list(zip(some, tenants, strict=True))
        answers = [read(t) for t in [self._submit(q, t, answer=24) for q, t in pairs]]
        cleared_s = time.monotonic()
        row.fired = 1
        for question, answer in zip(some, answers, strict=True):
            self._note(row, question, answer, crowd=len(some))
        for question, tenant in pairs[:4]:
            self._recovery(row, question, tenant, cleared_s)
        self._count(row, before)
        self.stop()

    def _at_save(self, row: DeviceRow) -> None:
        """Exact KV is copied to host memory in idle time."""
        engine = self.start()  # one that failed is not tried again for a minute
        question, tenant = self._question(row, EXACT), next(self._tenants)
        before = self._counters()
        if self._takes_memory(row):
            self._must(question, self._ask(question, tenant))
            self._all_out(drop=True)
            self._must(question, self._ask(question, tenant))
            with no_memory(self.world.device) as wanted:
                engine.run_alone(lambda: engine.tree.replicate(1 << 40))
                row.fired = wanted()
            answer = self._ask(question, tenant)
        else:
            self._inject(row)
            answer = self._ask(question, tenant)
            self.hooks.struck.wait(5)
            if row.kind == GONE:
                self._note_gone(question, tenant, row)
            elif row.kind == HANG:  # nobody waits for it
                answer = self._ask(question, tenant)
            row.fired = self.hooks.clear()
        cleared_s = time.monotonic()
        self._note(row, question, answer)
        self._settled()
        self._all_out()
        self._recovery(row, question, tenant, cleared_s)
        self._count(row, before)
        self.stop()

    def _at_evict(self, row: DeviceRow) -> None:
        """Prompts push each other's exact KV out of the pool; a real want of memory: one leaf."""
        engine = self.start()
        some = [self._question(row, EXACT, n) for n in range(16)]
        tenants = [next(self._tenants) for _ in some]
        before = self._counters()
        if self._takes_memory(row):
            self._must(some[0], self._ask(some[0], tenants[0]))
            with no_memory(self.world.device) as wanted:
                engine.run_alone(lambda: [each for each in range(40) if engine.tree.shrink()])
                row.fired = wanted()
            answers = [self._ask(some[0], tenants[0])]
        else:
            if row.kind == HANG:
                self.watch()
            self._inject(row)
            pairs = zip(some, tenants, strict=True)
            answers = [read(t) for t in [self._submit(q, t) for q, t in pairs]]
            row.fired = self.hooks.clear()
        cleared_s = time.monotonic()
        for question, answer in zip(some, answers, strict=False):
            self._note(row, question, answer, crowd=len(some))
        if row.fired:
            self._restart_if_broken(row)
            self._recovery(row, some[0], tenants[0], cleared_s)
        self._count(row, before)
        self.stop()

    def _at_start(self, row: DeviceRow) -> None:
        """An engine is made while something is wrong; another one afterwards."""
        self.stop()
        gc.collect()
        question, tenant = self._question(row, ENGINE), next(self._tenants)
        more = {"pool_tokens": 1 << 36} if row.kind == NO_ROOM else {}
        began_s = time.monotonic()
        failed: Exception | None = None
        with no_memory(self.world.device) if self._takes_memory(row) else nullcontext() as wanted:
            if wanted is None and not row.real:
                self._inject(row, POOL)
            try:
                self.start(**more)
            except Exception as error:
                failed = error
            row.seconds = time.monotonic() - began_s
            row.fired = self.hooks.clear() if wanted is None else wanted()
        if row.real:
            row.fired = max(1, row.fired)
        if failed is not None:
            row.status, row.answer, row.error = 500, "error", _words(failed)
            self._check_error(row, failed)
        cleared_s = time.monotonic()
        if failed is not None:
            self.start()
        if row.kind == CORRUPTED:  # memory is as whoever had it before left it
            for part in (self.pool.keys, self.pool.values):
                part[:, : self.pool.num_pages].fill_(float("nan"))
            self.stop()
            pool, cfg = self.pool, self.world.config(shares=self.shares)
            self.engine = Engine(self.world.decoder, cfg, pool=pool)
        if failed is None:
            self._note(row, question, self._ask(question, tenant))
        self._recovery(row, question, tenant, cleared_s)
        fused = of_kind(self.questions, FUSED, row.seed)
        self._must(fused, self._ask(fused, tenant))

    # ---- the engine

    def _of_engine(self, row: DeviceRow) -> None:
        match row.kind:
            case "out of pages":
                self._crowd(row)
            case "a request that always fails":
                self._always(row)
            case "hang":
                self._hang(row)
            case "gone and back":
                self._lost(row)
            case _:
                self._at_forward(row)

    def _at_forward(self, row: DeviceRow) -> None:
        how = FUSED if row.op in (SELECT, HAND_OUT) else FULL
        question, tenant = of_kind(self.questions, how, row.seed), next(self._tenants)
        if row.op == SELECT:
            question = question._replace(ratio=WEAVE)
        beside = None if row.kind == NO_NUMBERS else self._beside(row, always=row.op == HAND_OUT)
        before = self._counters()
        with no_memory(self.world.device) if self._takes_memory(row) else nullcontext() as wanted:
            if wanted is None:
                self._inject(row)
            close_call = 1e-9 if row.op == HAND_OUT else 0.0
            answer = read(self._submit(question, tenant, close_call=close_call))
            row.fired = self.hooks.clear() if wanted is None else wanted()
        cleared_s = time.monotonic()
        self._note(row, question, answer)
        self._note_beside(row, beside)
        self._recovery(row, question, tenant, cleared_s)
        self._count(row, before)

    def _hang(self, row: DeviceRow) -> None:
        """A pass that does not end, on the host's side or on the device's."""
        question, tenant = self._question(row, ENGINE), next(self._tenants)
        self.watch()
        if row.real:
            rule = FaultRule(FORWARD, SLOW, 1, self.stuck_s + 1.5, row.seed)
            self.hooks.set(rule)
        else:
            self._inject(row)
        answer = self._ask(question, tenant)
        row.fired = self.hooks.clear()
        cleared_s = time.monotonic()
        self._note(row, question, answer)
        self._restart_if_broken(row)
        if not row.restarted:
            row.problems.append("the watch saw nothing")
        self._recovery(row, question, tenant, cleared_s)
        self._count(row, {})

    def _lost(self, row: DeviceRow) -> None:
        """The device is gone until the watch has said so; then another engine has it again."""
        question, tenant = self._question(row, ENGINE), next(self._tenants)
        self.watch()
        self._inject(row)
        answers = []
        until_s = time.monotonic() + 10
        while not self.broken and time.monotonic() < until_s:
            try:
                answers.append(self._ask(question, tenant))
            except KVWeaveError:  # closed by now
                break
        time.sleep(2 * LOOK_S)
        row.fired = self.hooks.clear()
        cleared_s = time.monotonic()
        self._note(row, question, answers[0])
        self._restart_if_broken(row)
        if not row.restarted:
            row.problems.append("the watch saw nothing")
        self._recovery(row, question, tenant, cleared_s)
        self._count(row, {})

    def _always(self, row: DeviceRow) -> None:
        """Others are served beside it, and the watch lets the engine be."""
        question, tenant = self._question(row, ENGINE), next(self._tenants)
        before = self._counters()
        self.watch()
        self.hooks.marked = MARK
        sampling = Sampling(max_tokens=ANSWER)
        bad = EngineRequest((MARK, 5, 6), sampling, frozenset())
        failed = [read(self._engine().submit(bad)) for _ in range(5)]
        time.sleep(4 * LOOK_S)  # the watch has looked, and tried one
        answer = self._ask(question, tenant)
        both = [self._engine().submit(bad), self._submit(question, tenant)]
        together = [read(ticket) for ticket in both]
        self.hooks.marked = None
        row.fired = len(failed) + 1
        cleared_s = time.monotonic()
        self._note(row, question, answer)
        self._note(row, question, together[1])
        row.error = _words(failed[0].error)
        if not all(each.error is not None for each in (*failed, together[0])):
            row.problems.append("it was answered")
        self.unwatch()
        if self.broken:
            row.problems.append(f"the watch gave the engine up: {self.broken}")
        self._recovery(row, question, tenant, cleared_s)
        self._count(row, before)

    def _crowd(self, row: DeviceRow) -> None:
        """More prompts at once than the pool has pages for; and one that never fits."""
        engine = self.start()
        some = [self.questions[(row.seed + n) % len(self.questions)] for n in range(32)]
        tenants = [next(self._tenants) for _ in some]
        before = self._counters()
        pairs = list(zip(some, tenants, strict=True))
        answers = [read(t) for t in [self._submit(q, t, answer=48) for q, t in pairs]]
        row.fired = 1
        for question, answer in zip(some, answers, strict=True):
            self._note(row, question, answer, crowd=8 * len(some))  # as much longer are the answers
        try:
            huge = self.pool.num_pages * self.pool.page_tokens + 1
            engine.submit(EngineRequest((5,) * huge, Sampling(), frozenset()))
            row.problems.append("a prompt that never fits was taken")
        except PromptTooLong as error:
            row.error = _words(error)
        self._recovery(row, some[0], tenants[0], time.monotonic())
        self._count(row, before)

    # ---- what they share

    def _engine(self) -> Engine:
        assert self.engine is not None, "there is one"
        return self.engine

    def _question(self, row: DeviceRow, way: str, more: int = 0) -> Question:
        return of_kind(self.questions, FUSED if way in (SHARED, COPIES) else FULL, row.seed + more)

    def _submit(
        self, question: Question, tenant: str, store: KVStore | None = None, **how: Any
    ) -> Ticket:
        return self._engine().submit(self.world.request(question, tenant, store=store, **how))

    def _ask(self, question: Question, tenant: str, store: KVStore | None = None) -> Answer:
        return read(self._submit(question, tenant, store))

    def _must(self, question: Question, answer: Answer) -> None:
        """Of what nothing stands in the way of."""
        found = self.world.judge(question, answer)
        if found not in (FULL, FUSED):
            far = [round(distance(answer, each), 4) for each in self.world.truths[question]]
            raise RuntimeError(f"undisturbed, {question} is {found}: {answer.error!r} {far}")

    def _inject(self, row: DeviceRow, op: str | None = None) -> None:
        delay_s = random.Random(row.seed).choice([0.05, 0.15, 0.4])
        self.hooks.set(FaultRule(op or row.op, row.kind, row.times, delay_s, row.seed))
        if row.kind == HANG and self._watch is None and row.op != SAVE:
            self.watch()

    def _takes_memory(self, row: DeviceRow) -> bool:
        return row.real and row.kind == OUT_OF_MEMORY

    def _beside(self, row: DeviceRow, *, always: bool = False) -> Ticket | None:
        """One that is being answered already. It must not matter to it, unless the device is gone
        as a whole."""
        if row.kind == HANG or not (always or row.seed % 2):
            return None
        question = of_kind(self.questions, FULL, row.seed + 1)
        ticket = self._submit(question, next(self._tenants), answer=BESIDE)
        until_s = time.monotonic() + 20
        while ticket.timeline.first_token_s is None and time.monotonic() < until_s:
            time.sleep(0.0005)
        return ticket

    def _note_beside(self, row: DeviceRow, ticket: Ticket | None) -> None:
        if ticket is None:
            return
        question = of_kind(self.questions, FULL, row.seed + 1)
        answer = read(ticket)
        row.beside = self.world.judge(question, answer)
        may_fail = row.kind in FOR_ALL or self._takes_memory(row)
        if row.beside in ("wrong", "stuck") or (row.beside == "error" and not may_fail):
            row.problems.append(f"the one beside it: {row.beside} {_words(answer.error)}"[:200])

    def _note(self, row: DeviceRow, question: Question, answer: Answer, crowd: int = 1) -> None:
        row.answer, row.seconds = self.world.judge(question, answer), answer.seconds
        whys = (why for why in answer.whys if why != Reason.NOT_IN_TREE)  # as of every new prompt
        row.whys = list(dict.fromkeys([*row.whys, *whys]))
        usual_s = crowd * self.usual_s[question]
        row.extra_s = max(row.extra_s, answer.seconds - usual_s, 0.0)
        if row.extra_s > BOUND_S:
            row.problems.append(f"{row.extra_s:.1f} s more, over {BOUND_S:g}")
        row.status = {"error": 500, "stuck": -1}.get(row.answer, 200)
        if row.answer in ("wrong", "stuck"):
            far = min(distance(answer, each) for each in self.world.truths[question])
            row.problems.append(f"{row.answer} answer, {far:.3f} off")
        if answer.error is not None:
            row.error = _words(answer.error)
            self._check_error(row, answer.error)

    def _check_error(self, row: DeviceRow, error: BaseException) -> None:
        """What the driver says is one line to a client, too (serve/access/errors.py); what we say
        must be."""
        if row.kind in (OUT_OF_MEMORY, NO_ROOM, CORRUPTED) and not isinstance(error, KVWeaveError):
            row.problems.append(f"an error that is not clear: {type(error).__name__}")
        if isinstance(error, KVWeaveError) and "\n" in str(error):
            row.problems.append("an error of several lines")

    def _note_gone(self, question: Question, tenant: str, row: DeviceRow) -> None:
        """Beside a device that is gone nothing is answered, or it is right."""
        again = self._ask(question, tenant)
        if self.world.judge(question, again) in ("wrong", "stuck"):
            row.problems.append("the next answer is wrong or stuck")

    def _restart_if_broken(self, row: DeviceRow) -> None:
        if self.broken:
            row.whys += self.broken
            row.restarted = True
            self.broken = []
            # the thread that was given up may still compute on the other one: a process would end
            self.world.renew_decoder()
            self.start()

    def _recovery(self, row: DeviceRow, question: Question, tenant: str, cleared_s: float) -> None:
        self._restart_if_broken(row)
        answer = self._ask(question, tenant)
        found = self.world.judge(question, answer)
        if found not in (FULL, FUSED):
            row.problems.append(f"afterwards: {found} {_words(answer.error)}"[:200])
            return
        row.recovered_s = time.monotonic() - cleared_s

    def _all_out(self, *, drop: bool = False) -> None:
        """Exact KV leaves the pool; with `drop` its copies in host memory, too."""
        engine = self._engine()
        self._settled()

        def work() -> None:
            while engine.tree.shrink():
                pass
            if drop:
                for top in list(engine.tree.root.children):
                    engine.tree.forget(top)

        engine.run_alone(work)

    def _settled(self) -> None:
        """Until nothing has been on its way to host memory for a moment."""
        until_s, quiet = time.monotonic() + 10, 0
        while quiet < 20 and time.monotonic() < until_s:
            quiet = 0 if self._engine().stats()["tree_leaving_bytes"] else quiet + 1
            time.sleep(0.005)

    def _counters(self) -> dict[str, float]:
        stats = self._engine().stats()
        found = {name: stats[name] for name in TELLING if name in stats}
        return {**found, "tree_evictions": len(self._engine().tree.evictions())}

    def _count(self, row: DeviceRow, before: dict[str, float]) -> None:
        if before and not row.restarted:
            now = self._counters()
            row.counters = {
                name: now[name] - value for name, value in before.items() if now[name] > value
            }
        if not (row.counters or row.whys or row.error or row.kind == SLOW):
            row.problems.append("no counter tells of it")

    def _at_rest(self, row: DeviceRow) -> None:
        """Nothing is held by what is over."""
        for store in (self.world.store, self.world.on_disk):
            if store.num_pinned():
                row.problems.append(f"{store.num_pinned()} chunks of the store are still leased")
        engine = self.engine
        if engine is None:
            return
        stats = engine.stats()
        if stats["running"] or stats["waiting"]:
            row.problems.append("requests are left over")
        try:
            engine.run_alone(engine.check_integrity)
        except AssertionError as error:
            row.problems.append(f"the books: {error}"[:200])
            self.stop()


def damage(world: DeviceWorld, question: Question, row: DeviceRow) -> int:
    """Change or cut the files of a prompt's chunks, in place, as a bad medium does."""
    struck = 0
    middle = world.spec.num_layers // 2
    for path in (world.folder / "kv" / "objects").rglob("*.kv"):
        key = parse_key(path.name.removesuffix(".kv"))
        if key is None or key not in [world.keys[p] for p in question.places[-1:]]:
            continue
        layer = world.packed(key).header.layers[middle if row.op == LOAD_MIDDLE else 0]
        at = layer.offset + random.Random(row.seed).randrange(layer.size_bytes)
        spoil(path, at, row.kind, row.seed)
        struck += 1
    return struck


def _words(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def real_loss(folder: Path, device: str, seed: int) -> DeviceRow:
    """The device is lost for good in one process, and another one has it again."""
    from reliability.device_loss import BOUND_S as NOTICED_S
    from reliability.device_loss import BROKEN_CODE, lose_device

    row = DeviceRow(f"device, {ENGINE}", FORWARD, GONE, seed, None, real=True, restarted=True)
    loss = lose_device(folder, device)
    before, after = loss.before, loss.after
    row.fired, row.seconds, row.recovered_s = 1, loss.seconds, loss.back_s
    if "failed" in before or "failed" in after:
        row.problems.append(f"{before.get('failed', '')} {after.get('failed', '')}"[:300])
        return row
    row.answer, row.status, row.error = "error", 500, before["errors"][0]
    row.whys = before["said"]
    row.extra_s = before["noticed_s"] or 0.0
    if before["noticed_s"] is None or row.extra_s > NOTICED_S:
        row.problems.append(f"noticed after {before['noticed_s']} s")
    if "none" in before["errors"]:
        row.problems.append("a lost device answered")
    if loss.code != BROKEN_CODE:
        row.problems.append(f"the process ended with {loss.code}")
    if after["tokens"] != before["tokens"]:
        row.problems.append("wrong answer afterwards")
    print(f"real {line_of(row)} {row.error[:60]}", flush=True)
    return row


def run_device_faults(
    folder: Path,
    device: str,
    reps: int = 1,
    only: Callable[[DeviceFault], bool] = lambda fault: True,
    on_rows: Callable[[dict[str, Any]], None] = lambda found: None,
    seed: int = 0,
) -> dict[str, Any]:
    """All of them, with chunks shared and copied, `reps` times with other seeds; hangs once."""
    on = torch.device(device)
    world = DeviceWorld(on, folder)
    hooks = DeviceHooks(on, world.spec.num_layers)
    hooks.install()
    found: dict[str, Any] = {"rows": [], "lost": [], "failed": [], "control": []}

    def keep(row: DeviceRow) -> None:
        found["rows"].append(as_json(row))
        on_rows(found)

    for shares in (True, False):
        plan = [each for each in plan_of(shares=shares, on_gpu=hooks.on_gpu) if only(each)]
        if not plan:
            continue
        lane = DeviceLane(world, hooks, shares=shares)
        lane.on_row = keep
        name = SHARED if shares else COPIES
        try:
            lane.learn()
            found["control"].append({"way": name, **lane.control()})
            print(found["control"][-1], flush=True)
            numbered = list(enumerate(plan))
            for rep in range(reps):
                # seeds of a fault are even and odd: with and without another request beside it
                turn = [
                    (f, seed + 1001 * rep + n) for n, f in numbered if not rep or f.kind != HANG
                ]
                lane.start()
                lane.run(turn)
        except Exception as error:
            traceback.print_exc()
            found["failed"].append(f"{name}: {type(error).__name__}: {error}"[:300])
            hooks.clear()
            lane.stop()
    world.close()
    found["world"] = [world.facts()]
    loss = DeviceFault(ENGINE, FORWARD, GONE, real=True)
    if hooks.on_gpu and only(loss):
        keep(real_loss(folder / "loss", device, seed))
    return found
