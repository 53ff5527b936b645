"""Found ─► LaidOut: the question behind its history and the chunks that the history does not hold.

Chunks of earlier turns that nobody asked for take no room from the answer.
"""

import time

from kvweave.app.answer.stages import Asked, Found, LaidOut, P, PromptWords, R, Target
from kvweave.app.answer.talk import Talk


def lay_out(asked: Asked, found: Found, target: Target[P, R]) -> LaidOut[P]:
    """Lay out the prompt of a turn that found these chunks."""
    laid = _lay_out(asked, found, asked.turn.talk.bringing(_ids(found)), target)
    plain = laid.talk.plain
    if plain is None or target.has_room(laid.prompt, asked.question.drawn.max_tokens):
        return laid
    return _lay_out(asked, found, plain, target)


def _lay_out(asked: Asked, found: Found, talk: Talk, target: Target[P, R]) -> LaidOut[P]:
    began_s, chunks = time.perf_counter(), _ids(found)
    held = talk.held(chunks)
    new = tuple(ids for ids in chunks if ids not in held)
    words = PromptWords(asked, found, talk.messages, new, tuple(held))
    return LaidOut(words, talk, target.make_prompt(words), began_s)


def _ids(found: Found) -> list[tuple[int, ...]]:
    return [chunk.token_ids for chunk in found.chunks]
