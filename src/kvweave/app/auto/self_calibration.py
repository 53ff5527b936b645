"""Measures in idle time what fusing costs on the documents of a knowledge base: whether anything
may be fused where nothing that was measured speaks for its model, and else whether less is enough.

    a chunk  →  a question about it  →  a search  →  a prompt  →  full prefill's answer
                                                              →  the same answer, fused several ways

The engine computes the prompts as it does those of users, from the chunk KV that users get, in the
background: it gives way to every answer. Where answers are fused already nobody waits for it, so a
question is asked only when all chunk KV is made and nobody was answered for a while. What comes of
a question goes to the evidence (`calibrate/own_evidence.py`), which says what to try next and when
enough were asked; the gate follows it (`growing_gate.py`).
"""

import logging
import random
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import torch

from kvweave.app.auto.requests import Fusion, exact_request, fused_request
from kvweave.app.library.library import Library
from kvweave.app.library.runtime import ModelRuntime
from kvweave.calibrate.asked_kb import make_questions
from kvweave.calibrate.measure import RECOMPUTE_ALL, Outcome, Setting
from kvweave.calibrate.own_evidence import AnsweredQuestion
from kvweave.calibrate.trials import judge
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.errors import EngineClosed, KVWeaveError
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.metrics import Metrics
from kvweave.text.prompt import Prompt, lay_out
from kvweave.types import Chunk

log = logging.getLogger(__name__)

WATCHED_TOKENS = 16  # of an answer at most: each is a float per word of the vocabulary
LOOK_S = 0.5  # how often a wait looks whether it is to end
KV_LOOK_S = 0.1  # how often it is looked whether chunks have KV
KV_S = 60.0  # that a question waits for the KV of its chunks; then the next one is asked
REST_S = 5.0  # without an answer before one is asked that nobody waits for
MOST_FAILED = 10  # questions in a row that fail: then it ends
FAILED_S = 3.0  # until the next one
ROUND = 64  # questions made at a time: their chunks are drawn from all of them
AHEAD = 8  # questions whose chunks get their KV first


