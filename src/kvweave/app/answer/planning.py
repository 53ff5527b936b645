"""LaidOut ─► Planned: how a prompt is computed, and who hears of its first token."""

import time
from functools import partial

from kvweave.app.answer.notes import AnswerEvent, AnswerNotes
from kvweave.app.answer.stages import LaidOut, P, Planned, R, Target
from kvweave.app.library.chunk_uses import ChunkUses


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
    laid.talk.sent(asked.question.question, planned.prompt.chunks, asked.turn.as_of)
