"""Do answers get worse when passages stand in another order, or when what repeats is left out?

Two questions of CRAFT (its figures 5 and 7), by known answers. *Order*: HotpotQA, five passages as
they stand in the file against the same five in drawn orders. *Repeats*: MTRAG turns whose passages
came earlier in their conversation, with all passages of this turn against those that the
conversation has not had. All is computed in full, greedily, by the product with default settings,
and every answer is scored by F1 and ROUGE-L. The figure is the mean difference within a question,
with the interval of a bootstrap over questions: one that holds 0 says that no difference was found
among so many questions, not that there is none.

    python bench/quality/orders.py --data ../shared/data --values orders.jsonl \
        --out bench/results/orders-cpu.json

Answers are kept in `--values` as they come: a run that was killed goes on behind them.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import numpy as np

from common.files import read_jsonl
from common.results import finish, result_header
from kvweave.app.weave import Weave
from kvweave.engine.sampling import Sampling
from kvweave.text.tokenizer import Tokenizer
from quality.asked import SENTENCES_STYLE, SETS, WORDS_STYLE, Style
from quality.scores import score

SCORES = ("f1", "rouge_l")
GIVEN = "given"
DRAWS = 2000
HISTORY_TURNS = 2  # of a conversation, in front of the turn that is scored
MOST_CHARS = 12_000  # of a prompt: longer ones take minutes on a CPU

Message = dict[str, str]


class Trial(NamedTuple):
    """One question, and each way of asking it."""

    part: str  # "order" or "repeats"
    number: int
    style: Style
    answers: tuple[str, ...]
    ways: dict[str, list[Message]]  # GIVEN and others


def order_trials(data: Path, tokenizer: Tokenizer, count: int, orders: int) -> Iterator[Trial]:
    """HotpotQA, records that nothing was tuned on."""
    chosen = SETS["hotpot"]
    records = islice(chosen.read(data, tokenizer), chosen.scored.start, chosen.scored.stop)
    for number, record in enumerate(islice(records, count)):
        texts = [_passage(passage.title, passage.text) for passage in record.passages]
        rng = random.Random(number)
        ways = {GIVEN: _ask(WORDS_STYLE, [], texts, record.question)}
        for place in range(orders):
            drawn = rng.sample(texts, len(texts))
            ways[f"drawn {place}"] = _ask(WORDS_STYLE, [], drawn, record.question)
        yield Trial("order", number, WORDS_STYLE, record.answers, ways)


def repeat_trials(data: Path, count: int) -> Iterator[Trial]:
    """MTRAG turns that retrieve what their conversation holds already."""
    turns = {}
    for record in read_jsonl(data / "mtrag/mtrag_qa_elser_top5.jsonl.gz"):
        turns[record["conversation"], record["turn"]] = record
    found = (_repeats(turns, record) for record in turns.values())
    fitting = (trial for trial in found if trial is not None)
    for number, trial in enumerate(islice(fitting, count)):
        yield trial._replace(number=number)


def _repeats(turns: dict[Any, Any], record: dict[str, Any]) -> Trial | None:
    name, turn = record["conversation"], record["turn"]
    before = [turns.get((name, each)) for each in range(max(1, turn - HISTORY_TURNS), turn)]
    if not before or None in before or record["answerability"] != "ANSWERABLE":
        return None
    past: list[Message] = []
    held: set[str] = set()
    for each in before:
        new = [text for text in _texts(each) if text not in held]
        held |= set(new)
        past = _ask(SENTENCES_STYLE, past, new, each["question"])
        past.append({"role": "assistant", "content": each["answers"][0]})
    texts = _texts(record)
    new = [text for text in texts if text not in held]
    if len(new) == len(texts):
        return None
    ways = {
        GIVEN: _ask(SENTENCES_STYLE, past, texts, record["question"]),
        "left out": _ask(SENTENCES_STYLE, past, new, record["question"]),
    }
    if sum(len(message["content"]) for message in ways[GIVEN]) > MOST_CHARS:
        return None
    return Trial("repeats", 0, SENTENCES_STYLE, tuple(record["answers"]), ways)


def _ask(style: Style, past: list[Message], texts: Sequence[str], question: str) -> list[Message]:
    """The messages of a chat that asks over passages, behind what was said."""
    front = past or [{"role": "system", "content": style.system}]
    return [*front, {"role": "user", "content": "\n\n".join([*texts, f"Question: {question}"])}]


def _texts(record: dict[str, Any]) -> list[str]:
    return [_passage(each["title"], each["text"]) for each in record["passages"]]


def _passage(title: str, text: str) -> str:
    return f"{title}\n{text}" if title else text


def answer(weave: Weave, trial: Trial, messages: list[Message]) -> str:
    """The model's whole answer, or its first line where that is what is asked for."""
    sampling = Sampling(max_tokens=trial.style.max_tokens, temperature=0.0)
    text = weave.chat(messages, sampling=sampling).finish().text.strip()
    return text.splitlines()[0] if trial.style.is_line and text else text