class SelfCalibration:
    """Asks the documents of one library about themselves, on a thread of its own. Any thread; only
    `close` and `wait` wait.

    The thread ends when enough was asked, with `close`, and by itself when the main thread has
    ended.
    """

    def __init__(self, runtime: ModelRuntime, library: Library, system: str) -> None:
        """Begin. `system` is the system prompt that documents are asked behind."""
        self.metrics = Metrics()
        self._client = runtime.client
        self._tokenizer = runtime.tokenizer
        self._library = library
        self._num_chunks = library.kv.worth.num_chunks
        self._evidence = library.kv.worth.evidence
        self._system = system
        self._under_way: Ticket | None = None
        self._lock = threading.Lock()  # guards that, and that nothing begins once it is to end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="self-calibration")
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until enough was asked. False: it takes longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ask no more; what is under way is given up. The engine still runs. Harmless the second
        time."""
        self._closing.set()
        with self._lock:
            under_way = self._under_way
        if under_way is not None:
            under_way.cancel()
        self._thread.join()

    # ---- the thread

    def _work(self) -> None:
        allowed = self._evidence.allowed
        known = "fusing was never measured for this model"
        if allowed is not None:
            known = f"{allowed.strategy} at {allowed.ratio:.0%} is fused, perhaps less is enough"
        log.info("%s: its documents are asked in idle time", known)
        try:
            self._ask_all()
        except EngineClosed:
            return
        except Exception:  # what the device raises: answers go on, and it must be seen
            log.exception("what fusing costs here could not be measured")
            self.metrics.count("calibration_failed_total")
            return
        finally:
            self._evidence.is_asked = False
            self._library.maker.look()
        if not self._evidence.is_over:
            return
        state = self._evidence.state()
        if state.state == "open" and not state.why:
            log.info(
                "%d questions of its own documents: %s at %.0f %% is within the bound",
                *(state.asked, state.strategy, 100 * (state.ratio or 0.0)),
            )
        else:
            log.info("%d questions of its own documents: %s", state.asked, state.why)

    def _ask_all(self) -> None:
        """Ask until enough was asked. One that fails is left out; several in a row end it."""
        waiting: deque[tuple[str, list[Chunk]]] = deque()
        questions, num_failed = self._questions(), 0
        while not self._evidence.is_over and self._may_go_on():
            try:
                is_answered = self._ask_next(questions, waiting)
            except EngineClosed:
                raise
            except (KVWeaveError, sqlite3.Error, OSError, RuntimeError) as error:
                num_failed += 1  # a chunk that was deleted meanwhile, a full pool, a busy disk
                self.metrics.count("calibration_skipped_total", why="failed")
                log.info("a question of self-calibration is left out: %s", error)
                if num_failed == MOST_FAILED:
                    raise
                questions = self._questions()  # where it is what failed it gives no more
                self._closing.wait(FAILED_S)
                continue
            if is_answered:
                num_failed = 0

    def _ask_next(self, questions: Iterator[str], waiting: deque[tuple[str, list[Chunk]]]) -> bool:
        """Ask one question; `waiting` are those whose chunks get their KV. False: it was left
        out, or its time has not come."""
        if self._evidence.allowed is not None and not self._is_at_rest():
            return False
        while len(waiting) < AHEAD and self._may_go_on():
            question = next(questions, None)
            if question is None:
                break
            found = self._find(question)
            if len(found) > 1:
                waiting.append((question, found))
            elif not waiting:
                break  # too few documents: perhaps more come
        if not waiting:
            self._closing.wait(LOOK_S)
            return False
        self._library.maker.prefer([chunk.id for _, found in waiting for chunk in found])
        question, chunks = waiting.popleft()
        as_of = self._client.generation()
        if not self._wait_for_kv(chunks[1:]):
            self.metrics.count("calibration_skipped_total", why="no chunk KV")
            return False
        answered = self._try(self._lay_out(question, chunks, as_of))
        if answered is None:
            return False
        self._evidence.add(answered)
        self.metrics.count("calibration_questions_total")
        return True

    def _questions(self) -> Iterator[str]:
        """Questions about chunks drawn from all documents. Waits for more documents where no new
        ones can be made of those there are; none is made of a document that went."""
        catalogue = self._library.kb.catalogue
        made: set[str] = set()
        for seed in count(self._evidence.num_answered):
            generation = catalogue.generation()
            fresh = [each for each in self._draw(seed) if each not in made]
            made.update(fresh)
            for question in fresh:
                if catalogue.generation() != generation:
                    break
                yield question
            while not fresh and catalogue.generation() == generation:
                if not self._may_go_on() or self._closing.wait(LOOK_S):
                    return

    def _draw(self, seed: int) -> list[str]:
        """Make a round of questions about some of the chunks."""
        catalogue = self._library.kb.catalogue
        ids = sorted(catalogue.chunk_ids())
        drawn = random.Random(seed).sample(ids, min(len(ids), 2 * ROUND))  # noqa: S311 a sample
        chunks = catalogue.chunks(drawn)
        records = make_questions([chunks[each] for each in drawn if each in chunks], ROUND, seed)
        return [record.question for record in records]

    def _find(self, question: str) -> list[Chunk]:
        hits = self._library.kb.search(question, self._num_chunks)
        return [hit.chunk for hit in hits]

    def _lay_out(self, question: str, chunks: Sequence[Chunk], as_of: int) -> Prompt:
        ids = [chunk.token_ids for chunk in chunks]
        prompt = lay_out(self._tokenizer, question, ids, self._system)
        return replace(prompt, tenant=self._library.encoder.context.tenant_salt, as_of=as_of)

    def _is_at_rest(self) -> bool:
        """Wait a moment for all chunk KV to be made, and for an end of answers. False: there is no
        end yet."""
        answers = self._client.answers
        return self._library.maker.wait(LOOK_S) and answers.wait_for_quiet(REST_S, LOOK_S)

    def _wait_for_kv(self, chunks: Sequence[Chunk]) -> bool:
        """Wait until the chunks have KV behind their encoding context. False: they get none, or
        not in time."""
        encoder, waited_s = self._library.encoder, 0.0
        while encoder.absent(chunks, encoder.key):
            if waited_s >= KV_S or not self._may_go_on() or self._closing.wait(KV_LOOK_S):
                return False
            if self._client.answers.wait_for_none(0.0):  # else it may be made later
                waited_s += KV_LOOK_S
        return True

    def _try(self, prompt: Prompt) -> AnsweredQuestion | None:
        """Answer a prompt in full and every way that is to be tried. None: all is over, or nothing
        of it was reused."""
        names, checks_noise = self._evidence.next_settings()
        full = self._answer(exact_request(prompt, *self._draw_options(), use_tree=False))
        if full is None or not full.watched_ids:
            return None
        # tables take the first chunk for exact; else the first way that is tried would pay for it
        front = replace(prompt, chunks=prompt.chunks[:1], question=prompt.question[:1])
        self._answer(exact_request(front, Sampling(max_tokens=1), (), use_tree=True))
        answer, thought = tuple(full.watched_ids), torch.stack(full.distributions)
        nll = judge(thought, thought, answer).nll
        facts = ModelFacts(self._evidence.subject.num_layers)
        settings = [Setting(open_strategy(each.strategy, facts), each.ratio) for each in names]
        outcomes: list[Outcome] = []
        for setting in [*settings, *([RECOMPUTE_ALL] if checks_noise else [])]:
            fusion = Fusion(setting.strategy, setting.ratio)
            request = fused_request(self._library.own, prompt, *self._draw_options(), fusion)
            way = self._answer(replace(request, forced=answer))
            if way is None or way.record is None or len(way.distributions) != len(answer):
                return None
            if setting is not RECOMPUTE_ALL and not way.record.counts["reused"]:
                self.metrics.count("calibration_skipped_total", why="nothing reused")
                return None
            score = judge(thought, torch.stack(way.distributions), answer)
            outcomes.append(Outcome(score, score.nll - nll, way.record.work, None))
        noise = outcomes.pop().judged.kl_mean if checks_noise else None
        num_chunk_tokens = sum(map(len, prompt.chunks))
        sizes = len(prompt.token_ids), len(prompt.chunks), num_chunk_tokens
        return AnsweredQuestion(*sizes, noise, dict(zip(names, outcomes, strict=True)))

    def _draw_options(self) -> tuple[Sampling, frozenset[int]]:
        sampling = Sampling(max_tokens=WATCHED_TOKENS, stop_loops=False)
        return sampling, frozenset(self._tokenizer.eos_ids)

    def _answer(self, request: EngineRequest) -> Ticket | None:
        """An answer that was computed in idle time. None: all is over."""
        with self._lock:
            if self._closing.is_set():
                return None
            request = replace(request, background=True, watched=WATCHED_TOKENS)
            self._under_way = ticket = self._client.engine.submit(request)
        while not ticket.wait(LOOK_S):
            if not self._may_go_on():
                ticket.cancel()
        deque(ticket, maxlen=0)  # raises what ended it
        return None if ticket.is_cancelled else ticket

    def _may_go_on(self) -> bool:
        return not self._closing.is_set() and threading.main_thread().is_alive()
