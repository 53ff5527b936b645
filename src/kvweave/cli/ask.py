"""`kvweave ask`: one question, over files if there are any."""

import io
import json
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvweave.cli import CommandStart
from kvweave.cli.explain_view import as_document, missing_line, show
from kvweave.cli.knowledge_bases import check_knowledge_base, open_weave
from kvweave.cli.options import (
    config_option,
    kb_folder_option,
    model_options,
    pass_config,
    question_options,
    sampling_options,
    store_options,
    typed_options,
    url_option,
)
from kvweave.cli.plan_view import decision_document, decision_line
from kvweave.config import EffectiveConfig, ModelChoice, WeaveConfig, given_values
from kvweave.errors import CorpusError, RequestError

if TYPE_CHECKING:
    from kvweave.app.answer.answer_stream import PieceStream
    from kvweave.app.weave import Answer, Document, Weave

# options that go to a server within `reuse`, and those that are its own
NOT_SENT = ("reuse", "ratio", "bound", "reranker", "speculate")
LOOPED = "stopped: the answer only repeated itself; --no-stop-loops lets it go on"
LARGEST_FILE_BYTES = 16 << 20  # more than any prompt holds; found out before it is tokenised


@dataclass(frozen=True, slots=True)
class AskArguments:
    """What was typed, besides what belongs to the configuration."""

    question: str
    files: tuple[str, ...]  # paths, or - for stdin
    kb_folder: Path | None
    url: str | None
    explain: bool
    stop: tuple[str, ...]
    history: Path | None
    json_schema: Path | None
    as_json: bool
    stats: bool
    options: dict[str, Any]  # of the question, by the names of its fields: see `typed_options`


class AskInputs(NamedTuple):
    """What goes with the question, judged and read: options of a question by their names."""

    reuse: str | None
    ratio: float | None
    history: list[dict[str, Any]]
    documents: "list[Document]"


class Waited(NamedTuple):
    """What the person who asked waited for, in seconds."""

    loading_s: float  # until the question was put: imports, the model, the knowledge base
    total_s: float  # from the start of the command


