"""`kvweave calibrate`: what each strategy costs on this model, and the choice that follows."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvweave.cli.asked_kb import open_asked_kb
from kvweave.cli.calibrating import Subject, load_subject, progress_bar
from kvweave.cli.calibration_choices import (
    read_asked,
    settings_for,
    shares_of,
    strategy_names,
    variants_of,
)
from kvweave.cli.calibration_room import check_contexts
from kvweave.cli.calibration_view import show_layers, show_tables
from kvweave.cli.options import model_options, pass_model
from kvweave.errors import ConfigError, CorpusError, RequestError

if TYPE_CHECKING:
    from kvweave.calibrate.case import Case
    from kvweave.calibrate.encodings import FixedContext
    from kvweave.calibrate.gate import Table
    from kvweave.calibrate.measure import Setting
    from kvweave.calibrate.neighbour_context import NeighbourContext

STRATEGIES = "reuse,epic,cacheblend,fusionrag,prophetkv,qcfuse,weave,weave-deep"
RATIOS = "0.05,0.15,0.3,0.5"
MIN_CONTEXT_TOKENS = 2000  # of a sample for critical layers

file_type = click.Path(path_type=Path, dir_okay=False, exists=True)
qa_option = click.option(
    "--qa", "qa_file", type=file_type, help="Multi-passage records, JSON lines (.gz is fine)."
)
limit_option = click.option(
    "--limit", type=click.IntRange(min=1), help="Take this many questions at most (all)."
)
profile_option = click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the profile here instead of the user's folder.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


@click.group("calibrate", invoke_without_command=True)
@click.option("--questions", "questions_file", type=file_type, help="Questions to ask of --kb.")
@click.option(
    "--kb",
    "kb_folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Answer --questions from this knowledge base.",
)
@click.option(
    "--chunks", "k", type=click.IntRange(2, 100), default=5, help="How many to take from --kb (5)."
)
@qa_option
@click.option("--strategies", default=STRATEGIES, show_default=True, help="What to measure.")
@click.option("--ratios", default=RATIOS, show_default=True, help="Shares to recompute.")
@click.option(
    "--encodings",
    help="isolated, filler:SIZE, and with --kb neighbours:SIZE; commas between them (what --kb is "
    "prepared with; filler for --qa).",
)
@limit_option
@click.option(
    "--context-tokens",
    type=click.IntRange(min=1),
    help="Add passages of other --qa records up to this (take them as they are).",
)
@click.option("--bound", type=float, default=None, help="Mean KL to stay below, nats (0.02).")
@profile_option
@json_option
@model_options
@pass_model
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Measure strategies and ratios against full prefill, on your own questions.

    Every strategy is compared with full prefill on full prefill's own answers, so no labels are
    needed; with known answers F1 and exact match come too. The tables go into the model's profile,
    from which the gate takes the cheapest strategy within the bound.
    """
    if ctx.invoked_subcommand is None:
        _calibrate(**options)


