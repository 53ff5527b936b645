"""A small invented world to try kvweave on: passages about a valley, and questions with known short
answers. Nothing of it is true, so that no model knows it without the passages.

    valley/*.md          one passage each
    questions.jsonl      question, answers (any will do), the passages that hold it: one or two
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
PASSAGES = FOLDER / "valley"
SHOWN = (1, 20, 24)  # of `read_questions`, for `kvweave demo`: one passage, two, two


class DemoQuestion(NamedTuple):
    """A question about the valley."""

    question: str
    answers: tuple[str, ...]  # ways to say the same
    passages: tuple[str, ...]  # stems of the files that are needed, in the order of thought

    def is_answered_by(self, text: str) -> bool:
        """Whether a right answer stands in `text` as words of its own; case and punctuation are
        nothing."""
        return any(f" {_words(answer)} " in f" {_words(text)} " for answer in self.answers)


def read_questions() -> list[DemoQuestion]:
    lines = (FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [DemoQuestion(r["question"], tuple(r["answers"]), tuple(r["passages"])) for r in records]


def titles_of(question: DemoQuestion) -> set[str]:
    """Return the titles of the passages that it needs, as chunks have them."""
    files = [PASSAGES / f"{stem}.md" for stem in question.passages]
    return {file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for file in files}


def _words(text: str) -> str:
    digits = re.sub(r"(?<=\d)[,.](?=\d{3}\b)", "", text.casefold())  # 2,316 is 2316
    return " ".join(re.findall(r"\w+", digits))
