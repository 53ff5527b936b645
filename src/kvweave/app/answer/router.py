"""How a prompt is prefilled: as the caller says, as the planner does, or by default.

    reuse given          that strategy; "auto": the planner's choice; "full": nothing is reused
    only a ratio given   weave, the best at every ratio on held-out data (SmolLM2)
    neither              "auto" where chunk KV is stored and prices are known, else what is exact

What is exact is always reused and always kept, because it costs no quality; "full" alone, which is
for measurements, reads nothing of it. A default never measures the machine, which takes seconds:
the answer's explain record says so.
"""

import threading
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvweave.app.answer.notes import AnswerNotes
from kvweave.app.answer.question import AUTO, Question
from kvweave.app.answer.settings import NO_LIBRARY
from kvweave.app.answer.stages import Planned
from kvweave.app.audit.auditor import Auditor
from kvweave.app.auto.measurements import Measurements
from kvweave.app.auto.requests import Fusion, exact_request, fused_request
from kvweave.app.library.kv_behind import MOST_PREAMBLES, KVBehind, KVSource, PreambleKey
from kvweave.app.library.runtime import ModelRuntime
from kvweave.config import PlannerSettings
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.errors import ConfigError, RequestError
from kvweave.fuse.selectors.strategies import open_strategy, takes_layers
from kvweave.fuse.strategy import ModelFacts, Strategy, chosen_ratio
from kvweave.plan.ordering import OrderPermission
from kvweave.reasons import Reason
from kvweave.text.prompt import Prompt

if TYPE_CHECKING:
    from kvweave.app.auto.auto_planner import AutoPlanner, PromptPlan
    from kvweave.plan.plan import Plan

WITH_RATIO = "weave"  # what a ratio alone means; see bench/results/quality-h200.json
MOST_PLANNERS = MOST_PREAMBLES  # those not used for longest start anew
EnginePlan = Planned[Prompt, EngineRequest]


class NamedStrategy(NamedTuple):
    """A strategy that the caller named."""

    strategy: Strategy
    ratio: float
    is_usual: bool = False  # by the configuration: the question names none