def _calibrate(
    questions_file: Path | None,
    kb_folder: Path | None,
    k: int,
    qa_file: Path | None,
    strategies: str,
    ratios: str,
    encodings: str | None,
    limit: int | None,
    context_tokens: int | None,
    bound: float | None,
    profile_file: Path | None,
    as_json: bool,
    **model: str,
) -> None:
    from kvweave.calibrate.gate import BOUND, cheapest, choose
    from kvweave.calibrate.questions import add_distractors

    if (qa_file is None) == (questions_file is None):
        raise RequestError("give --qa FILE, or --questions FILE with --kb DIR")
    if (questions_file is None) != (kb_folder is None):
        raise RequestError("--questions are asked of a knowledge base; give --kb DIR with them")
    shares = shares_of(ratios)
    names = strategy_names(strategies)
    variants = variants_of(encodings, kb_folder)
    bound = BOUND if bound is None else bound
    if not bound >= 0.0:
        raise ConfigError(f"--bound {bound:g} is no KL; give nats per token, such as 0.02")
    records = read_asked(qa_file, questions_file)
    subject = load_subject(profile_file, **model)
    if qa_file is not None:
        if context_tokens is not None:
            records = add_distractors(records, subject.tokenizer, context_tokens)
        # a context of one chunk is exact: there is nothing to reuse in it
        records = [record for record in records if len(record.passages) > 1]
        if not records:
            raise CorpusError(f"{qa_file.name} has one passage per question; add --context-tokens")
    records = records[:limit]
    settings = settings_for(subject, names, shares)
    source = qa_file or questions_file
    assert source is not None, "checked above"
    with open_asked_kb(kb_folder, subject.tokenizer) as kb:
        if kb is not None:
            cases = subject.fitting(kb.cases(records, k))
        else:
            cases = subject.fitting(subject.case(record) for record in records)
        check_contexts(subject, variants, kb, cases, settings)
        contexts = [subject.encoding(variant, kb) for variant in variants]
        tables = _measure(subject, source.name, cases, contexts, settings, bound)
    path = subject.save(subject.profile.with_tables(*tables), profile_file)
    choices = {table.encoding: choose(table.cells, bound) for table in tables}
    if as_json:
        chosen = {name: None if c is None else asdict(c) for name, c in choices.items()}
        document = {
            "bound": bound,
            "chosen": chosen,
            "cheapest": cheapest(choices),  # name of an encoding, None: all are exact
            "tables": [asdict(t) for t in tables],
        }
        click.echo(json.dumps({"model": subject.name, "profile": str(path), **document}))
        return
    show_tables(tables, choices, bound)
    click.secho(f"written to {path}", dim=True, err=True)


@command.command("layers")
@qa_option
@limit_option
@click.option(
    "--context-tokens",
    type=click.IntRange(min=1),
    default=MIN_CONTEXT_TOKENS,
    show_default=True,
    help="Add passages of other records up to this.",
)
@profile_option
@json_option
@model_options
@pass_model
def layers_command(
    qa_file: Path | None,
    limit: int | None,
    context_tokens: int,
    profile_file: Path | None,
    as_json: bool,
    **model: str,
) -> None:
    """Find the layers that show best what a question asks for (Recall@10 %).

    Needs records whose answers are marked in the passages (answer_spans); qcfuse takes the result.
    """
    from kvweave.calibrate.questions import read_records

    if qa_file is None:
        raise RequestError("critical layers come from marked answers; give --qa FILE")
    marked = [r for r in read_records(qa_file) if any(p.answer_spans for p in r.passages)]
    if not marked:
        raise CorpusError(f"{qa_file.name} marks no answers; its passages need answer_spans")
    subject = load_subject(profile_file, **model)

    from kvweave.calibrate.layer_profile import profile_layers
    from kvweave.calibrate.questions import add_distractors, repeat_ids

    padded = add_distractors(marked, subject.tokenizer, context_tokens)[:limit]
    cases = subject.fitting(subject.case(record) for record in padded)
    with progress_bar("samples", len(cases)) as advance:
        found = profile_layers(
            subject.decoder, cases, repeat_ids(subject.tokenizer), on_sample=advance
        )
    path = subject.save(replace(subject.profile, layers=found), profile_file)
    if as_json:
        document = {"model": subject.name, "profile": str(path), "layers": asdict(found)}
        click.echo(json.dumps(document))
        return
    show_layers(found)
    click.secho(f"written to {path}", dim=True, err=True)


def _measure(
    subject: Subject,
    data: str,
    cases: "Sequence[Case]",
    contexts: "Sequence[FixedContext | NeighbourContext]",
    settings: "Sequence[Setting]",
    bound: float,
) -> "list[Table]":
    """One table per encoding context. `data` names the questions."""
    from kvweave.calibrate.case import hash_cases
    from kvweave.calibrate.measure import measure
    from kvweave.calibrate.tabulate import TableOrigin, tabulate
    from kvweave.fuse.encode.contexts import digest_ids

    with progress_bar("questions", len(cases)) as advance:
        answered = measure(
            subject.decoder,
            subject.tokenizer,
            cases,
            contexts,
            settings,
            bound=bound,
            on_case=advance,
        )
    origin = TableOrigin(
        subject.revision,
        subject.dtype,
        data,
        hash_cases(cases),
        contexts[0].context,
        digest_ids(cases[0].preamble),
        sum(case.num_chunk_tokens for case in cases),
    )
    return [
        tabulate(answered, settings, each.name, replace(origin, context=each.context))
        for each in contexts
    ]
