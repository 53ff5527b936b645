"""One calibration: what is measured, whether it fits into the model's context, what comes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvweave.calibrate.asked_kb import AskedKB
from kvweave.calibrate.case import Case, hash_cases
from kvweave.calibrate.gate import BOUND, OWN, Table
from kvweave.calibrate.measure import ORDER, Setting, measure
from kvweave.calibrate.questions import template_closing
from kvweave.calibrate.subject import Subject
from kvweave.calibrate.tabulate import TableOrigin, tabulate
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import Variant, digest_ids
from kvweave.fuse.encode.preparation import Preparation, Shortage, Texts, find_shortage
from kvweave.fuse.selectors.strategies import open_strategy, takes_layers
from kvweave.fuse.strategy import ModelFacts, Strategy


@dataclass(frozen=True, slots=True)
class Experiment:
    """Every setting behind every encoding context on every case."""

    data: str  # name of the questions' file
    cases: Sequence[Case]  # that fit into the model's context
    variants: Sequence[Variant]
    settings: Sequence[Setting]
    bound: float = BOUND  # of mean KL, nats per token
    kb: AskedKB | None = None  # whose neighbours chunks stand behind; None: no neighbours
    kind: str = OWN  # of the questions, see gate.Table


def settings_for(subject: Subject, names: Sequence[str], ratios: Sequence[float]) -> list[Setting]:
    """Another order of the chunks, and every strategy at every ratio; plain reuse once, as it
    recomputes nothing."""
    facts = subject.profile.facts(subject.decoder.spec.num_layers)
    settings = [ORDER]
    for strategy in [_open_measured(name, facts) for name in names]:
        each = ratios if strategy.takes_ratio else [0.0]
        settings += [Setting(strategy, ratio) for ratio in each]
    return settings


def _open_measured(name: str, facts: ModelFacts) -> Strategy:
    """A strategy that is to be measured: with the critical layers that it will be used with."""
    if takes_layers(name) and not facts.critical_layers:
        raise ConfigError(
            f"calibrate measures {name!r} with the critical layers of this model; "
            "find them with `kvweave calibrate layers`"
        )
    return open_strategy(name, facts)


def run_experiment(
    subject: Subject, experiment: Experiment, on_case: Callable[[int], None] | None = None
) -> list[Table]:
    """One table per encoding context. `on_case` hears how many cases are done.

    Raises ModelError and ConfigError as `measure` does. Call `check_room` first.
    """
    cases, settings = experiment.cases, experiment.settings
    contexts = [subject.encoding(variant, experiment.kb) for variant in experiment.variants]
    answered = measure(
        subject.decoder,
        subject.tokenizer,
        cases,
        contexts,
        settings,
        bound=experiment.bound,
        on_case=on_case,
    )
    origin = TableOrigin(
        subject.revision,
        subject.dtype,
        experiment.data,
        hash_cases(cases),
        contexts[0].context,
        digest_ids(cases[0].preamble),
        sum(case.num_chunk_tokens for case in cases),
        experiment.kind,
        any(case.history for case in cases),
    )
    return [
        tabulate(answered, settings, each.name, replace(origin, context=each.context))
        for each in contexts
    ]


def check_room(subject: Subject, experiment: Experiment) -> None:
    """Refuse encoding contexts that leave no room for a chunk, before anything is measured.

    Neighbours may be as long as chunks of the knowledge base are at most; else the longest chunk of
    the cases counts. Raises ConfigError.
    """
    cases, kb = experiment.cases, experiment.kb
    spec, closing = subject.decoder.spec, template_closing(subject.tokenizer)
    longest = max(len(chunk) for case in cases for chunk in case.chunks)
    preamble_len = len(cases[0].preamble)  # the same for all: it is the system prompt's
    for variant in experiment.variants:
        chunk_tokens = longest
        if variant.kind == "neighbours":
            assert kb is not None, "neighbours without a knowledge base are refused before"
            chunk_tokens = kb.chunk_tokens
        short = find_shortage(
            variant,
            Texts.for_preparation(subject.tokenizer, Preparation(variant), closing),
            preamble_len,
            chunk_tokens,
            spec.max_context,
        )
        if short is not None:
            remedy = _remedy(short, has_kb=kb is not None)
            raise ConfigError(f"{short.says}; {remedy}")


def _remedy(short: Shortage, *, has_kb: bool) -> str:
    if short.chunk_tokens is None:
        fits = f"{short.encoding} or less" if short.encoding else f"--encodings {short.less}"
        return f"give {fits}"
    if has_kb:
        return f"make a new knowledge base with --chunk-tokens {short.chunk_tokens} or fewer"
    return f"make passages of {short.chunk_tokens} tokens or fewer"
