"""The life of a request: it begins, loads, is computed, answers and ends. On the engine thread."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvweave.engine.fused_step import (
    Loaded,
    Loading,
    PrefillMode,
    prepare,
    waits_outside,
    way_of,
    weave,
)
from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import path_of
from kvweave.engine.reference import check_prompt
from kvweave.engine.request import FusedPart, Ticket
from kvweave.engine.runner import Ran
from kvweave.engine.sampling import Sampler
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.stats import EngineCounts, exact_record, joined_record
from kvweave.errors import RequestError
from kvweave.fuse.prefill import Prefilled, StoredPrompt
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import PagedKV

log = logging.getLogger(__name__)


class Lifecycle:
    """Knows every request that is not ended. Whatever ends one, all it holds goes back."""

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler[EngineSequence],
        placing: PageManager,
        loading: Loading,
    ) -> None:
        self._decoder = decoder
        self._scheduler = scheduler
        self._placing = placing
        self._loading = loading
        self._arrivals = 0
        self.lives: dict[Ticket, EngineSequence] = {}
        self.counts = EngineCounts()

    def heard_of(self, ticket: Ticket) -> None:
        """A ticket is new, or its owner released or cancelled it."""
        live = self.lives.get(ticket)
        if ticket.is_cancelled:
            self.end(ticket)
        elif live is not None:
            self._release(live)
        elif not ticket.is_done:
            self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        try:
            request = ticket.make()
            ids = request.prompt_ids
            self.check(ids)
        except Exception as error:  # the planner's, or what it planned cannot be computed
            ticket.end(error)
            return
        self._arrivals += 1
        live = EngineSequence(
            self._arrivals,
            len(ids),
            ticket.is_held,
            own_step=request.fused is not None,
            request=request,
            ticket=ticket,
            prompt_len=len(ids),
            ids=ids,
            room=min(request.sampling.max_tokens, self._most_tokens() - len(ids)),
            sampler=Sampler(request.sampling),
            kv=PagedKV(self._placing.pool),
            as_of=self._placing.prefixes.as_of(request),
            path=path_of(request.namespace, request.preamble, request.chunks),
        )
        self.lives[ticket] = live
        if not self._loads(live):
            self._scheduler.add(live)

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless a prompt can be computed here. Any thread."""
        spec = self._decoder.spec
        check_prompt(prompt_ids, spec.vocab_size, spec.max_context)
        most = self._placing.most_tokens
        if len(prompt_ids) >= most:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, the KV pool holds {most} with the "
                "answer; send less text or give the engine more pool_tokens"
            )

    def _most_tokens(self) -> int:
        return min(self._decoder.spec.max_context, self._placing.most_tokens)

    def loads_again(self, live: EngineSequence) -> bool:
        """A request lost its pages: whether it gets its bytes, which it gave back, before it waits
        for others."""
        return live.stored is None and self._loads(live)

    def _loads(self, live: EngineSequence) -> bool:
        """Begin to get the bytes of a request, if it should have them before it takes a step."""
        part = live.request.fused
        busy = self._scheduler.is_busy
        if part is None or not waits_outside(part.strategy, part.expected, busy):
            return False
        started_s = time.perf_counter()
        self._loading.start(part, lambda got: self._loaded(live, got, started_s))
        return True

    def _loaded(self, live: EngineSequence, got: Loaded, started_s: float) -> None:
        """The bytes of a request are there, or will never be."""
        live.ticket.timeline.loading_s += time.perf_counter() - started_s
        if isinstance(got, BaseException):
            self.end(live.ticket, got)
        elif live.ticket not in self.lives:  # cancelled meanwhile
            got.close()
        else:
            live.stored = got
            self._scheduler.add(live, first=live.preempted > 0)

    def _release(self, live: EngineSequence) -> None:
        """A held request goes on."""
        if live.held:
            self.counts.released(live)
        logits, live.logits = live.logits, None
        self._scheduler.release(live)
        if logits is not None:
            self._answer(live, logits)

    def hand_out(self, ran: Ran, seconds: float, *, shared: bool) -> None:
        """What a common step gave one request."""
        live = ran.work.seq
        if ran.error is not None:
            self.end(live.ticket, ran.error)
            return
        was_woven = live.sparse is None
        live.advance(ran.work.num_rows)
        if not was_woven and live.sparse is None:
            self.counts.add(f"fused_{PrefillMode.JOINED}")
        self._placing.offer(live)
        live.ticket.timeline.stepped(seconds, shared)
        if ran.logits is None:
            return
        if live.ticket.record is None:
            is_fused = live.request.fused is not None
            live.ticket.record = joined_record(live) if is_fused else exact_record(live)
        self._answer(live, ran.logits, ran.likeliest)

    def weave(self, live: EngineSequence) -> None:
        """The own step of a fused request: its whole prefill, or what must be done at once."""
        started_s = time.perf_counter()
        prefilled: Prefilled | None = None
        try:
            stored = live.stored or self._open(live)
            try:
                way = self._way(live, stored)
                self.counts.add("fused_begun")
                if way is PrefillMode.JOINED:
                    prepared, record = prepare(self._decoder, live, stored, self._placing)
                else:
                    prefilled = weave(self._decoder, live, stored, self._placing)
                    record = prefilled.record
            finally:
                stored.close()
                live.stored = None
        except Exception as error:  # this request's, and no other's
            self.end(live.ticket, error)
            return
        seconds = time.perf_counter() - started_s
        live.ticket.timeline.stepped(seconds, False)
        live.woven = replace(record, way=str(way))
        if prefilled is None:
            live.apart_s += seconds
            self._placing.prepared(live, prepared)
            return
        self._placing.woven(live)
        self.counts.add(f"fused_{way}")
        if live.ticket.record is None:
            live.ticket.record = live.woven
        if live.known == live.prompt_len:  # else it was preempted while it answered
            self._answer(live, prefilled.logits)

    def _way(self, live: EngineSequence, stored: StoredPrompt) -> PrefillMode:
        return way_of(
            self._part(live).strategy,
            alone=self._scheduler.is_alone(live),
            held=live.held,
            arrived=stored.has_arrived,
            copies=self._decoder.device.type == "cuda",
        )

    def _open(self, live: EngineSequence) -> StoredPrompt:
        return self._loading.open(self._part(live))

    def _part(self, live: EngineSequence) -> FusedPart:
        assert live.request.fused is not None, "a fused request says how"
        return live.request.fused

    def _answer(self, live: EngineSequence, logits: Tensor, likeliest: int | None = None) -> None:
        """Draw a token and hand it out; a held request keeps the logits instead."""
        if live.held:
            live.logits = logits.clone()
            live.ticket.timeline.prefilled_s = time.perf_counter()
            return
        if not live.answered:
            self.counts.first_token(live)
        try:
            choice = live.choose(logits, likeliest)
        except Exception as error:  # such as logits that are no numbers: this request's
            self.end(live.ticket, error)
            return
        self.counts.add("tokens_answered")
        if live.take(choice):
            self.end(live.ticket)

    def end(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """A request is finished, cancelled or failed."""
        live = self.lives.pop(ticket, None)
        try:
            if live is not None:
                self._take_back(live)
                how = "failed" if error else "aborted" if ticket.is_cancelled else "finished"
                self.counts.add(f"requests_{how}")
        finally:  # whatever is wrong with the books, nobody waits for ever
            ticket.end(error)

    def _take_back(self, live: EngineSequence) -> None:
        if live.held:
            self.counts.dropped(live)
        self._scheduler.remove(live)
        if live.stored is not None:
            live.stored.close()
        self._placing.retire(live)
