"""What `reuse: auto` means inside vLLM: what calibration lets through for a prompt, or why nothing.

The tables, the bound and the reasons are those of kvweave's own server: a profile under
`KVWEAVE_HOME`, or the one that comes with the model, asked through the same gate. What is not let
through is vLLM's alone. Prices are not measured here: the scheduler counts rows.
"""

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

from kvweave.app.auto.facts import CalibratedGate, fusing_strategies
from kvweave.calibrate.gate import Table
from kvweave.calibrate.profiles import Profile, find_profile
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.hosts.vllm.identity import ModelIdentity
from kvweave.hosts.vllm.reuse_request import ReuseRequest
from kvweave.plan.plan import PromptShape, Verdict
from kvweave.reasons import Reason

log = logging.getLogger("vllm.kvweave")  # vLLM shows what is below its own name

KEPT_GATES = 64  # by preamble; those not used for longest are made again


class PermittedReuse(NamedTuple):
    """A request as calibration lets it through."""

    wish: ReuseRequest  # with a strategy by name
    close: float  # share of such answers that are computed exactly after all


class AutoVerdict(NamedTuple):
    """What calibration says of one prompt."""

    permitted: tuple[PermittedReuse, ...]
    why: str  # nothing is permitted; "" where something is
    gate: dict[str, float | str]  # by strategy: the least ratio that passes, or why none does


class AutoReuse:
    """The gate of a served model. On the scheduler's thread."""

    def __init__(self, identity: ModelIdentity) -> None:
        """Reads the model's profile, once: after a calibration vLLM is started again."""
        self._identity = identity
        strategies, _ = fusing_strategies(ModelFacts(identity.spec.num_layers))
        # what is stored beside the layers is not made inside vLLM
        self._strategies = {n: s for n, s in strategies.items() if not self._wants_extras(s)}
        self._gates: OrderedDict[str, CalibratedGate] = OrderedDict()
        self._profile, self._doubt = self._find_profile()
        self._is_told = False

    @property
    def doubt(self) -> str | None:
        """Why nothing can be let through, whatever the prompt, and the way out; None: there are
        tables of this very model, dtype and encoding."""
        return self._doubt

    def tell(self) -> None:
        """Say in vLLM's log, once, what the gate goes by."""
        if self._is_told:
            return
        self._is_told = True
        name, dtype = self._identity.weights[:12], self._identity.context.dtype
        of = f"weights {name}, {dtype}, chunks behind {self._identity.encoding_context}"
        if self._doubt is not None:
            words = "reuse auto computes every prompt exactly: %s (%s). To make tables: %s"
            log.warning(words, self._doubt, of, self._identity.calibration)
        else:
            log.info("reuse auto goes by the calibration of %s", of)

    def judge(self, wish: ReuseRequest, token_ids: tuple[int, ...]) -> AutoVerdict:
        """What may be done for a prompt under the bound of its request."""
        self.tell()
        assert wish.bound is not None, "a request for auto has a bound"
        if self._doubt is not None:
            return AutoVerdict((), self._doubt, {})
        gate = self._gate(token_ids[: wish.preamble])
        shape, permitted, told = shape_of(wish, len(token_ids)), [], dict[str, float | str]()
        for name in self._strategies:
            verdict = gate.min_ratio(name, wish.bound, shape)
            if verdict.ratio is not None and verdict.ratio < 1:
                permitted.append(_permit(wish, name, verdict))
                told[name] = verdict.ratio
            elif verdict.reason is not Reason.NOT_CALIBRATED:
                told[name] = str(verdict.reason)
        why = "" if permitted else next(map(str, told.values()), str(Reason.NOT_CALIBRATED))
        return AutoVerdict(tuple(permitted), why, told)

    def _find_profile(self) -> tuple[Profile | None, str | None]:
        identity = self._identity
        try:
            profile = find_profile(identity.weights, identity.context.tokenizer)
        except ConfigError as error:  # it names a file, which clients are not told
            log.warning("%s", error)
            return None, str(Reason.BAD_PROFILE)
        if profile is None or not self._tables(profile, ()):
            return None, str(Reason.NO_PROFILE)
        return profile, None

    def _tables(self, profile: Profile, preamble_ids: tuple[int, ...]) -> tuple[Table, ...]:
        identity, preamble = self._identity, digest_ids(preamble_ids)
        return profile.tables(identity.context.model, identity.encoding_context, preamble)

    def _gate(self, preamble_ids: tuple[int, ...]) -> CalibratedGate:
        """The gate behind a preamble."""
        assert self._profile is not None, "without tables nobody asks"
        preamble = digest_ids(preamble_ids)
        gate = self._gates.pop(preamble, None)
        if gate is None:
            gate = CalibratedGate(self._tables(self._profile, preamble_ids), preamble)
        self._gates[preamble] = gate
        if len(self._gates) > KEPT_GATES:
            self._gates.popitem(last=False)
        return gate

    def _wants_extras(self, strategy: Strategy) -> bool:
        return bool(strategy.needs(self._identity.spec.num_layers).extras)


def shape_of(wish: ReuseRequest, num_tokens: int) -> PromptShape:
    """A prompt as the gate judges it. What lies between the chunks counts as what was said before:
    it is computed, and was not calibrated unless the tables have a history."""
    gaps = [part.end - part.start for part in wish.parts() if not part.is_chunk]
    return PromptShape(num_tokens, len(wish.chunks), bool(gaps), sum(gaps))


def _permit(wish: ReuseRequest, name: str, verdict: Verdict) -> PermittedReuse:
    assert verdict.ratio is not None, "it was let through"
    named = replace(
        wish, reuse=name, ratio=verdict.ratio, bound=None, close_call=verdict.close_call
    )
    return PermittedReuse(named, verdict.close)
