"""How a prompt is prefilled: as the caller says, as the planner does, or by default.

    reuse given          that strategy; "auto": the planner's choice
    only a ratio given   weave, the best at every ratio on held-out data (SmolLM2)
    neither              "auto" where stored chunk KV can be used and prices are known, else "full"

A default never measures the machine, which takes seconds: the answer's explain record says so.
"""

import threading
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvweave.app.answer.token_stream import Submission
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import CODEC
from kvweave.app.notes import AnswerNotes
from kvweave.app.question import AUTO, Question
from kvweave.app.requests import Fusion, exact_request, fused_request
from kvweave.app.runtime import ModelRuntime
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
from kvweave.plan.ordering import OrderPermission
from kvweave.text.prompt import Prompt

if TYPE_CHECKING:
    from kvweave.app.auto.auto_planner import AutoPlanner
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
    """Makes prompts into submissions, with one model and, where one is open, its knowledge base.
    Any thread."""

    def __init__(
        self,
        runtime: ModelRuntime,
        library: Library | None = None,
        tenant: str = "",
        profile: Profile | None = None,
    ) -> None:
        """`profile` stands in for the model's own."""
        self._decoder = runtime.decoder
        self._tokenizer = runtime.tokenizer
        self._client = runtime.client
        self._library = library
        self._tenant = tenant
        self._given_profile = profile
        self._opening = threading.Lock()
        self._planner: AutoPlanner | None = None

    def close(self) -> None:
        """Keep what was learnt of the machine."""
        if self._planner is not None:
            self._planner.close()

    @property
    def library(self) -> Library:
        if self._library is None:
            raise ConfigError("no knowledge base is open; use Weave.open('./kb') or --kb DIR")
        return self._library

    @cached_property
    def profile(self) -> Profile | None:
        """What was measured of the model: the user's profile, or the packaged one."""
        if self._given_profile is not None:
            return self._given_profile
        return find_profile(self._decoder.weights.fingerprint, self._tokenizer.fingerprint)

    @cached_property
    def facts(self) -> ModelFacts:
        """What strategies must know of the model, from its profile if it has one."""
        num_layers = self._decoder.spec.num_layers
        return ModelFacts(num_layers) if self.profile is None else self.profile.facts(num_layers)

    def named(self, reuse: str | None, ratio: float | None) -> NamedStrategy | None:
        """The strategy that was named, ready for this model; None: it is still to be chosen."""
        name = WITH_RATIO if reuse is None and ratio is not None else reuse
        if name is None or name == AUTO:
            return None
        # a damaged profile does not matter to a strategy that does not use it
        needed = name in NEEDS_PROFILE
        facts = self.facts if needed else ModelFacts(self._decoder.spec.num_layers)
        strategy = open_strategy(name, facts)
        return NamedStrategy(strategy, chosen_ratio(strategy, ratio))

    def submission(
        self, prompt: Prompt, question: Question, named: NamedStrategy | None, notes: AnswerNotes
    ) -> Submission:
        """How a prompt is answered; `named` is the question's. Nothing is remembered of it before
        its first token: it may be a guess. Raises RequestError if it cannot be answered."""
        self._client.check(prompt.token_ids)
        if named is None and question.reuse is None:
            notes.why = self._why_full(prompt)
            if notes.why is not None:
                full = open_strategy("full", ModelFacts(self._decoder.spec.num_layers))
                named = NamedStrategy(full, 0.0)
        if named is None:
            return self._planned(prompt, question, notes)
        return self._as_named(prompt, question, named, notes)

    def get_ready(self, question: Question, named: NamedStrategy | None) -> None:
        """Do what a first submission would wait for: the planner, the library's preamble."""
        if question.reuse == AUTO or (named is None and self._is_measured()):
            self.planner()
        elif named is not None and named.strategy.reuses == "all":
            self.library.preamble()

    def plan(self, prompt: Prompt, question: Question) -> "Plan":
        """What "auto" would do."""
        self._client.check(prompt.token_ids)
        self.library.check_preamble(prompt)
        order = OrderPermission(question.order)
        return self.planner().plan(prompt, question.bound, order).plan

    def _why_full(self, prompt: Prompt) -> str | None:
        """Why nothing is reused where the caller did not say how; None: the planner may choose."""
        if self._library is None:
            return NO_LIBRARY
        if not self._library.is_behind(prompt):
            return OTHER_PREAMBLE
        if not self._library.has_kv(prompt.chunks):
            return NOTHING_STORED
        return None if self._is_measured() else NOT_MEASURED

    def _is_measured(self) -> bool:
        """Whether planning would not measure this machine first."""
        from kvweave.app.auto.machine_profile import find_machine

        if self._planner is not None or self._codec in self._client.measured:
            return True
        return find_machine(self._decoder, self._codec) is not None

    def _as_named(
        self, prompt: Prompt, question: Question, named: NamedStrategy, notes: AnswerNotes
    ) -> Submission:
        strategy, eos_ids = named.strategy, self._tokenizer.eos_ids

        def note(ticket: Ticket) -> None:
            if ticket.record is not None:
                notes.keep(ticket.record)

        if strategy.reuses != "all":
            use_tree = strategy.reuses == "exact"
            request = exact_request(prompt, question.drawn, eos_ids, use_tree=use_tree)
            return Submission(prompt, request, notes, (note,))
        library = self.library
        library.check_preamble(prompt)
        fusion = Fusion(strategy, named.ratio)
        request = fused_request(library, prompt, question.drawn, eos_ids, fusion)

        def promote(_: Ticket) -> None:
            if library.promotion is not None:
                library.promotion.saw(prompt.chunks, as_of=prompt.as_of)

        return Submission(prompt, request, notes, (note, promote))

    def _planned(self, prompt: Prompt, question: Question, notes: AnswerNotes) -> Submission:
        """As the planner chooses, from what tree and tiers hold now."""
        self.library.check_preamble(prompt)
        planner = self.planner()
        chosen = planner.plan(prompt, question.bound, OrderPermission(question.order))
        request = planner.request(chosen, question.drawn, self._tokenizer.eos_ids)
        observe = planner.observer(chosen, notes)
        return Submission(chosen.prompt, request, notes, (observe,))

    def measure(self) -> None:
        """Measure this machine, unless it was: seconds, in which the engine does nothing else."""
        self._client.run_alone(self._open_machine)

    def _open_machine(self) -> "MachineProfile":
        """What things cost here, a copy of one's own. On the engine thread: may measure."""
        from kvweave.app.auto.machine_profile import find_machine, new_machine

        measured, codec = self._client.measured, self._codec
        kept = find_machine(self._decoder, codec)  # with what answers taught it since
        if kept is not None:
            return kept
        if codec not in measured:
            measured[codec] = new_machine(self._decoder, codec)
        return deepcopy(measured[codec])  # where nothing can be kept, others need it too

    @property
    def _codec(self) -> str:
        library = self._library
        return CODEC if library is None else library.encoder.context.codec

    def planner(self) -> "AutoPlanner":
        """What chooses for "auto". The first call waits for the engine and may measure the
        machine, with the decoder."""
        with self._opening:
            if self._planner is None:
                self._planner = self._client.run_alone(self._open_planner)
            return self._planner

    def _open_planner(self) -> "AutoPlanner":
        from kvweave.app.auto.auto_planner import AutoPlanner

        machine = self._open_machine()
        client = self._client
        return AutoPlanner(
            self.library, self._decoder, self.profile, machine, client.engine, self._tenant
        )
