"""How a prompt becomes a request to the engine: as the caller says, or as the planner does.

    reuse given          that strategy; "auto": the planner's choice
    only a ratio given   weave, the best at every ratio on held-out data (SmolLM2)
    neither              "auto" where stored chunk KV can be used and prices are known, else "full"

Nobody who did not ask for it waits while the machine is measured: a default never does that, and
the answer's explain record says that it did not. Part of the composition root: only `replying.py`
uses it. Any thread, unless a method says otherwise.
"""

from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvweave.app.answer.answering import AnswerNotes
from kvweave.app.answer.engine_client import (
    EngineClient,
    OnFirst,
    Submission,
    exact_request,
    keep_record,
)
from kvweave.app.question import AUTO, Question
from kvweave.calibrate.profiles import Profile, find_profile
from kvweave.engine.request import Ticket
from kvweave.errors import ConfigError
from kvweave.fuse.strategy import (
    NEEDS_PROFILE,
    ModelFacts,
    Strategy,
    chosen_ratio,
    open_strategy,
)
from kvweave.model.decoder import Decoder
from kvweave.plan.ordering import OrderPermission
from kvweave.text.prompt import Prompt
from kvweave.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvweave.app.auto.auto_planner import AutoPlanner
    from kvweave.app.library.library import Library
    from kvweave.app.library.promotion import ChunkPromotion
    from kvweave.plan.plan import Plan
    from kvweave.plan.profile import MachineProfile

WITH_RATIO = "weave"  # what a ratio alone means; see bench/results/quality-h200.json
NO_LIBRARY = "no knowledge base is open"
OTHER_PREAMBLE = "stored chunk KV belongs to another system prompt"
NOTHING_STORED = "none of these chunks has stored KV"
NOT_MEASURED = "this machine was never measured; reuse 'auto' or `kvweave plan` does that, once"


class NamedStrategy(NamedTuple):
    """A strategy that the caller named."""

    strategy: Strategy
    ratio: float