class Router:
    """Plans how prompts are computed, with one model and a source of chunk KV. Any thread."""

    def __init__(
        self,
        runtime: ModelRuntime,
        source: KVSource | None,
        measured: Measurements,
        auditor: Auditor,
        settings: PlannerSettings | None = None,
    ) -> None:
        """`source` None: no chunk KV is kept."""
        self._settings = settings or PlannerSettings()
        self._auditor = auditor
        self._decoder = runtime.decoder
        self._tokenizer = runtime.tokenizer
        self._client = runtime.client
        self._source = source
        self._measured = measured
        self._opening = threading.Lock()
        self._planners: OrderedDict[tuple[KVBehind, str], AutoPlanner] = OrderedDict()

    def open_named(self, reuse: str | None, ratio: float | None) -> NamedStrategy | None:
        """The strategy that was named, ready for this model; None: it is still to be chosen."""
        name = WITH_RATIO if reuse is None and ratio is not None else reuse
        if name is None or name == AUTO:
            return None
        # a damaged profile does not matter to a strategy that does not use it
        num_layers = self._decoder.spec.num_layers
        facts = self._measured.facts if takes_layers(name) else ModelFacts(num_layers)
        strategy = open_strategy(name, facts)
        return NamedStrategy(strategy, chosen_ratio(strategy, ratio))

    def plan(
        self, prompt: Prompt, question: Question, named: NamedStrategy | None, notes: AnswerNotes
    ) -> EnginePlan:
        """How a prompt is answered; `named` is the question's. Nothing is remembered of it before
        its first token: it may be a guess. Raises RequestError if it cannot be answered."""
        self._client.check(prompt.token_ids)
        kv = self._kv(prompt)
        if named is not None:
            return self._as_named(prompt, question, named, notes)
        why = self._why_exact(prompt, question, kv)
        if why is None and kv is not None:
            return self._plan_freely(prompt, question, kv, notes)
        notes.why = why
        return self._exact(prompt, question, kv, notes)

    def get_ready(self, key: PreambleKey, question: Question, named: NamedStrategy | None) -> None:
        """Do what a first prompt behind this preamble would wait for."""
        if self._source is None:
            return
        kv = self._source.behind(key)
        if question.reuse == AUTO or (named is None and self._measured.is_measured):
            self.planner(kv, key.tenant)
        elif named is not None and named.strategy.reuses == "all":
            kv.preamble()

    def preview(self, prompt: Prompt, question: Question) -> "Plan":
        """What "auto" would do."""
        self._client.check(prompt.token_ids)
        kv = self._kv(prompt)
        if kv is None:
            raise ConfigError(NO_LIBRARY)
        planner = self.planner(kv, prompt.tenant)
        return planner.plan(prompt, question.allowed, question.permission).plan

    def planner(self, kv: KVBehind, tenant: str = "") -> "AutoPlanner":
        """What chooses for "auto". The first call waits for the engine and may measure the
        machine, with the decoder."""
        with self._opening:
            key = (kv, tenant)
            if key not in self._planners:
                self._planners[key] = self._client.run_alone(lambda: self._open_planner(*key))
                if len(self._planners) > MOST_PLANNERS:
                    self._planners.popitem(last=False)
                self._measured.measure_when_idle()  # once more, if others were in the way
            self._planners.move_to_end(key)
            return self._planners[key]

    def _open_planner(self, kv: KVBehind, tenant: str) -> "AutoPlanner":
        from kvweave.app.auto.auto_planner import AutoPlanner

        engine, audited = self._client.engine, self._auditor.log
        return AutoPlanner(kv, self._measured, engine, audited, tenant, self._settings)

    def _kv(self, prompt: Prompt) -> KVBehind | None:
        if self._source is None or not (prompt.chunks or prompt.history):
            return None
        return self._source.behind(PreambleKey(prompt.tenant, prompt.preamble))

    def _why_exact(self, prompt: Prompt, question: Question, kv: KVBehind | None) -> Reason | None:
        """Why there is nothing to plan; None: the planner may choose."""
        if kv is None:
            return Reason.NO_MEMORY if prompt.chunks or prompt.history else Reason.NO_CHUNKS
        if question.reuse == AUTO:
            return None
        may_move = question.permission is OrderPermission.FREE
        if not (may_move or kv.has_kv((*prompt.history, *prompt.chunks))):
            return Reason.NOTHING_STORED
        if self._measured.is_measured:
            return None
        self._measured.measure_when_idle()
        return Reason.NOT_MEASURED

    def _exact(
        self, prompt: Prompt, question: Question, kv: KVBehind | None, notes: AnswerNotes
    ) -> EnginePlan:
        """What the knowledge tree has is taken, the rest is computed and kept there."""
        request = exact_request(prompt, question.drawn, self._tokenizer.eos_ids, use_tree=True)
        listeners = partial(_note, notes), partial(_see, kv, prompt)
        return Planned(prompt, request, notes, listeners)

    def _as_named(
        self, prompt: Prompt, question: Question, named: NamedStrategy, notes: AnswerNotes
    ) -> EnginePlan:
        kv = self._kv(prompt)
        if question.permission is not OrderPermission.FREE:  # "auto" is the planner's to judge
            return self._as_found(prompt, question, named, kv, notes)
        if named.strategy.reuses == "none":
            raise RequestError("order 'free' gains nothing with reuse 'full'; leave one out")
        if kv is None:
            return self._as_found(prompt, question, named, kv, notes)
        planner = self.planner(kv, prompt.tenant)
        chosen = planner.plan(prompt, question.allowed, question.permission)
        made = self._as_found(chosen.prompt, question, named, kv, notes)
        made = replace(made, request=replace(made.request, num_kept=chosen.plan.num_kept))
        return made.heard_by(lambda _: planner.count_chunks(chosen))

    def _as_found(
        self,
        prompt: Prompt,
        question: Question,
        named: NamedStrategy,
        kv: KVBehind | None,
        notes: AnswerNotes,
    ) -> EnginePlan:
        """Plan a prompt by the strategy that was named, its chunks as they stand."""
        strategy, eos_ids = named.strategy, self._tokenizer.eos_ids
        if strategy.reuses == "none":  # for measurements: it leaves nothing behind
            request = exact_request(prompt, question.drawn, eos_ids, use_tree=False)
            return Planned(prompt, request, notes, (partial(_note, notes),))
        if strategy.reuses == "exact":
            return self._exact(prompt, question, kv, notes)
        if self._source is None:
            raise RequestError(f"reuse {strategy.name!r}: {Reason.NO_MEMORY}; leave it out")
        if kv is None:  # without chunks there is nothing but what is exact
            return self._exact(prompt, question, kv, notes)
        if extras := strategy.needs(self._decoder.spec.num_layers).extras:
            kv.add_extras((*prompt.history, *prompt.chunks), extras, prompt.as_of)
        fusion = Fusion(strategy, named.ratio)
        request = fused_request(kv, prompt, question.drawn, eos_ids, fusion)
        made = Planned(prompt, request, notes, (partial(_note, notes), partial(_see, kv, prompt)))
        return self._watch_for_audit(made, question, is_planned=False) if named.is_usual else made

    def _plan_freely(
        self, prompt: Prompt, question: Question, kv: KVBehind, notes: AnswerNotes
    ) -> EnginePlan:
        """Plan a prompt as the planner chooses, from what tree and tiers hold now."""
        planner = self.planner(kv, prompt.tenant)
        chosen = planner.plan(prompt, question.allowed, question.permission)
        request = planner.request(chosen, question.drawn, self._tokenizer.eos_ids)
        notes.why = planner.hint(chosen)
        observe = partial(_observe, planner, chosen, planner.num_first_times(), notes)
        made = Planned(chosen.prompt, request, notes, (observe,))
        return self._watch_for_audit(made, question, is_planned=True)

    def _watch_for_audit(
        self, made: EnginePlan, question: Question, *, is_planned: bool
    ) -> EnginePlan:
        """Have a prompt audited if it is fused and the auditor chooses it."""
        if question.watched:  # by somebody else, who keeps what the model thought
            return made
        watch = self._auditor.watch(made.request, question.allowed, is_planned=is_planned)
        if watch is None:
            return made
        made.notes.audit = watch.note
        return replace(made, request=watch.request).heard_by(*watch.listeners)


def _note(notes: AnswerNotes, ticket: Ticket) -> None:
    """Keep how a prompt was prefilled."""
    if ticket.record is not None:
        notes.keep(ticket.record)


def _observe(
    planner: "AutoPlanner",
    chosen: "PromptPlan",
    first_times: int,
    notes: AnswerNotes,
    ticket: Ticket,
) -> None:
    """Keep what became of a plan, from which the planner learns."""
    seen = planner.observe(chosen, ticket, first_times)
    notes.decision, notes.why = seen.decision, seen.why or notes.why
    _note(notes, ticket)


def _see(kv: KVBehind | None, prompt: Prompt, _: Ticket) -> None:
    """Count the chunks of a prompt: those that come back get their KV stored."""
    if kv is not None:
        kv.saw(prompt.chunks, as_of=prompt.as_of, has_front=not prompt.history)
