"""How a request becomes a sequence: what an engine can compute at all, and in which turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import ExactPrefixes, path_of
from kvweave.engine.progress import Progress
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Sampler
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.waiting_queue import FairRanks, share_of
from kvweave.errors import PromptTooLong, RequestError
from kvweave.model.spec import ModelSpec


class RequestLimits:
    """What one model and one pool can compute: lengths of prompts and answers, and token ids. Any
    thread."""

    def __init__(self, spec: ModelSpec, pool_tokens: int) -> None:
        self._vocab_size, self._max_context = spec.vocab_size, spec.max_context
        self._pool_tokens = pool_tokens

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless a prompt can be computed here with at least one token of an
        answer; PromptTooLong where that is the reason."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; say something")
        if len(prompt_ids) >= self._max_context:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, the model's context holds "
                f"{self._max_context} with the answer; send less text or fewer documents"
            )
        if max(prompt_ids) >= self._vocab_size or min(prompt_ids) < 0:
            raise RequestError(
                f"the prompt has token ids outside the vocabulary of {self._vocab_size}"
            )
        if len(prompt_ids) >= self._pool_tokens:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, the KV pool holds {self._pool_tokens} "
                "with the answer; send less text or give the engine more pool_tokens"
            )

    def check_answer(self, request: EngineRequest) -> None:
        """Raise RequestError unless what a request says about its answer makes sense."""
        size = self._vocab_size
        if any(not 0 <= token_id < size for token_id in request.forced):
            raise RequestError(f"`forced` has token ids outside the vocabulary of {size}")
        if any(not 0 <= token_id < size for token_id, _ in request.sampling.logit_bias):
            raise RequestError(f"logit_bias has token ids outside the vocabulary of {size}")
        if request.watched < 0:
            raise RequestError(f"watched must be 0 or more, got {request.watched}")

    def answer_tokens(self, request: EngineRequest, prompt_len: int) -> int:
        """Return how many tokens the answer may have at most."""
        most = min(self._max_context, self._pool_tokens) - prompt_len
        return min(len(request.forced) or request.sampling.max_tokens, most)


@dataclass(eq=False)
class Arrivals:
    """Makes sequences of requests, each with its rank among those of all tenants. For the engine
    thread."""

    _limits: RequestLimits
    _ranks: FairRanks
    _pages: PageManager
    _prefixes: ExactPrefixes
    _num_arrived: int = 0

    def begin(self, ticket: Ticket) -> EngineSequence:
        """Make the sequence of a ticket that is new. It has no pages yet."""
        request = ticket.request
        ids, tenant = request.prompt_ids, share_of(request.namespace)
        self._num_arrived += 1
        rank: float = self._num_arrived  # in the background all wait in one line
        if not request.background:
            rank = self._ranks.rank(tenant, len(ids))
        return EngineSequence(
            progress=Progress(
                rank,
                len(ids),
                ticket.is_held,
                own_step=request.fused is not None,
                background=request.background,
                tenant=tenant,
            ),
            request=request,
            ticket=ticket,
            prompt_len=len(ids),
            ids=ids,
            room=self._limits.answer_tokens(request, len(ids)),
            sampler=Sampler(request.sampling, request.constraint and request.constraint()),
            kv=self._pages.empty_kv(),
            as_of=self._prefixes.as_of(request),
            path=path_of(request.namespace, request.preamble, request.chunks),
        )
