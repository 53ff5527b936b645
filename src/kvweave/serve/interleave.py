"""Several streams as one, in the order things come."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def interleave(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """All items of all streams; within a stream in order. The first failure ends it."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    # One place in the queue: a slow reader holds the streams back, and they merge meanwhile.
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(1)

    async def drain(stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                await queue.put((item,))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            got = await queue.get()
            if got is None:
                num_open -= 1
            elif isinstance(got, Exception):
                raise got
            else:
                yield got[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
