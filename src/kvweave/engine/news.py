"""What other threads leave for the engine thread."""

from collections.abc import Callable

from kvweave.engine.chunk_loader import LoadedPrompt
from kvweave.engine.offload import ArrivedCopy
from kvweave.engine.request import Ticket
from kvweave.engine.yielding import Urgency, urgency

# a ticket that is new, released or cancelled, the end of something that was under way, or a job
News = Ticket | LoadedPrompt | ArrivedCopy | Callable[[], None]


def is_job(news: News) -> bool:
    """Whether news is something to run between two steps."""
    return not isinstance(news, Ticket | LoadedPrompt | ArrivedCopy)


def comes_before(news: News, own: Urgency) -> bool:
    """Whether what the engine would do next, hearing this, is more urgent than `own`."""
    match news:
        case Ticket():
            return not (news.is_cancelled or news.is_done) and urgency(news) > own
        case LoadedPrompt():
            return urgency(news.sequence.ticket) > own
        case ArrivedCopy():
            return False
        case _:  # a job: a request may wait for it, and then again it may be of idle time itself
            return own is Urgency.GUESSED
