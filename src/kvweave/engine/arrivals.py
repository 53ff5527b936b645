"""How a request becomes a sequence."""

from kvweave.engine.fair_ranks import FairRanks, share_of
from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import ExactPrefixes, path_of
from kvweave.engine.progress import Progress
from kvweave.engine.request import Ticket
from kvweave.engine.request_limits import RequestLimits
from kvweave.engine.sampling import Sampler
from kvweave.engine.sequence import EngineSequence


class Arrivals:
    """Begins requests, each with its rank among those of all tenants. For the engine thread."""

    def __init__(
        self,
        limits: RequestLimits,
        ranks: FairRanks,
        pages: PageManager,
        prefixes: ExactPrefixes,
    ) -> None:
        self._limits = limits
        self._ranks = ranks
        self._pages = pages
        self._prefixes = prefixes
        self._num_arrived = 0

    def begin(self, ticket: Ticket) -> EngineSequence:
        """Make the sequence of a ticket that is new. It has no pages yet."""
        request = ticket.request
        ids, tenant = request.prompt_ids, share_of(request.namespace)
        self._num_arrived += 1
        rank: float = self._num_arrived  # in the background all wait in one line
        if not request.background:
            rank = self._ranks.rank(tenant, len(ids))
        constraint = None if request.constraint is None else request.constraint()
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
            sampler=Sampler(request.sampling, constraint),
            kv=self._pages.empty_kv(),
            as_of=self._prefixes.as_of(request),
            path=path_of(request.namespace, request.preamble, request.chunks),
        )
