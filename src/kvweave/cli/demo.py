"""`kvweave demo`: three questions about an invented valley, computed in full and with reuse."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvweave.cli.knowledge_bases import find_tokenizer, open_weave, with_model
from kvweave.cli.options import json_option, kb_folder_option, model_options, pass_config
from kvweave.cli.plan_view import decision_line
from kvweave.config import EffectiveConfig
from kvweave.demo import PASSAGES, SHOWN, DemoQuestion, read_questions
from kvweave.paths import home

if TYPE_CHECKING:
    from kvweave.app.weave import Answer, Weave

MAX_TOKENS = 48  # the answers that are known have three words at most
NAMED, NAMED_RATIO = "weave", 0.15  # shown where `auto` fuses nothing and no table tells better


@dataclass(frozen=True, slots=True)
class Told:
    """One answer to one question."""

    way: str  # full prefill, auto, or the name of a strategy
    answer: "Answer"
    is_right: bool


@dataclass(frozen=True, slots=True)
class DemoPreparation:
    """What was done before the first question."""

    num_passages: int
    ingest_s: float
    num_encoded: int  # passages whose chunk KV was computed now
    encode_s: float
    kv_bytes: int  # of chunk KV on disk


@click.command("demo")
@kb_folder_option(
    "Folder for the demo's knowledge base.  [default: demo in kvweave's cache folder]"
)
@click.option("--verbose", "-v", is_flag=True, help="Say why auto took what it took.")
@model_options
@json_option
@pass_config
def command(
    kb_folder: Path | None, verbose: bool, as_json: bool, effective: EffectiveConfig
) -> None:
    """Try it: 48 passages about an invented valley, three questions, full prefill beside reuse."""
    config = with_model(effective.config)
    config = replace(config, quality=replace(config.quality, audit_share=0.0))  # it ends at once
    if kb_folder is None:  # chunks belong to a tokenizer
        kb_folder = home() / "demo" / find_tokenizer(config.model.model).fingerprint[:16]
    questions = [question for i, question in enumerate(read_questions()) if i in SHOWN]
    with open_weave(config=config, kb=kb_folder) as weave:
        prepared = _prepare(weave, questions, config.library.k)
        weave.measure()
        if not as_json:
            click.echo(_preparation_line(weave, prepared))
        _warm_up(weave, config.library.k)
        told: list[list[Told]] = []
        for number, question in enumerate(questions, 1):
            told.append(_answers(weave, question, config.library.k))
            if not as_json:
                click.echo(_answers_text(number, question, told[-1], verbose=verbose))
    if as_json:
        click.echo(json.dumps(_document(weave, prepared, questions, told), indent=2))
        return
    click.echo(_summary(told))
    click.echo("Your own documents: kvweave ingest FOLDER --kb kb --kv, then kvweave ask … --kb kb")


def _prepare(weave: "Weave", questions: list[DemoQuestion], k: int) -> DemoPreparation:
    """Read the passages, and store the KV of those that the questions will find, with front copies
    of the first. A server does it for all, in idle time; here a person waits."""
    started_s = time.perf_counter()
    weave.ingest(PASSAGES, chunk_kv=False)
    library = weave.library
    hits = [weave.search(question.question, k) for question in questions]
    found = {hit.chunk.id: hit.chunk for each in hits for hit in each}
    ingest_s = time.perf_counter() - started_s
    absent = library.encoder.absent(list(found.values()), library.encoder.key)
    started_s = time.perf_counter()
    if absent:
        library.kv.prepare_to_encode()
        library.encoder.encode(list(found.values()))
        library.encoder.encode_isolated([each[0].chunk for each in hits if each])
        library.encoder.saves()
    encode_s = time.perf_counter() - started_s
    stored = (library.kb.folder / "kv").rglob("*")
    kv_bytes = sum(path.stat().st_size for path in stored if path.is_file())
    num_passages = library.kb.totals().num_documents
    return DemoPreparation(num_passages, ingest_s, len(absent), encode_s, kv_bytes)


def _warm_up(weave: "Weave", k: int) -> None:
    """First use of anything is slow; no question shall pay for it."""
    from kvweave.app.weave import Sampling

    for reuse in ("full", "auto"):
        weave.ask("Where is the spring?", k=k, reuse=reuse, sampling=Sampling(max_tokens=2))


def _answers(weave: "Weave", question: DemoQuestion, k: int) -> list[Told]:
    """In full, by `auto`, and where that fuses nothing by a strategy that does. `auto` comes last:
    what it computes exactly is kept, and would be found by the others."""
    from kvweave.app.weave import Sampling

    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
    ways: list[tuple[str, dict[str, Any]]] = [("full prefill", {"reuse": "full"})]
    if not weave.plan(question.question, k=k).strategy:
        name, ratio = _choose_shown(weave)
        ways.append((f"{name} at {ratio:.0%}", {"reuse": name, "ratio": ratio}))
    ways.append(("auto", {"reuse": "auto"}))
    told = []
    for way, options in ways:
        answer = weave.ask(question.question, k=k, sampling=sampling, **options)
        told.append(Told(way, answer, question.is_answered_by(answer.text)))
    return told


def _choose_shown(weave: "Weave") -> tuple[str, float]:
    """What to show where the gate is shut: of what was measured on this model, what costs the least
    work with a *mean* within the bound in every kind (the gate wants to be surely within it)."""
    from kvweave.calibrate.gate import BOUND, USUAL_CHUNKS, choose, tables_for_size, worst_cells

    tables = () if weave.profile is None else weave.profile.calibration
    means = [
        replace(t, cells=tuple(replace(c, kl_high=c.kl, flips=0.0) for c in t.cells))
        for t in tables
        if not t.has_history
    ]
    chosen = choose(worst_cells(tables_for_size(means, USUAL_CHUNKS)), BOUND)
    return (NAMED, NAMED_RATIO) if chosen is None else (chosen.strategy, chosen.ratio)


def _preparation_line(weave: "Weave", prepared: DemoPreparation) -> str:
    kept = f"{prepared.kv_bytes / 1e6:,.0f} MB"
    stored = (
        f"KV of {prepared.num_encoded} that will be found stored in {prepared.encode_s:.1f} s, "
        f"{kept} (a server does it in idle time)"
        if prepared.num_encoded
        else f"their KV is stored from before, {kept}"
    )
    return (
        f"{weave.model_name}, {prepared.num_passages} passages about an invented valley, read in "
        f"{prepared.ingest_s:.1f} s; {stored}\n"
    )


def _answers_text(number: int, question: DemoQuestion, told: list[Told], *, verbose: bool) -> str:
    """The answers to one question, one below the other."""
    known = " or ".join(question.answers)
    lines = [click.style(f"{number}. {question.question}", bold=True) + f"  (known: {known})"]
    full = told[0].answer
    for each in told:
        answer = each.answer
        mark = click.style("right", fg="green") if each.is_right else click.style("WRONG", fg="red")
        sooner = "" if each is told[0] else f" ({full.ttft_ms / answer.ttft_ms:.1f}×)"
        text = " ".join(answer.text.split())
        lines.append(
            f"   {each.way:13} first token {answer.ttft_ms / 1e3:5.2f} s{sooner:8} "
            f"all {answer.total_ms / 1e3:5.2f} s  {mark}  {text}"
        )
        lines += [click.style(f"{'':17}{line}", dim=True) for line in _why(answer, verbose=verbose)]
    return "\n".join(lines) + "\n"


def _why(answer: "Answer", *, verbose: bool) -> list[str]:
    """What became of the prompt's tokens, and if `verbose` why."""
    if answer.explain is None:
        return [f"{answer.prompt_tokens:,} tokens computed"]
    counts = answer.explain.counts
    tokens = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    lines = [f"{answer.prompt_tokens:,} tokens: {tokens}"]
    if verbose and answer.decision is not None:
        lines.append(decision_line(answer.decision))
    return lines


