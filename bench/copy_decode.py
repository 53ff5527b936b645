"""How much sooner is an answer over passages whole when tokens are copied, and is it the same?

Answers of a real model over real passages, each by two engines over the same weights: one copies as
it does by default, the other does not (`engine.copy_tokens = 0`). The prompt is computed once for
both. Kinds of answers:

    question      multi-hop questions over ten passages (HotpotQA)
    long answer   questions that want sentences (ClapNQ)
    summary       the same passages, to be summed up
    quote         ... of which the sentences that answer are to be quoted
    conversation  later turns over five passages (MTRAG)
    free          questions without a passage (NQ-open)
    drawn         as `question`, at temperature 0.7 with a seed: draws are the same ones

    python bench/copy_decode.py --data DATA --out bench/results/copy_decode-cpu.json

`over_plain` is plain decoding's time from the first token to the last over that of copying, the
median of pairs taken in turns; `tokens_a_step` counts decode steps. `different_answers` counts
answers that are not the same, token for token. With a batch, so many answers decode together, and
the time is that of all.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.files import read_jsonl
from common.results import finish, result_header
from kvweave.app.weave import Weave
from kvweave.corpus.chunker import make_chunk_id
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineChunk, EngineRequest, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.model.decoder import Decoder

QUOTE = "Quote the sentences of the passages that answer this, word for word: {}"
SUMMARY = "Sum up what the passages say."
DRAWN = {"temperature": 0.7, "top_p": 0.9, "seed": 7}


class Case(NamedTuple):
    """What is asked, and over what."""

    question: str
    passages: Sequence[str] = ()
    history: Sequence[tuple[str, str]] = ()


class Pair(NamedTuple):
    """The same answers by both engines."""

    plain: list[Ticket]
    copied: list[Ticket]
    texts: tuple[list[list[int]], list[list[int]]]
    steps: int  # of answers, by the one that copies

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.texts[0])

    @property
    def num_different(self) -> int:
        return sum(one != other for one, other in zip(*self.texts, strict=True))

    @property
    def over_plain(self) -> float:
        return decode_s(self.plain) / max(1e-9, decode_s(self.copied))


def main() -> None:
    args = parse_args()
    found: dict[str, Any] = {"models": {}}
    for model in args.model or ["qwen2.5-coder-0.5b"]:
        with Weave.open(model=model, device=args.device, dtype=args.dtype) as weave:
            device = weave.runtime.decoder.device.type
            found["models"][model] = run_model(weave, args)
    kinds = [each for kinds in found["models"].values() for each in kinds.values()]
    over = [each for each in kinds if each["batch"] == 1 and each["kind"] not in ("free", "drawn")]
    found["answers"] = sum(each["answers"] for each in kinds)
    found["different_answers"] = sum(each["different_answers"] for each in kinds)
    found["copy_over_plain"] = round(statistics.median(each["over_plain"] for each in over), 3)
    found["worst_over_plain"] = min(each["over_plain"] for each in kinds)
    config = {"answers": args.answers, "max_tokens": args.max_tokens, "batches": args.batches}
    config |= {"dtype": args.dtype, "copy_tokens": args.copy_tokens}
    show(found)
    finish(__doc__, {**result_header("copy_decode", device), "config": config, **found}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--model", action="append", help="repeatable; the default model if none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--copy-tokens", type=int, help="at a time; as it is by default")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="repeatable; all")
    parser.add_argument("--answers", type=int, default=12, help="of each kind")
    parser.add_argument("--skip", type=int, default=0, help="that many records of each set")
    parser.add_argument("--batches", default="1", help="answers together: 1,8")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


def run_model(weave: Weave, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model, by kind and batch."""
    decoder = weave.runtime.decoder
    twin = Decoder(decoder.spec, decoder.weights)  # an engine is alone with its decoder
    found = {}
    with (
        Engine(decoder, EngineConfig(copy_tokens=0, tree_share=0.9)) as plain,
        Engine(twin, EngineConfig(copy_tokens=args.copy_tokens, tree_share=0.9)) as copying,
    ):
        for kind in args.kind or KINDS:
            for batch in map(int, args.batches.split(",")):
                cases = list(islice(KINDS[kind](args.data), args.skip, args.skip + args.answers))
                groups = [cases[i : i + batch] for i in range(0, len(cases), batch)]
                pairs = []
                for number, group in enumerate(track(groups, f"{kind}, {batch}", transient=True)):
                    requests = [make_request(weave, case, kind, args.max_tokens) for case in group]
                    pairs.append(ask_both(plain, copying, requests, copies_first=number % 2 == 1))
                found[f"{kind} x{batch}"] = {"kind": kind, "batch": batch, **figures(pairs)}
    return found


