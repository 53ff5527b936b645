"""A request while the engine works on it. Owned by the engine thread."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from kvweave.engine.chunk_pages import ChunkLease
from kvweave.engine.drafts import AnswerDrafts, Drafts
from kvweave.engine.progress import Progress, SparseRows
from kvweave.engine.request import EngineRequest, FusedPart, Ticket
from kvweave.engine.sampling import Choice, Sampler
from kvweave.fuse.prefill import StoredPrompt
from kvweave.fuse.prepared import Prepared
from kvweave.fuse.record import TREE, FuseRecord
from kvweave.fuse.request import State
from kvweave.kv.tree import ChunkRef, TreeLease
from kvweave.model.paged_kv import PagedKV
from kvweave.model.rows import EarlyExit, Rows


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSequence:
    """A request's tokens, its pages, how far it has come and the ticket its answer goes to."""

    progress: Progress
    request: EngineRequest
    ticket: Ticket
    ids: list[int]  # prompt and answer so far
    prompt_len: int
    room: int  # tokens the answer may have at most
    sampler: Sampler
    kv: PagedKV
    as_of: int  # when its chunks were found: those deleted since are not offered
    path: tuple[ChunkRef, ...] = ()  # its preamble and chunks in the knowledge tree
    lease: TreeLease | None = None  # on the part of the path that it reads, or offers behind
    offered: int = 0  # chunks of the path that the tree has or was offered
    awaited: int = 0  # tokens up to where it first waited for another to compute its path
    cached: int = 0  # tokens it took from the tree
    counted: bool = False  # the tree counted its access
    unshared: bool = False  # it needs the whole pool: no lease
    shared: ChunkLease | None = None  # chunks that it reads from shared pages; None: it has copies
    copies: bool = False  # it needs the whole pool, or lost its room: no shared pages
    present: int = 0  # rows of its front that were in its pages when it was let in
    stored: StoredPrompt | None = None  # a fused request's leased bytes, if they came ahead
    prepared: Prepared | None = None  # a fused prompt whose rows are being computed
    fuse_record: FuseRecord | None = None  # how its fused prompt was prepared or prefilled
    apart_s: float = 0.0  # its steps that were no common ones
    logits: Tensor | None = None  # [V] behind a held prompt, waiting for release
    answered: int = 0  # tokens given out
    drafts: AnswerDrafts | None = None  # of its answer; None: it has no token yet

    @property
    def fused_part(self) -> FusedPart:
        """How the prompt of a fused request is fused."""
        part = self.request.fused
        assert part is not None, "a fused request says how"
        return part

    @property
    def num_exact_parts(self) -> int:
        """Parts of its path, from the front, whose KV is exact once it is computed. Of a fused
        prompt, what came from the tree and chunks that are computed right behind it: their rows see
        exact rows only, run through every layer and are not moved. The store's bytes are none of
        them, wherever they stand: a codec rounded them."""
        if self.request.fused is None:
            return len(self.path)
        if self.fuse_record is None:
            return 0
        exact = takewhile(
            lambda chunk: chunk.tier == TREE or chunk.state is State.COMPUTED,
            self.fuse_record.chunks,
        )
        return bool(self.request.preamble) + sum(1 for _ in exact)

    @property
    def num_kept_parts(self) -> int:
        """Parts of its path, from the front, that it leaves in the tree: exact ones alone, and of
        its chunks those that the request wants kept."""
        kept = self.request.num_kept
        if kept is None:
            return self.num_exact_parts
        return min(self.num_exact_parts, bool(self.request.preamble) + kept)

    def num_exact_chunks(self, lease: TreeLease | None) -> int:
        """Chunks of its prompt that a lease on its path holds."""
        in_front = 1 + bool(self.request.preamble)  # nodes of a path before its first chunk
        return 0 if lease is None else max(0, len(lease.nodes) - in_front)

    def rows(self, num_rows: int) -> Rows:
        """Return the next rows; the last known one gives logits, and so do those of the draft
        behind it."""
        progress = self.progress
        if progress.sparse is not None:
            return self._sparse_rows(progress.sparse, num_rows)
        start, end = progress.computed, progress.computed + num_rows
        wanted = list(range(progress.known - 1 - start, num_rows))
        ids = [*self.ids[start:end], *self.draft(end - progress.known)]
        return Rows(ids, range(start, end), self.kv, wanted)

    def draft(self, num_rows: int) -> Sequence[int]:
        """Return the first tokens of the draft of its answer."""
        if num_rows <= 0:
            return ()
        assert self.drafts is not None, "what has rows was drafted"
        return self.drafts.token_ids[:num_rows]

    def _sparse_rows(self, sparse: SparseRows, num_rows: int) -> Rows:
        """Return the next rows of a prepared prompt. Tokens that were answered before a preemption
        come behind it."""
        assert self.prepared is not None, "what is sparse was prepared"
        positions, end = sparse.next(num_rows), sparse.done + num_rows
        is_last = num_rows == sparse.left and self.progress.known == self.prompt_len
        wanted = [num_rows - 1] if is_last else []
        mover = self.prepared.mover(sparse.done, end)
        staying = self.prepared.staying(sparse.done, end)
        early_exit = None if staying is None else EarlyExit(*staying)
        return Rows([self.ids[p] for p in positions], positions, self.kv, wanted, mover, early_exit)

    def join(self, prepared: Prepared) -> None:
        """Take over a prompt that is stitched into its pages; the rows that are left run with
        others."""
        self.prepared = prepared
        self.progress.join(SparseRows(prepared.rows, prepared.bonds))

    def finish_prompt(self) -> None:
        """Note that the whole fused prompt is in its pages."""
        self.progress.computed = self.prompt_len
        self.progress.own_step = False

    def release_chunks(self) -> None:
        """Read no more of shared chunks. Harmless without a lease."""
        if self.shared is not None:
            self.shared.release()
            self.shared = None

    def release_lease(self) -> None:
        """Read and offer no more of the tree. Harmless without a lease."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def choose(self, logits: Tensor, likeliest: int | None = None) -> Choice:
        """Choose the next token: drawn, or forced; `likeliest` is the answer of a plain greedy
        request."""
        request = self.request
        if self.answered < request.watched:
            self.ticket.distributions.append(logits.float().log_softmax(-1).cpu())  # [V]
        if request.forced:
            return self.sampler.choose(logits, self.ids, request.forced[self.answered])
        if likeliest is not None:
            return Choice(likeliest, None)
        return self.sampler.choose(logits, self.ids)

    def hold_back(self, logits: Tensor) -> None:
        """Keep the logits [V] of a held prompt until it is released."""
        self.logits = logits.clone()
        self.ticket.timeline.prefilled_s = time.perf_counter()

    def prepare_draft(self, drafts: Drafts) -> None:
        """Look for what the answer may go on with. Behind a token that was not the last one."""
        if drafts.most:
            if self.drafts is None:
                prompt_ids = self.ids[: self.prompt_len]
                self.drafts = drafts.open(prompt_ids, self.room, self.request.forced)
            self.drafts.prepare(self.ids, self.answered, self.room)
            self.progress.drafted = len(self.drafts.token_ids)

    def judge_draft(self, num_right: int, num_computed: int) -> None:
        """Note how many tokens of the draft were right, of those that were computed."""
        assert self.drafts is not None, "what has rows was drafted"
        self.drafts.judge(num_right, num_computed)
        self.ticket.timeline.drafted += num_computed
        self.ticket.timeline.copied += num_right

    def take(self, choice: Choice) -> bool:
        """Hand a token out. True: it was the last one."""
        self.ticket.put(choice)
        self.answered += 1
        is_end = choice.token_id in self.request.eos_ids and not self.request.forced
        if is_end or self.answered >= self.room:
            return True
        self.ids.append(choice.token_id)
        self.progress.known += 1
        return False


def is_plainly_greedy(sequences: Sequence[EngineSequence]) -> bool:
    """Whether all of them take the likeliest token and nothing else is asked for."""
    return all(sequence.request.sampling.is_plainly_greedy for sequence in sequences)


def is_close_call(sequence: EngineSequence, logits: Tensor, lead: float | None) -> bool:
    """Whether the first token [V] of a fused prompt is too close to its second choice to be taken
    from fused KV."""
    part = sequence.request.fused
    if part is None or not part.close_call:
        return False
    if lead is None:
        first, second = logits.topk(2).values.tolist()
        lead = first - second
    return bool(lead < part.close_call)
