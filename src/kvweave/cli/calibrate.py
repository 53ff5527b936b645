"""`kvweave calibrate`: what each strategy costs on this model, and the choice that follows."""

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvweave.cli.calibration_view import progress_bar, show_layers, show_tables
from kvweave.cli.knowledge_bases import open_asked_kb
from kvweave.cli.options import (
    Command,
    Decorator,
    json_option,
    kb_folder_option,
    model_of,
    model_options,
    pass_config,
    pass_model,
)
from kvweave.config import EffectiveConfig, QualitySettings
from kvweave.errors import ConfigError, CorpusError, RequestError

if TYPE_CHECKING:
    from kvweave.calibrate.gate import Table
    from kvweave.calibrate.questions import QuestionRecord
    from kvweave.calibrate.subject import Subject
    from kvweave.fuse.encode.contexts import Variant

STRATEGIES = "reuse,epic,cacheblend,fusionrag,prophetkv,qcfuse,weave,weave-deep,weave-through"
RATIOS = "0.05,0.15,0.3,0.5"
QUICK_STRATEGIES = "weave,weave-deep,weave-through"
QUICK_RATIOS = "0.3,0.4,0.5"
QUICK_QUESTIONS = 24
USUAL_BOUND = QualitySettings().bound
FEWEST_CHUNKS = 2  # of a prompt that is fused
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
bound_option = click.option(
    "--bound",
    type=float,
    help=f"Mean KL to stay below, nats (quality.bound of the configuration: {USUAL_BOUND:g}).",
)


def chunks_option(where: str = "") -> Decorator:
    words = f"How many to take {where}(library.k of the configuration, 2 at least: 5)."
    return click.option("--chunks", "k", type=click.IntRange(FEWEST_CHUNKS, 100), help=words)


def pass_question_settings(command: Command) -> Command:
    """Give a command what `pass_model` gives, and `k` and `bound` of flags or settings."""

    @functools.wraps(command)
    def run(
        *args: Any, effective: EffectiveConfig, k: int | None, bound: float | None, **values: Any
    ) -> Any:
        usual = effective.config
        k = max(FEWEST_CHUNKS, usual.library.k) if k is None else k
        bound = usual.quality.bound if bound is None else bound
        return command(*args, **model_of(effective), k=k, bound=bound, **values)

    return pass_config(run)


