"""A request while the engine works on it. Owned by the engine thread."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Choice, Sampler
from kvweave.engine.scheduler import Seq
from kvweave.engine.sparse_rows import SparseRows
from kvweave.fuse.prefill import StoredPrompt
from kvweave.fuse.prepared import Prepared
from kvweave.fuse.record import FuseRecord
from kvweave.kv.tree import ChunkRef, TreeLease
from kvweave.model.paged_kv import PagedKV
from kvweave.model.rows import EarlyExit, Rows


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSequence(Seq):
    """Its numbers (see Seq), its tokens, its pages and who waits for it."""

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
    cached: int = 0  # tokens it took from the tree
    counted: bool = False  # the tree counted its access
    unshared: bool = False  # it needs the whole pool: no lease
    stored: StoredPrompt | None = None  # a fused request's leased bytes, if they came ahead
    prepared: Prepared | None = None  # a fused prompt whose rows are being computed (`sparse`)
    woven: FuseRecord | None = None  # how it was prepared
    apart_s: float = 0.0  # its steps that were no common ones
    logits: Tensor | None = None  # [V] behind a held prompt, waiting for release
    answered: int = field(default=0)  # tokens given out

    def rows(self, num_rows: int) -> Rows:
        """Its next rows; the last one gives logits if nothing known is left behind it."""
        if self.sparse is not None:
            return self._sparse_rows(self.sparse, num_rows)
        end = self.computed + num_rows
        wanted = [num_rows - 1] if end == self.known else []
        return Rows(self.ids[self.computed : end], range(self.computed, end), self.kv, wanted)

    def _sparse_rows(self, sparse: SparseRows, num_rows: int) -> Rows:
        """The same of a prepared prompt; tokens that it answered with before come behind it."""
        assert self.prepared is not None, "what is sparse was prepared"
        positions, end = sparse.next(num_rows), sparse.done + num_rows
        wanted = [num_rows - 1] if num_rows == sparse.left and self.known == self.prompt_len else []
        mover = self.prepared.mover(sparse.done, end)
        staying = self.prepared.staying(sparse.done, end)
        early_exit = None if staying is None else EarlyExit(*staying)
        return Rows([self.ids[p] for p in positions], positions, self.kv, wanted, mover, early_exit)

    def choose(self, logits: Tensor, likeliest: int | None = None) -> Choice:
        """Draw the next token; `likeliest` is the answer of a plain greedy request."""
        if likeliest is not None:
            return Choice(likeliest, None)
        return self.sampler.choose(logits, self.ids)

    def take(self, choice: Choice) -> bool:
        """Hand a token out. True: it was the last one."""
        self.ticket.put(choice)
        self.answered += 1
        if choice.token_id in self.request.eos_ids or self.answered >= self.room:
            return True
        self.ids.append(choice.token_id)
        self.known += 1
        return False


def is_plainly_greedy(lives: Sequence[EngineSequence]) -> bool:
    """Whether all of them take the likeliest token and nothing else is asked for."""
    samplings = [live.request.sampling for live in lives]
    return all(
        s.temperature == 0.0 and s.repetition_penalty == 1.0 and s.logprobs is None
        for s in samplings
    )
