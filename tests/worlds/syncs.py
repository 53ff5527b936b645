"""What a piece of code asks of the disk, in order: names that come and go, and what is synced.

Whether that is enough after a power cut is what bench/reliability/power.py finds out over a whole
run; a test that follows from it says which sync stands where.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Event = tuple[str, Path]  # unlink, rename (to), sync


@contextmanager
def watched_disk() -> Iterator[list[Event]]:
    """The events, while they happen."""
    events: list[Event] = []

    def noted(word: str, call: Callable[..., Any], which: int) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            done = call(*args, **options)
            events.append((word, _path(args[which])))
            return done

        return watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", noted("unlink", os.unlink, 0))
        patch.setattr(os, "rename", noted("rename", os.rename, 1))
        patch.setattr(os, "replace", noted("rename", os.replace, 1))
        patch.setattr(os, "fsync", noted("sync", os.fsync, 0))
        yield events


def _path(named: Any) -> Path:
    """Of a path or a descriptor."""
    return Path(os.readlink(f"/proc/self/fd/{named}")) if isinstance(named, int) else Path(named)


def is_synced_behind(events: list[Event], change: Event, folder: Path, before: Event) -> bool:
    """Whether `folder` was synced between the last `change` and the first `before` behind it."""
    last = max(place for place, event in enumerate(events) if event == change)
    end = next((p for p, e in enumerate(events) if p > last and e == before), len(events))
    return ("sync", folder) in events[last:end]
