"""What the engine reports: records of prefilled prompts, and running numbers."""

from collections import Counter
from dataclasses import replace

from kvweave.engine.sequence import EngineSequence
from kvweave.fuse.record import TREE, WAYS, ChunkRecord, FuseRecord, Stages
from kvweave.fuse.request import State
from kvweave.reasons import Reason

# All that is counted, so that what has not happened yet reads 0 and is not missing.
NAMES = (
    *(f"tokens_{state}" for state in State),
    "tokens_answered",
    "tokens_drafted",  # guessed from what requests have read, and computed beside the due ones
    "tokens_copied",  # of them, those that were right
    *(f"requests_{how}" for how in ("finished", "aborted", "failed")),
    *(f"background_{how}" for how in ("finished", "aborted", "failed")),  # counted here alone
    "prefixes_shared",  # requests held back while another computed their path, which they then read
    "kv_distrusted",  # chunks and prefixes on the device that held what is no number
    "fused_begun",  # prefills of fused prompts, also those that failed or were given up
    *(f"fused_{way}" for way in WAYS),  # of them, those that were completed, by way
    "fused_shared",  # of them, those over chunks in shared pages
    "fused_close_calls",  # of the completed ones, those computed exactly in the end
    "fused_offered",  # parts of their paths, exact ones in front, that the tree took or had
    "speculation_right",
    "speculation_wrong",
    "speculation_saved_tokens",
    "speculation_wasted_tokens",
)


def exact_record(sequence: EngineSequence) -> FuseRecord:
    """How an exact prompt was prefilled: what the knowledge tree had, and the rest computed."""
    request, cached, total = sequence.request, sequence.cached, sequence.prompt_len
    chunks, start = [], len(request.preamble)
    for chunk in request.chunks:
        length = len(chunk.token_ids)
        is_exact = start + length <= cached
        state = State.EXACT if is_exact else State.COMPUTED
        why = Reason.NOT_IN_TREE if request.use_tree else Reason.NOT_ASKED_FOR
        record = ChunkRecord(start, length, state, 0, TREE, None)
        chunks.append(record if is_exact else replace(record, tier=None, why=why))
        start += length
    return FuseRecord(
        strategy="prefix" if request.use_tree else "full",
        ratio=0.0,
        encoding="",
        token_ids=tuple(sequence.ids[:total]),
        states=(State.EXACT,) * cached + (State.COMPUTED,) * (total - cached),
        chunks=tuple(chunks),
        work=(total - cached) / total,
        loaded_bytes={},
        stages=Stages(compute=sequence.ticket.timeline.computing_s * 1e3),
    )


def joined_record(sequence: EngineSequence) -> FuseRecord:
    """How a fused prompt that joined the common steps was prefilled."""
    assert sequence.fuse_record is not None, "it was prepared"
    record = sequence.fuse_record
    compute_s = sequence.ticket.timeline.computing_s - sequence.apart_s
    return replace(record, stages=replace(record.stages, compute=compute_s * 1e3))


def _num_computed(sequence: EngineSequence, kept: int) -> int:
    """Rows of a speculation that were computed, behind `kept` tokens that the tree has. What a
    fused one reuses was not."""
    if sequence.fuse_record is None:
        return max(0, sequence.progress.computed - kept)
    states = sequence.fuse_record.states[: sequence.progress.computed]
    return sum(state in (State.RECOMPUTED, State.COMPUTED) for state in states)


class EngineCounts:
    """Running numbers. The engine thread writes, any thread reads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def count_prompt(self, sequence: EngineSequence) -> None:
        """Count the tokens of a computed prompt by where their KV came from."""
        record = sequence.ticket.record
        assert record is not None, "a prompt that is through has a record"
        for source, number in record.counts.items():
            self.add(f"tokens_{source}", number)
        if 0 < sequence.awaited <= sequence.cached:
            self.add("prefixes_shared")

    def count_right_guess(self, sequence: EngineSequence) -> None:
        """Count a speculation that was right, and the rows that it saved."""
        saved = _num_computed(sequence, sequence.cached)
        sequence.ticket.timeline.saved_tokens = saved
        self.add("speculation_right")
        self.add("speculation_saved_tokens", saved)

    def count_wrong_guess(self, sequence: EngineSequence) -> None:
        """Count a speculation that was wrong, and the rows that it wasted. What entered the
        knowledge tree is not lost: later requests find it there."""
        kept = sequence.cached
        if sequence.request.use_tree and sequence.lease is not None:
            kept = max(kept, sequence.lease.num_tokens)
        wasted = _num_computed(sequence, kept)
        sequence.ticket.timeline.wasted_tokens = wasted
        self.add("speculation_wrong")
        self.add("speculation_wasted_tokens", wasted)

    def snapshot(self) -> dict[str, int]:
        """Return all counts as they are now."""
        return dict(self._counts)