class Router:
    """Ways to answer with one model and, where one is open, its knowledge base."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        asking: EngineClient,
        library: "Library | None" = None,
        seen: "ChunkPromotion | None" = None,
        tenant: str = "",
    ) -> None:
        """`seen` hears which chunks came with requests that reuse."""
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._asking = asking
        self._library = library
        self._seen = seen
        self._tenant = tenant
        self.planning: AutoPlanner | None = None  # opened by the first plan

    def close(self) -> None:
        """Keep what was learnt of the machine."""
        if self.planning is not None:
            self.planning.close()

    @property
    def library(self) -> "Library":
        if self._library is None:
            raise ConfigError("no knowledge base is open; use Weave.open('./kb') or --kb DIR")
        return self._library

    @cached_property
    def profile(self) -> Profile | None:
        return find_profile(self._decoder.weights.fingerprint, self._tokenizer.fingerprint)

    @cached_property
    def facts(self) -> ModelFacts:
        num_layers = self._decoder.spec.num_layers
        return ModelFacts(num_layers) if self.profile is None else self.profile.facts(num_layers)

    def stated(self, ask: Question) -> NamedStrategy | None:
        """The strategy that was named, ready for this model; None: it is still to be chosen."""
        name = WITH_RATIO if ask.reuse is None and ask.ratio is not None else ask.reuse
        if name is None or name == AUTO:
            return None
        # a damaged profile is no trouble of who does not use it
        needed = name in NEEDS_PROFILE
        facts = self.facts if needed else ModelFacts(self._decoder.spec.num_layers)
        strategy = open_strategy(name, facts)
        return NamedStrategy(strategy, chosen_ratio(strategy, ask.ratio))

    def way(
        self, prompt: Prompt, ask: Question, stated: NamedStrategy | None, note: AnswerNotes
    ) -> Submission:
        """How a prompt is answered. `stated` is the ask's. Says nothing to anybody before the first
        token: it may be a guess. Raises RequestError if it cannot be answered."""
        self._asking.check(prompt.token_ids)
        if stated is None and ask.reuse is None:
            note.why = self._why_full(prompt)
            if note.why is not None:
                full = open_strategy("full", ModelFacts(self._decoder.spec.num_layers))
                return self._named(prompt, ask, NamedStrategy(full, 0.0), note)
        if stated is None:
            return self._planned(prompt, ask, note)
        return self._named(prompt, ask, stated, note)

    def plan(self, prompt: Prompt, ask: Question) -> "Plan":
        """What "auto" would do. Waits for its turn on the engine thread."""
        self._asking.check(prompt.token_ids)
        self.library.check_preamble(prompt)
        order = OrderPermission(ask.order)
        return self._asking.engine.run_alone(
            lambda: self._open_planning().plan(prompt, ask.bound, order).plan
        )

    def _why_full(self, prompt: Prompt) -> str | None:
        """Why nothing is reused where nobody said how; None: the planner may choose."""
        if self._library is None:
            return NO_LIBRARY
        if not self._library.is_behind(prompt):
            return OTHER_PREAMBLE
        if not self._library.has_kv(prompt.chunks):
            return NOTHING_STORED
        if self.planning is None:
            from kvweave.app.auto.machine import find_machine

            if self._asking.measured is None and find_machine(self._decoder) is None:
                return NOT_MEASURED
        return None

    def _named(
        self, prompt: Prompt, ask: Question, stated: NamedStrategy, note: AnswerNotes
    ) -> Submission:
        """Answered as the caller says."""
        strategy, eos_ids = stated.strategy, self._tokenizer.eos_ids
        on_first = keep_record(note, prompt)
        if strategy.reuses != "all":
            use_tree = strategy.reuses == "exact"
            request = exact_request(prompt, ask.drawn, eos_ids, use_tree=use_tree)
        else:
            self.library.check_preamble(prompt)
            request = self.library.request(prompt, ask.drawn, eos_ids, strategy, stated.ratio)
            on_first = self._saw(prompt, on_first)
        return Submission(len(prompt.token_ids), request, on_first, note)

    def _saw(self, prompt: Prompt, on_first: OnFirst) -> OnFirst:
        def hear(ticket: Ticket) -> None:
            on_first(ticket)
            if self._seen is not None:
                self._seen.saw(prompt.chunks, as_of=prompt.as_of)

        return hear

    def _planned(self, prompt: Prompt, ask: Question, note: AnswerNotes) -> Submission:
        """Planned when its turn comes, by what the engine's tree holds then."""
        from kvweave.app.auto.auto_planner import Wish

        self.library.check_preamble(prompt)
        eos_ids, order = self._tokenizer.eos_ids, OrderPermission(ask.order)
        wish = Wish(prompt, ask.drawn, eos_ids, ask.bound, order, note)
        return Submission(
            len(prompt.token_ids),
            lambda: self._open_planning().request(wish),
            lambda ticket: self._open_planning().observe(wish, ticket),
            note,
        )

    def measure(self) -> None:
        """Measure this machine, unless it was: seconds, in which the engine does nothing else."""
        self._asking.engine.run_alone(self._open_machine)

    def _open_machine(self) -> "MachineProfile":
        """What things cost here, a copy of one's own. On the engine thread: may measure."""
        from kvweave.app.auto.machine import find_machine, new_machine
        from kvweave.app.library.encoder_setup import CODEC

        asking = self._asking
        kept = find_machine(self._decoder)  # with what answers taught it since
        if kept is not None:
            return kept
        if asking.measured is None:
            asking.measured = new_machine(self._decoder, CODEC)
        return deepcopy(asking.measured)  # where nothing can be kept, others need it too

    def _open_planning(self) -> "AutoPlanner":
        """On the engine thread: the first time may measure the machine, with the decoder."""
        if self.planning is None:
            from kvweave.app.auto.auto_planner import AutoPlanner

            self.planning = AutoPlanner(
                self.library,
                self._decoder,
                self.facts,
                self.profile,
                self._open_machine(),
                engine=self._asking.engine,
                seen=self._seen,
                tenant=self._tenant,
            )
        return self.planning
