"""The plain loop to an answer: prefill the prompt, then one token at a time.

No batching and no reuse. It is what every cleverer path is compared with.
"""

from collections.abc import Collection, Iterator, Sequence

from kvweave.engine.sampling import Choice, Sampler, Sampling
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows

PREFILL_ROWS = 4096  # of a slice, so that memory for intermediate results stays bounded
FIRST_ROOM = 256  # tokens reserved for an answer before it is known how long it gets


def generate(
    decoder: Decoder, prompt_ids: Sequence[int], sampling: Sampling, eos_ids: Collection[int]
) -> Iterator[Choice]:
    """Yield the answer's tokens; the last one is in `eos_ids` unless the room ran out."""
    ids, sampler = list(prompt_ids), Sampler(sampling)
    room = min(sampling.max_tokens, decoder.spec.max_context - len(ids))
    kv = decoder.new_kv(len(ids) + min(room, FIRST_ROOM))
    for start in range(0, len(ids), PREFILL_ROWS):
        end = min(start + PREFILL_ROWS, len(ids))
        wanted = [end - start - 1] if end == len(ids) else []
        logits = decoder.forward([Rows(ids[start:end], range(start, end), kv, wanted)])
    for step in range(room):
        choice = sampler.choose(logits[0], ids)
        yield choice
        if choice.token_id in eos_ids or step == room - 1:
            return
        ids.append(choice.token_id)
        logits = decoder.forward([Rows([choice.token_id], [len(ids) - 1], kv, [0])])
