"""Found ─► LaidOut ─► Planned ─► Submitted: a prompt of what was found goes to its target.

A prompt is the question behind its history and the chunks that the history does not hold. Chunks of
earlier turns that nobody asked for take no room from the answer.
"""

import time
from collections.abc import Generator
from functools import partial

from kvweave.app.answer.answer_stream import Answer, Piece, PieceStream
from kvweave.app.answer.conversations import Talk
from kvweave.app.answer.notes import AnswerEvent, AnswerNotes
from kvweave.app.answer.settings import AnswerSettings, ChunkUses
from kvweave.app.answer.stages import (
    Asked,
    Found,
    LaidOut,
    P,
    Planned,
    PromptWords,
    R,
    Submitted,
    Target,
)

NOTHING_TEXT = "Nothing about this was found in the knowledge base."


class SaidAnswer(PieceStream):
    """A text that is known from the start: no model is asked, which would answer from nothing."""

    def __init__(self, text: str, called_s: float, query: str | None = None) -> None:
        """`called_s` is when the caller asked, by time.perf_counter; `query` what was searched for,
        where that is not the question itself."""
        self._text = text
        self._called_s = called_s
        self._query = query
        self._is_aborted = False
        super().__init__()

    def abort(self) -> None:
        self._is_aborted = True

    def _make(self) -> Generator[Piece, None, None]:
        if self._is_aborted:
            return
        yield Piece(self._text)
        taken_ms = (time.perf_counter() - self._called_s) * 1e3
        self.answer = Answer(
            text=self._text,
            finish_reason="stop",
            prompt_tokens=0,
            completion_tokens=0,
            ttft_ms=taken_ms,
            total_ms=taken_ms,
            nothing_found=True,
            query=self._query,
        )


def submit(
    target: Target[P, R], settings: AnswerSettings, asked: Asked, found: Found, is_held: bool
) -> Submitted:
    """Lay out, plan and submit the prompt of what was found. A held prompt begins at once. If
    nothing was found and the question wants that said, return a fixed text instead."""
    if not found.chunks and asked.says_nothing:
        text = settings.usual.library.nothing_text or NOTHING_TEXT
        return Submitted(SaidAnswer(text, asked.called_s, asked.question.query), AnswerNotes())
    planned = plan(lay_out(asked, found, target), target, settings.uses)
    return target.submit(planned, is_held=is_held)


def lay_out(asked: Asked, found: Found, target: Target[P, R]) -> LaidOut[P]:
    """Lay out the prompt of a turn that found these chunks."""
    laid = _lay_out(asked, found, asked.turn.talk.choose_history(_ids(found)), target)
    plain = laid.talk.plain
    if plain is None or target.has_room(laid.prompt, asked.question.drawn.max_tokens):
        return laid
    return _lay_out(asked, found, plain, target)


def _lay_out(asked: Asked, found: Found, talk: Talk, target: Target[P, R]) -> LaidOut[P]:
    began_s, chunks = time.perf_counter(), _ids(found)
    held = talk.find_in_history(chunks)
    new = tuple(ids for ids in chunks if ids not in held)
    words = PromptWords(asked, found, talk.messages, new, tuple(held))
    return LaidOut(words, talk, target.make_prompt(words), began_s)


def _ids(found: Found) -> list[tuple[int, ...]]:
    return [chunk.token_ids for chunk in found.chunks]


def plan(laid: LaidOut[P], target: Target[P, R], uses: ChunkUses) -> Planned[P, R]:
    """Have the target decide how a prompt is computed, and note what is known by now. Raises
    RequestError if it cannot be."""
    words = laid.words
    asked, found = words.asked, words.found
    notes = AnswerNotes(
        called_s=asked.called_s,
        retrieve_ms=(laid.began_s - asked.called_s) * 1e3,
        question=asked.question.question,
        query=asked.question.query,
        retrieved=found.chunks,
        left_out=len(words.left_out),
        not_guessed=found.not_guessed,
        order=asked.order if found.chunks else None,
        events=list(found.events),
    )
    planned = target.plan(laid, notes)
    notes.events.append(AnswerEvent("plan", "plan", laid.began_s, time.perf_counter()))
    return planned.heard_by(partial(_remember, laid, planned, uses))


def _remember(laid: LaidOut[P], planned: Planned[P, R], uses: ChunkUses, _: object) -> None:
    """The turn went out: note what was guessed for it, and which chunks it brought, in the order
    that they were sent in."""
    planned.notes.keep_guesses()
    asked, found = laid.words.asked, laid.words.found
    uses.saw([chunk.id for chunk in found.chunks if chunk.id is not None])
    laid.talk.remember(asked.question.question, planned.prompt.chunks, asked.turn.as_of)
