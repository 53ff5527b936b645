"""What is kept of an answer for those who look closer later: references, and times. Nothing here is
made for it; `answer_details.py` reads it once somebody asks."""

from dataclasses import dataclass

from kvweave.app.answer.notes import AnswerEvent
from kvweave.engine.request import RequestTimeline
from kvweave.text.prompt import Prompt


@dataclass(frozen=True, slots=True)
class AnswerTrace:
    """How an answer came about. Times by time.perf_counter."""

    question: str
    prompt: Prompt
    called_s: float
    first_s: float  # its first token was handed out
    ended_s: float
    timeline: RequestTimeline | None  # of the engine
    events: tuple[AnswerEvent, ...]  # before the engine had it
