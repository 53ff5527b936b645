"""The plain loop to an answer: prefill the prompt, then one token at a time.

No batching and no reuse. It is what every cleverer path is compared with.
"""

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from kvweave.engine.sampling import Choice, Sampler, Sampling
from kvweave.errors import PromptTooLong, RequestError
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.model.sequence_kv import SequenceKV

# A prompt is computed in slices of at most this many rows, so that memory for intermediate
# results stays bounded however long the prompt is.
PREFILL_ROWS = 4096
FIRST_ROOM = 256  # tokens reserved for an answer before it is known how long it gets


def generate(
    decoder: Decoder, prompt_ids: Sequence[int], sampling: Sampling, eos_ids: Collection[int]
) -> Iterator[Choice]:
    """Yield the answer's tokens; the last one is in `eos_ids` unless the room ran out.

    Checks the prompt at once, computes when iterated, and stops computing when closed.
    """
    check_prompt(prompt_ids, decoder.spec.vocab_size, decoder.spec.max_context)
    return _generate(decoder, list(prompt_ids), sampling, eos_ids)


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_context: int) -> None:
    """Raise RequestError unless the prompt leaves room for at least one token; PromptTooLong where
    it is that."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; say something")
    if len(prompt_ids) >= max_context:
        raise PromptTooLong(
            f"the prompt has {len(prompt_ids)} tokens, the model's context holds {max_context} "
            "with the answer; send less text or fewer documents"
        )
    if max(prompt_ids) >= vocab_size or min(prompt_ids) < 0:
        raise RequestError(f"the prompt has token ids outside the vocabulary of {vocab_size}")


def _generate(
    decoder: Decoder, ids: list[int], sampling: Sampling, eos_ids: Collection[int]
) -> Iterator[Choice]:
    kv = decoder.new_kv(len(ids) + min(room_for_answer(decoder, ids, sampling), FIRST_ROOM))
    for start in range(0, len(ids), PREFILL_ROWS):
        end = min(start + PREFILL_ROWS, len(ids))
        wanted = [end - start - 1] if end == len(ids) else []
        logits = decoder.forward([Rows(ids[start:end], range(start, end), kv, wanted)])
    yield from continue_answer(decoder, ids, kv, logits[0], sampling, eos_ids)


def room_for_answer(decoder: Decoder, prompt_ids: Sequence[int], sampling: Sampling) -> int:
    """Tokens the answer may have: what was asked for, or what the context still holds."""
    return min(sampling.max_tokens, decoder.spec.max_context - len(prompt_ids))


def continue_answer(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    kv: SequenceKV,
    logits: Tensor,
    sampling: Sampling,
    eos_ids: Collection[int],
) -> Iterator[Choice]:
    """Decode behind a prefilled prompt: `kv` holds it, `logits` [V] are those of its last token.

    However the prompt was prefilled, the answer is drawn in this one place.
    """
    sampler = Sampler(sampling)
    ids = list(prompt_ids)
    room = room_for_answer(decoder, prompt_ids, sampling)
    for step in range(room):
        choice = sampler.choose(logits, ids)
        yield choice
        if choice.token_id in eos_ids or step == room - 1:
            return
        ids.append(choice.token_id)
        logits = decoder.forward([Rows([choice.token_id], [len(ids) - 1], kv, [0])])[0]