def make_request(weave: Weave, case: Case, kind: str, max_tokens: int) -> EngineRequest:
    prompt = weave.build_prompt(case.question, [*case.passages])
    told = weave.runtime.tokenizer.encode(
        "".join(f"{one}\n{other}\n" for one, other in case.history)
    )
    drawn = DRAWN if kind == "drawn" else {"temperature": 0.0}
    return EngineRequest(
        prompt.question,
        Sampling(max_tokens=max_tokens, **drawn),
        weave.runtime.tokenizer.eos_ids,
        (*prompt.preamble, *told),
        tuple(EngineChunk(make_chunk_id(ids), ids) for ids in prompt.chunks),
        use_tree=True,
    )


def ask_both(
    plain: Engine, copying: Engine, requests: Sequence[EngineRequest], *, copies_first: bool
) -> Pair:
    """Answer by one engine, then by the other; each has computed the prompts before."""
    tickets: dict[str, list[Ticket]] = {}
    texts: dict[str, list[list[int]]] = {}
    steps = 0
    order = [("plain", plain), ("copied", copying)]
    for name, engine in reversed(order) if copies_first else order:
        warm = [engine.submit(first_token_of(each)) for each in requests]
        for ticket in warm:
            list(ticket)
        before = engine.stats()
        tickets[name] = [engine.submit(each) for each in requests]
        texts[name] = [[choice.token_id for choice in ticket] for ticket in tickets[name]]
        after = engine.stats()
        if name == "copied":
            grown = {key: int(after[key] - before[key]) for key in after}
            steps = grown["tokens_answered"] - grown["tokens_copied"]
    return Pair(tickets["plain"], tickets["copied"], (texts["plain"], texts["copied"]), steps)


def first_token_of(request: EngineRequest) -> EngineRequest:
    """The same prompt, asked for one token: its path is in the tree then."""
    return replace(request, sampling=Sampling(max_tokens=1))


def decode_s(tickets: Sequence[Ticket]) -> float:
    """Seconds from the last first token to the last token of all."""
    lines = [ticket.timeline for ticket in tickets]
    first_s = max(line.first_token_s or 0.0 for line in lines)
    return max(line.finished_s or 0.0 for line in lines) - first_s


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    long = [pair for pair in pairs if pair.num_tokens > 4 * len(pair.plain)] or pairs
    seconds = sum(decode_s(pair.copied) for pair in long)
    plain_s = sum(decode_s(pair.plain) for pair in long)
    tokens = sum(pair.num_tokens for pair in long)
    lines = [ticket.timeline for pair in long for ticket in pair.copied]
    return {
        "answers": sum(len(pair.plain) for pair in pairs),
        "different_answers": sum(pair.num_different for pair in pairs),
        "over_plain": round(statistics.median(pair.over_plain for pair in long), 3),
        "over_plain_in_all": round(plain_s / seconds, 3),
        "tokens_a_step": round(tokens / max(1, sum(pair.steps for pair in long)), 2),
        "tokens_a_second": [round(tokens / plain_s, 1), round(tokens / seconds, 1)],
        "drafted": sum(line.drafted for line in lines),
        "copied": sum(line.copied for line in lines),
        "tokens": tokens,
    }


def questions(data: Path) -> Iterator[Case]:
    for each in read_jsonl(data / "hotpotqa" / "hotpotqa_distractor.jsonl.gz"):
        yield Case(each["question"], [text_of(passage) for passage in each["passages"]])


def long_answers(data: Path) -> Iterator[Case]:
    for each in read_jsonl(data / "clapnq_dev" / "clapnq_dev.jsonl.gz"):
        yield Case(each["question"], [text_of(passage) for passage in each["passages"]])


def summaries(data: Path) -> Iterator[Case]:
    return (case._replace(question=SUMMARY) for case in long_answers(data))


def quotes(data: Path) -> Iterator[Case]:
    return (case._replace(question=QUOTE.format(case.question)) for case in long_answers(data))


def conversations(data: Path) -> Iterator[Case]:
    for each in read_jsonl(data / "mtrag" / "mtrag_qa_elser_top5.jsonl.gz"):
        if each["history"]:
            history = [(said, answered) for said, answered in each["history"][-2:]]
            yield Case(each["question"], [text_of(one) for one in each["passages"]], history)


def free(data: Path) -> Iterator[Case]:
    for each in read_jsonl(data / "nq_open" / "nq_open_questions.jsonl.gz"):
        yield Case(each["question"])


def text_of(passage: dict[str, Any]) -> str:
    return "\n".join(filter(None, (passage.get("title"), passage["text"])))


KINDS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "question": questions,
    "long answer": long_answers,
    "summary": summaries,
    "quote": quotes,
    "conversation": conversations,
    "free": free,
    "drawn": questions,
}


def show(found: dict[str, Any]) -> None:
    table = Table(title="decoding: copied over plain")
    for column in (
        "model",
        "kind",
        "answers",
        "different",
        "over plain",
        "tokens a step",
        "a second",
    ):
        table.add_column(column)
    for model, kinds in found["models"].items():
        for name, each in kinds.items():
            pace = " / ".join(map(str, each["tokens_a_second"]))
            table.add_row(
                model, name, str(each["answers"]), str(each["different_answers"]),
                f"{each['over_plain']:.2f}", f"{each['tokens_a_step']:.2f}", pace,
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