def _summary(told: list[list[Told]]) -> str:
    """First tokens and right answers, per way."""
    ways = list(dict.fromkeys(each.way for answers in told for each in answers))
    parts = []
    for way in ways:
        chosen = [each for answers in told for each in answers if each.way == way]
        seconds = sum(each.answer.ttft_ms for each in chosen) / 1e3 / len(chosen)
        right = sum(each.is_right for each in chosen)
        parts.append(f"{way}: first token after {seconds:.2f} s, {right} of {len(chosen)} right")
    why = {each.answer.explain.why for answers in told for each in answers if each.answer.explain}
    lines = ["On average · " + " · ".join(parts)]
    lines += [f"auto reuses no more because {reason}" for reason in sorted(why - {None}, key=str)]
    return "\n".join(lines)


def _document(
    weave: "Weave", prepared: DemoPreparation, questions: list[DemoQuestion], told: list[list[Told]]
) -> dict[str, Any]:
    return {
        "model": weave.model_name,
        "passages": prepared.num_passages,
        "encoded": prepared.num_encoded,
        "encode_s": round(prepared.encode_s, 3),
        "kv_bytes": prepared.kv_bytes,
        "questions": [
            {
                "question": question.question,
                "known": list(question.answers),
                "answers": [
                    {
                        "way": each.way,
                        "answer": each.answer.text,
                        "right": each.is_right,
                        "ttft_ms": round(each.answer.ttft_ms, 1),
                        "total_ms": round(each.answer.total_ms, 1),
                        "tokens": each.answer.explain.counts if each.answer.explain else None,
                        "why": _why(each.answer, verbose=True),
                    }
                    for each in answers
                ],
            }
            for question, answers in zip(questions, told, strict=True)
        ],
    }
