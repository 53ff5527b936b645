"""`kvweave ask`: one question, over files if there are any."""

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvweave.cli.explain import as_document, missing_line, show
from kvweave.cli.knowledge_bases import check_knowledge_base
from kvweave.cli.loading import model_options, open_weave
from kvweave.cli.plan_view import decision_document, decision_line
from kvweave.cli.planning import planning_options
from kvweave.errors import CorpusError, RequestError

if TYPE_CHECKING:
    from kvweave.app.weave import Answer, Document, Sampling, Weave

LARGEST_FILE_BYTES = 16 << 20  # more than any prompt holds; found out before it is tokenised


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
@click.option(
    "--kb",
    "kb_folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Answer from this knowledge base (kvweave ingest makes one).",
)
@click.option("--chunks", "k", type=click.IntRange(1, 100), default=5, help="How many to take (5).")
@click.option(
    "--reuse",
    metavar="STRATEGY",
    help="full, auto, prefix, reuse, weave, qcfuse, … (auto where KV is stored, else full).",
)
@click.option("--ratio", type=float, help="Share of reused tokens to recompute; implies weave.")
@planning_options
@click.option("--explain", is_flag=True, help="Show which tokens were reused (on stderr).")
@model_options
@click.option("--max-tokens", type=int, help="Length of the answer at most (256).")
@click.option("--temperature", type=float, help="0 takes the likeliest token each time (0).")
@click.option("--top-p", type=float, help="Keep the likeliest tokens with this probability (1).")
@click.option("--top-k", type=int, help="Keep this many of the likeliest tokens (0: all).")
@click.option("--seed", type=int, help="Makes a drawn answer repeatable.")
@click.option("--repetition-penalty", type=float, help="Above 1, used words become rarer (1).")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer in front of TEXT.")
@click.option("--system", help="Instructions in place of kvweave's own.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document at the end.")
@click.option("--stats/--no-stats", default=True, help="A line on tokens and time (on stderr).")
def command(
    question: str,
    files: tuple[str, ...],
    kb_folder: Path | None,
    k: int,
    reuse: str | None,
    ratio: float | None,
    bound: float,
    order: str,
    explain: bool,
    model: str,
    device: str,
    dtype: str,
    quant: str,
    system: str | None,
    as_json: bool,
    stats: bool,
    **drawing: Any,
) -> None:
    """Answer QUESTION, from the given files or a knowledge base if there is one."""
    if not question.strip():
        raise RequestError("the question is empty; ask something")
    if files and kb_folder is not None:
        raise RequestError("--file and --kb are two places to answer from; give one of them")
    _check_reuse(reuse, ratio, kb_folder)
    if kb_folder is not None:
        check_knowledge_base(kb_folder)
    documents = [read_document(name) for name in files]
    sampling = _sampling(drawing)
    # Everything the user typed has been judged; now the slow part.
    weave = open_weave(kb=kb_folder, model=model, device=device, dtype=dtype, quant=quant)
    answering = weave.stream(
        question,
        documents=documents if kb_folder is None else None,
        sampling=sampling,
        system=system,
        k=k,
        reuse=reuse,
        ratio=ratio,
        bound=bound,
        order=order,
    )
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # an answer that the terminal cannot show is no crash
    for piece in answering:
        if not as_json:
            out.write(piece.text)
            out.flush()
    answer = answering.finish()
    weave.close()
    missing = None
    if stats and answer.explain is not None:
        settings = {"--model": model, "--dtype": dtype, "--quant": quant, "--device": device}
        missing = missing_line(answer.explain, _ingest_command(kb_folder, settings))
    if as_json:
        about = {"model": weave.model_name, "question": question, "documents": list(files)}
        out.write(json.dumps({**about, **_as_document(answer)}, indent=2) + "\n")
        if missing is not None:
            click.echo(missing, err=True)
        return
    out.write("\n")
    out.flush()
    if explain:
        click.echo(_explained(weave, answer), err=True)
    if missing is not None:
        click.echo(missing, err=True)
    if stats:
        click.echo(click.style(_stats(answer), dim=True), err=True)


def _check_reuse(reuse: str | None, ratio: float | None, kb_folder: Path | None) -> None:
    from kvweave.app.weave import REUSES

    if kb_folder is None and (ratio is not None or reuse not in (None, "full")):
        name = "--ratio" if reuse in (None, "full") else "--reuse"
        raise RequestError(f"{name} takes the stored chunk KV of a knowledge base; add --kb DIR")
    if reuse is not None and reuse not in REUSES:
        raise RequestError(f"--reuse {reuse!r} is unknown; known: {', '.join(REUSES)}")
    if reuse == "auto" and ratio is not None:
        raise RequestError("--reuse auto chooses the ratio itself; leave --ratio out")
    if ratio is not None and not 0.0 <= ratio <= 1.0:
        raise RequestError(f"--ratio {ratio:g} is no share; give one from 0 to 1, such as 0.15")


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


def _sampling(drawing: dict[str, Any]) -> "Sampling":
    """Only what was given: the defaults are Sampling's own."""
    from kvweave.app.weave import Sampling

    return Sampling(**{name: value for name, value in drawing.items() if value is not None})


def _as_document(answer: "Answer") -> dict[str, Any]:
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
        "explain": _explain_document(answer),
        "timing": {
            "ttft_ms": round(answer.ttft_ms, 1),
            "total_ms": round(answer.total_ms, 1),
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
    return {**as_document(answer.explain), **plan, **speculation}


def _explained(weave: "Weave", answer: "Answer") -> str:
    if answer.explain is None:
        return "full prefill: every token of the prompt was computed"
    texts = weave.texts_of(answer.explain.token_ids)
    shown = show(answer.explain, texts, colour=sys.stderr.isatty())
    if answer.decision is not None:
        shown += f"\n{decision_line(answer.decision)}"
    return shown if answer.speculation is None else f"{shown}\n{answer.speculation.summary()}"


def _ingest_command(kb_folder: Path | None, settings: dict[str, str]) -> str:
    """What stores the chunk KV that this very command would have found."""
    usual = {"--model": "smollm2", "--device": "auto", "--dtype": "auto", "--quant": "none"}
    given = [f"{name} {value}" for name, value in settings.items() if value != usual[name]]
    return " ".join(["kvweave ingest PATH --kv", f"--kb {kb_folder}", *given])


def _stats(answer: "Answer") -> str:
    speed = _decode_speed(answer)
    parts = [
        f"{answer.prompt_tokens:,} prompt + {answer.completion_tokens:,} answer tokens",
        f"first after {answer.ttft_ms / 1e3:.2f} s",
        *([f"then {speed:g} tok/s"] if speed is not None else []),
        *(["cut at --max-tokens or the context"] if answer.finish_reason == "length" else []),
    ]
    return " · ".join(parts)


def _decode_speed(answer: "Answer") -> float | None:
    """Tokens per second behind the first; None if there was only one."""
    seconds = (answer.total_ms - answer.ttft_ms) / 1e3
    if answer.completion_tokens < 2 or seconds <= 0.0:
        return None
    return round((answer.completion_tokens - 1) / seconds, 1)