@click.group("calibrate", invoke_without_command=True)
@click.option("--questions", "questions_file", type=file_type, help="Questions to ask of --kb.")
@kb_folder_option("Answer --questions from this knowledge base.", exists=True)
@chunks_option("from --kb ")
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
@bound_option
@profile_option
@json_option
@model_options
@pass_question_settings
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Measure strategies and ratios against full prefill, on your own questions.

    Every strategy is compared with full prefill on full prefill's own answers, so no labels are
    needed; with known answers F1 and exact match come too. The tables go into the model's profile,
    from which the gate takes the cheapest strategy within the bound.
    """
    if ctx.invoked_subcommand is None:
        asked = _take_options(options)
        records = _read(asked.source, with_passages=asked.qa_file is not None)
        _calibrate(asked, records, options)


@dataclass(frozen=True, slots=True)
class _CalibrateOptions:
    """The options of `kvweave calibrate`, as they were given."""

    questions_file: Path | None
    kb_folder: Path | None
    k: int
    strategies: str
    ratios: str
    limit: int | None
    bound: float
    profile_file: Path | None
    as_json: bool
    qa_file: Path | None = None
    encodings: str | None = None
    context_tokens: int | None = None

    @property
    def source(self) -> Path:
        """The file that the questions come from. Raises RequestError unless there is one."""
        if (self.qa_file is None) == (self.questions_file is None):
            raise RequestError("give --qa FILE, or --questions FILE with --kb DIR")
        if (self.questions_file is None) != (self.kb_folder is None):
            raise RequestError("--questions are asked of a knowledge base; give --kb DIR with them")
        source = self.qa_file or self.questions_file
        assert source is not None, "one of them was given"
        return source


def _take_options(options: dict[str, Any]) -> _CalibrateOptions:
    """Take what belongs to the calibration out of a command's options; the model's are left."""
    names = {field.name for field in fields(_CalibrateOptions)} & options.keys()
    return _CalibrateOptions(**{name: options.pop(name) for name in names})


def _calibrate(
    asked: _CalibrateOptions, records: "list[QuestionRecord] | None", model: dict[str, str]
) -> None:
    """`model` has the options of the model. Without `records` the knowledge base is asked about its
    own text."""
    shares = _shares(asked.ratios)
    names = _strategy_names(asked.strategies)
    variants = _variants(asked.encodings, asked.kb_folder)
    bound = asked.bound
    if not bound >= 0.0:
        raise ConfigError(
            f"--bound {bound:g} is no KL; give nats per token, such as {USUAL_BOUND:g}"
        )

    from kvweave.calibrate.experiment import Experiment, check_room, run_experiment, settings_for
    from kvweave.calibrate.subject import load_subject

    subject = load_subject(asked.profile_file, _say, **model)
    if asked.qa_file is not None and records is not None:
        records = _with_enough_passages(subject, records, asked)
    settings = settings_for(subject, names, shares)
    with open_asked_kb(asked.kb_folder, subject.tokenizer) as kb:
        if records is None:
            assert kb is not None, "`quick` asks one"
            assert asked.limit is not None, "`quick` has one"
            records, name = kb.made_questions(asked.limit), "made from the documents"
        else:
            records, name = records[: asked.limit], asked.source.name
        every = map(subject.case, records) if kb is None else kb.cases(records, asked.k)
        cases = subject.fitting(every, _say)
        experiment = Experiment(name, cases, variants, settings, bound, kb)
        check_room(subject, experiment)
        with progress_bar("questions", len(cases)) as advance:
            tables = run_experiment(subject, experiment, advance)
    path = subject.save(subject.profile.with_tables(*tables), asked.profile_file)
    _show(subject, path, tables, bound, as_json=asked.as_json)


def _show(
    subject: "Subject", path: Path, tables: "Sequence[Table]", bound: float, *, as_json: bool
) -> None:
    from kvweave.calibrate.gate import cheapest, choose

    choices = {t.encoding: choose(t.widen_intervals() or t.cells, bound) for t in tables}
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


@command.command("quick")
@kb_folder_option("The knowledge base to ask.", exists=True, required=True)
@click.option(
    "--questions",
    "questions_file",
    type=file_type,
    help="Questions to ask of it (made from its own text).",
)
@chunks_option()
@click.option(
    "--limit",
    type=click.IntRange(min=20),
    default=QUICK_QUESTIONS,
    show_default=True,
    help="Questions to ask.",
)
@bound_option
@profile_option
@json_option
@model_options
@pass_question_settings
def quick_command(**options: Any) -> None:
    """Measure in minutes what `weave` costs on a knowledge base, with few questions.

    Few questions give wide intervals, and the gate takes them wider still: the table opens it only
    for what is clearly within the bound. Beside tables that came with the model it is one more kind
    of questions; a calibration of 100 questions or more replaces it.
    """
    options |= {"strategies": QUICK_STRATEGIES, "ratios": QUICK_RATIOS}
    asked, records = _take_options(options), None
    if asked.questions_file is not None:
        records = _read(asked.questions_file, with_passages=False)
    elif asked.kb_folder is not None:
        made = f"{asked.limit} are made from headings and sentences of {asked.kb_folder.name}"
        _say(f"no --questions: {made}")
    _calibrate(asked, records, options)


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

    from kvweave.calibrate.layer_profile import profile_layers
    from kvweave.calibrate.questions import add_distractors, repeat_ids
    from kvweave.calibrate.subject import load_subject

    subject = load_subject(profile_file, _say, **model)
    padded = add_distractors(marked, subject.tokenizer, context_tokens)[:limit]
    cases = subject.fitting(map(subject.case, padded), _say)
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


def _read(source: Path, *, with_passages: bool) -> "list[QuestionRecord]":
    from kvweave.calibrate.questions import read_questions, read_records

    found = list(read_records(source) if with_passages else read_questions(source))
    if not found:
        raise CorpusError(f"{source.name} holds no question")
    return found


def _with_enough_passages(
    subject: "Subject", records: "list[QuestionRecord]", asked: _CalibrateOptions
) -> "list[QuestionRecord]":
    from kvweave.calibrate.questions import add_distractors

    if asked.context_tokens is not None:
        records = add_distractors(records, subject.tokenizer, asked.context_tokens)
    # a context of one chunk is exact: there is nothing to reuse in it
    records = [record for record in records if len(record.passages) > 1]
    if not records:
        name = asked.source.name
        raise CorpusError(f"{name} has one passage per question; add --context-tokens")
    return records


def _variants(encodings: str | None, kb_folder: Path | None) -> "list[Variant]":
    """The encoding contexts that were asked for, or else the one whose KV will be served."""
    from kvweave.fuse.encode.contexts import parse_variant

    names = _split(encodings or _encoding_of(kb_folder))
    variants = list(dict.fromkeys(parse_variant(name) for name in names))
    for variant in variants:
        if variant.kind == "neighbours" and kb_folder is None:
            raise RequestError(
                f"{variant} are chunks of a knowledge base, and --qa has none; "
                "give --questions FILE with --kb DIR"
            )
    return variants


def _encoding_of(kb_folder: Path | None) -> str:
    """What chunk KV will be encoded behind when it is asked for: that is what must be measured."""
    from kvweave.app.library.stored_kv import KV_FOLDER
    from kvweave.fuse.encode.preparation import DEFAULT_ENCODING, read_preparation

    found = None if kb_folder is None else read_preparation(kb_folder / KV_FOLDER)
    return DEFAULT_ENCODING if found is None else str(found.variant)


def _strategy_names(text: str) -> list[str]:
    from kvweave.fuse.selectors.strategies import is_known, known_names, say_unknown

    names = _split(text)
    for name in names:
        if not is_known(name):
            raise RequestError(f"strategy {name!r} {say_unknown(name, known_names())}")
        if name in ("full", "prefix"):
            raise RequestError(f"strategy {name!r} is exact; there is nothing to measure")
    return names


def _shares(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in _split(text)]
    except ValueError:
        ratios = [-1.0]
    if not all(0.0 < ratio < 1.0 for ratio in ratios):
        raise RequestError(f"--ratios {text!r}: give shares between 0 and 1, such as 0.05,0.15")
    return ratios


def _split(text: str) -> list[str]:
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise RequestError("a list is empty; give names or numbers with commas between them")
    return parts


def _say(line: str) -> None:
    click.echo(line, err=True)