@click.command("ask")
@click.argument("question")
@click.option(
    "files",
    "--file",
    "-f",
    multiple=True,
    metavar="PATH",
    help="A text file to answer from; - is stdin. May be given many times.",
)
@kb_folder_option("Answer from this knowledge base (kvweave ingest makes one).")
@url_option
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="What was said before: a JSON list of messages, a user's first; - is stdin.",
)
@question_options(without=("recognise",))  # one question is no conversation
@click.option("--explain", is_flag=True, help="Show which tokens were reused (on stderr).")
@model_options
@store_options
@sampling_options
@click.option(
    "--json-schema",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Hold the answer to this JSON schema.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer in front of TEXT.")
@config_option("model.system")
@click.option("--json", "as_json", is_flag=True, help="One JSON document at the end.")
@click.option("--stats/--no-stats", default=True, help="A line on tokens and time (on stderr).")
@pass_config
def command(effective: EffectiveConfig, **arguments: Any) -> None:
    """Answer QUESTION, from the given files or a knowledge base if there is one."""
    begun = click.get_current_context().find_object(CommandStart)
    started_s = time.perf_counter() if begun is None else begun.seconds
    options = typed_options(effective, arguments)
    asked = AskArguments(**arguments, options=options)
    inputs = _read_inputs(effective, asked)
    if asked.url is None:
        _ask_here(effective.config, asked, inputs, started_s)
    else:
        from kvweave.cli import remote
        from kvweave.clients.server import ServerClient

        messages = [*inputs.history, {"role": "user", "content": asked.question}]
        fields = _request_fields(effective, asked, inputs)
        client = ServerClient(asked.url)
        remote.ask(client, messages, fields, as_json=asked.as_json, stats=asked.stats)


def _read_inputs(effective: EffectiveConfig, asked: AskArguments) -> AskInputs:
    """Judge what was typed and read the files that it names. Raises RequestError, CorpusError."""
    if not asked.question.strip():
        raise RequestError("the question is empty; ask something")
    if "filter" in asked.options and asked.kb_folder is None:
        raise RequestError("--filter chooses among the documents of a knowledge base; add --kb DIR")
    if asked.files and asked.kb_folder is not None:
        raise RequestError("--file and --kb are two places to answer from; give one of them")
    if asked.history is None and asked.options.get("rewrite"):
        raise RequestError(
            "--rewrite is about a follow-up; say what was said before: --history FILE"
        )
    typed_ratio = asked.options.get("ratio")
    reuse, ratio = _read_reuse(effective, typed_ratio, has_kb=asked.kb_folder is not None)
    history = _read_history(asked.history)
    return AskInputs(reuse, ratio, history, [read_document(name) for name in asked.files])


def _ask_here(
    config: WeaveConfig, asked: AskArguments, inputs: AskInputs, started_s: float
) -> None:
    """Answer in this process."""
    if asked.kb_folder is not None:
        check_knowledge_base(asked.kb_folder)
    from kvweave.app.weave import Sampling

    schema = None if asked.json_schema is None else read_document(str(asked.json_schema)).text
    Sampling(**given_values(config.sampling), stop=asked.stop, json_schema=schema)
    options = asked.options | inputs._asdict()
    if asked.kb_folder is not None:
        options["documents"] = None
    # Everything the user typed has been judged; now the slow part. Closed whatever ends it: the
    # interpreter must not end while the engine computes.
    with closing(open_weave(config=_without_audits(config), kb=asked.kb_folder)) as weave:
        loading_s = time.perf_counter() - started_s
        options["sampling"] = weave.sampling({"stop": asked.stop, "json_schema": schema})
        answer = _write(weave.stream(asked.question, **options), asked)
    waited = Waited(loading_s, time.perf_counter() - started_s)
    if asked.as_json:
        documents = dict.fromkeys(s.document for s in answer.sources if s.document is not None)
        document = {
            "model": weave.model_name,
            "question": asked.question,
            "documents": list(asked.files) or list(documents),
            **_as_document(answer, waited),
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    elif asked.explain:
        click.echo(_explain_text(weave, answer), err=True)
    _tell_people(config.model, asked, answer, waited)


def _tell_people(model: ModelChoice, asked: AskArguments, answer: "Answer", waited: Waited) -> None:
    """What stands on stderr below an answer."""
    if asked.stats and answer.explain is not None:
        missing = missing_line(answer.explain, _ingest_command(asked.kb_folder, model))
        if missing is not None:
            click.echo(missing, err=True)
    if answer.stopped_because is not None:
        click.echo(LOOPED, err=True)
    if asked.as_json:
        return
    for source in answer.sources if "cite" in asked.options else ():
        click.echo(f"[{source.cited_as}] {source.title or source.chunk[:8]}", err=True)
    if asked.stats and not answer.nothing_found:
        click.echo(click.style(_stats(answer, waited), dim=True), err=True)


def _request_fields(
    effective: EffectiveConfig, asked: AskArguments, inputs: AskInputs
) -> dict[str, Any]:
    """The fields of a chat request; the server's own settings hold for what was not typed here."""
    config, typed = effective.config, effective.flags
    fields: dict[str, Any] = {
        key.partition(".")[2]: config.value(key) for key in typed if key.startswith("sampling.")
    }
    fields |= {name: v for name, v in asked.options.items() if name not in NOT_SENT}
    if asked.kb_folder is not None:
        fields["kb"] = str(asked.kb_folder)
    if inputs.documents:
        fields["documents"] = [{"title": d.title, "text": d.text} for d in inputs.documents]
    if (inputs.reuse, inputs.ratio) != (None, None):
        strategy, bound = inputs.reuse or "weave", asked.options.get("bound")
        fields["reuse"] = {"strategy": strategy, "ratio": inputs.ratio, "bound": bound}
    if asked.stop:
        fields["stop"] = list(asked.stop)
    if asked.json_schema is not None:
        schema = json.loads(read_document(str(asked.json_schema)).text)
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if asked.explain:
        fields["explain"] = True
    return fields


def _write(answering: "PieceStream", asked: AskArguments) -> "Answer":
    """The answer on stdout as it is made, unless all of it comes as JSON."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # an answer that the terminal cannot show is no crash
    for piece in answering:
        if not asked.as_json:
            out.write(piece.text)
            out.flush()
    if not asked.as_json:
        out.write("\n")
        out.flush()
    return answering.finish()


def _without_audits(config: WeaveConfig) -> WeaveConfig:
    """The process ends with its answer: there is no idle time to audit it in."""
    return replace(config, quality=replace(config.quality, audit_share=0.0))


def _read_reuse(
    effective: EffectiveConfig, typed_ratio: float | None, *, has_kb: bool
) -> tuple[str | None, float | None]:
    """Strategy and ratio, judged. A --ratio goes before what a file or a variable says."""
    from kvweave.app.answer.question import PLAIN_REUSES, parse_reuse

    reuse, ratio = parse_reuse(effective.config.quality.reuse)
    is_typed = "quality.reuse" in effective.flags
    if typed_ratio is not None:
        if is_typed and ratio is not None:
            raise RequestError("--reuse and --ratio both give a ratio; leave one out")
        reuse, ratio = reuse if is_typed else None, typed_ratio
    is_fused = ratio is not None or reuse not in (None, *PLAIN_REUSES)
    if is_fused and not has_kb:
        if not is_typed and typed_ratio is None:
            return None, None  # what a file or a variable says is for knowledge bases
        name = "--reuse" if is_typed else "--ratio"
        raise RequestError(f"{name} takes the stored chunk KV of a knowledge base; add --kb DIR")
    if reuse == "auto" and ratio is not None:
        raise RequestError("--reuse auto chooses the ratio itself; leave --ratio out")
    if ratio is not None and not 0.0 <= ratio <= 1.0:
        raise RequestError(f"--ratio {ratio:g} is no share; give one from 0 to 1, such as 0.15")
    return reuse, ratio


def _read_history(path: Path | None) -> list[dict[str, Any]]:
    """Messages of a file; their roles are judged with the question. Raises RequestError."""
    if path is None:
        return []
    try:
        messages = json.loads(read_document(str(path)).text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--history {path} is no JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise RequestError(f'--history {path} is no list of {{"role": …, "content": …}}')
    return messages


def read_document(name: str) -> "Document":
    """The text of a file, or of stdin for "-". Raises CorpusError if it is no text."""
    from kvweave.app.weave import Document

    title = "stdin" if name == "-" else Path(name).name
    data = _read_bytes(name)
    if len(data) > LARGEST_FILE_BYTES:
        limit = f"{LARGEST_FILE_BYTES >> 20} MiB"
        raise CorpusError(f"{title} is larger than {limit}; a prompt cannot hold it, pass a part")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{title} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
    if "\0" in text:
        raise CorpusError(f"{title} looks binary; pass a text file")
    if not text.strip():
        raise CorpusError(f"{title} is empty; leave it out")
    return Document(text, title)


def _read_bytes(name: str) -> bytes:
    try:
        if name == "-":
            return sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)
        with Path(name).open("rb") as file:
            return file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"cannot read {name!r}: {reason}") from error


def _as_document(answer: "Answer", waited: Waited) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "stopped_because": answer.stopped_because,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        },
        "sources": [source.as_json() for source in answer.sources],
        "nothing_found": answer.nothing_found,
        "query": answer.query,
        "full_ms": None if answer.full_ms is None else round(answer.full_ms, 1),
        "explain": _explain_document(answer),
        "timing": {
            "ttft_ms": round(answer.ttft_ms, 1),
            "total_ms": round(answer.total_ms, 1),
            "loading_ms": round(waited.loading_s * 1e3, 1),
            "wall_ms": round(waited.total_s * 1e3, 1),
            "decode_tokens_per_s": _decode_speed(answer),
        },
    }


def _explain_document(answer: "Answer") -> dict[str, Any] | None:
    if answer.explain is None:
        return None
    decided = answer.decision
    plan = {} if decided is None else {"plan": decision_document(decided)}
    guessed = answer.speculation
    speculation = {} if guessed is None else {"speculation": guessed.document()}
    audit = {} if answer.audit is None else {"audit": answer.audit.document()}
    order = {"order": answer.order, "not_guessed": answer.not_guessed}
    return {**as_document(answer.explain), **plan, **speculation, **audit, **order}


def _explain_text(weave: "Weave", answer: "Answer") -> str:
    if answer.explain is None:
        return "full prefill: every token of the prompt was computed"
    texts = weave.texts_of(answer.explain.token_ids)
    shown = show(answer.explain, texts, colour=sys.stderr.isatty())
    if answer.decision is not None:
        shown += f"\n{decision_line(answer.decision)}"
    if answer.order is not None:
        shown += f"\norder of chunks: {answer.order}"
    return shown if answer.speculation is None else f"{shown}\n{answer.speculation.summary()}"


def _ingest_command(kb_folder: Path | None, model: ModelChoice) -> str:
    """What stores the chunk KV that this very command would have found."""
    usual, chosen = asdict(ModelChoice()), asdict(model)
    names = ("model", "dtype", "quant", "device")
    options = [f"--{name} {chosen[name]}" for name in names if chosen[name] != usual[name]]
    return " ".join(["kvweave ingest PATH --kv", f"--kb {kb_folder}", *options])


def _stats(answer: "Answer", waited: Waited) -> str:
    speed = _decode_speed(answer)
    parts = [
        f"{answer.prompt_tokens:,} prompt + {answer.completion_tokens:,} answer tokens",
        f"first after {answer.ttft_ms / 1e3:.2f} s",
        *([f"then {speed:g} tok/s"] if speed is not None else []),
        f"loading {waited.loading_s:.1f} s",
        f"total {waited.total_s:.1f} s",
        *(["cut at --max-tokens or the context"] if answer.finish_reason == "length" else []),
    ]
    return " · ".join(parts)


def _decode_speed(answer: "Answer") -> float | None:
    """Tokens per second behind the first; None if there was only one."""
    seconds = (answer.total_ms - answer.ttft_ms) / 1e3
    if answer.completion_tokens < 2 or seconds <= 0.0:
        return None
    return round((answer.completion_tokens - 1) / seconds, 1)
