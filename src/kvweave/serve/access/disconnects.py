"""Work whose client hangs up before it is done."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed the connection before it had its reply."""


@contextmanager
def while_connected(receive: Receive) -> Iterator[None]:
    """What is awaited inside ends with ClientGone as soon as the client hangs up. `receive` is
    ASGI's, and all of the body was read: nothing else can come."""
    task = asyncio.current_task()
    assert task is not None, "on the event loop"
    is_gone = is_over = False

    def leave(_: "asyncio.Task[None]") -> None:
        nonlocal is_gone
        if not is_over:
            is_gone = True
            task.cancel()

    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    leaving.add_done_callback(leave)
    try:
        yield
    except asyncio.CancelledError:
        # cancelled by others as well: then that counts
        if is_gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        is_over = True
        leaving.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