def summarise(lines: Sequence[dict[str, Any]], score_name: str) -> dict[str, Any]:
    """Of one part: the mean of the given way, and what the others differ by within a question."""
    given = [line["ways"][GIVEN][score_name] for line in lines]
    others = [
        [scores[score_name] for way, scores in line["ways"].items() if way != GIVEN]
        for line in lines
    ]
    less = [statistics.fmean(each) - one for each, one in zip(others, given, strict=True)]
    draws = np.random.default_rng(0).integers(0, len(less), (DRAWS, len(less)))
    means = np.array(less)[draws].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {
        "given": round(statistics.fmean(given), 4),
        "others": round(statistics.fmean(chain.from_iterable(others)), 4),
        "difference": round(statistics.fmean(less), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "spread_within": round(statistics.fmean(map(statistics.pstdev, others)), 4),
    }


def same_share(lines: Sequence[dict[str, Any]]) -> float:
    """Share of answers that are, word for word, what the given way answers."""
    same = [
        scores["text"] == line["ways"][GIVEN]["text"]
        for line in lines
        for way, scores in line["ways"].items()
        if way != GIVEN
    ]
    return round(statistics.fmean(same), 4)


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts = {}
    for part in dict.fromkeys(line["part"] for line in lines):
        of_part = [line for line in lines if line["part"] == part]
        parts[part] = {
            "questions": len(of_part),
            "ways": len(of_part[0]["ways"]) - 1,
            "same_answer": same_share(of_part),
            **{name: summarise(of_part, name) for name in SCORES},
        }
    return parts


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What was kept; a line that a kill cut short is left out, and asked again."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with hotpotqa/ and mtrag/")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--questions", type=int, default=40, help="of HotpotQA")
    parser.add_argument("--orders", type=int, default=4, help="drawn ones, for each question")
    parser.add_argument("--turns", type=int, default=40, help="of MTRAG")
    parser.add_argument("--values", type=Path, default=Path("orders.jsonl"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with Weave.open(model=args.model) as weave:
        tokenizer = weave.runtime.tokenizer
        trials = [
            trial
            for pair in zip_longest(
                order_trials(args.data, tokenizer, args.questions, args.orders),
                repeat_trials(args.data, args.turns),
            )
            for trial in pair
            if trial is not None
        ]
        made_by = {"model": args.model, "orders": args.orders}
        lines = [line for line in read_lines(args.values) if made_by.items() <= line.items()]
        known = {(line["part"], line["number"]) for line in lines}
        with args.values.open("a") as kept:
            for trial in trials:
                if (trial.part, trial.number) in known:
                    continue
                texts = {way: answer(weave, trial, ask) for way, ask in trial.ways.items()}
                scored = {w: {"text": t, **score(t, trial.answers)} for w, t in texts.items()}
                lines.append(
                    {"part": trial.part, "number": trial.number, "ways": scored, **made_by}
                )
                kept.write("\n" + json.dumps(lines[-1]) + "\n")  # behind a line that was cut
                kept.flush()
                print(f"{len(lines)}/{len(trials)} {trial.part}", flush=True)
    asked = {(trial.part, trial.number) for trial in trials}
    parts = summary([line for line in lines if (line["part"], line["number"]) in asked])
    for part, found in parts.items():
        print(part, found)
    header = {**result_header("orders", "cpu"), "config": {**made_by, "questions": args.questions}}
    finish(__doc__, {**header, "parts": parts}, args.out)


if __name__ == "__main__":
    main()
