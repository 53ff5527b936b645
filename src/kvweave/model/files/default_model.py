"""The model that answers where nobody named one.

A model that was named is taken or refused, never replaced. One that nobody named may be: a person
who tries kvweave without a hub and without the wheels gets a small model and a line that says so.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.embedded import EMBEDDED, pull
from kvweave.model.files.model_cache import ModelCache, Progress, no_progress

log = logging.getLogger(__name__)

DEFAULT = "qwen2.5-coder-0.5b"
FALLBACK = "smollm2"

Watch = Callable[[str], AbstractContextManager[Progress]]  # shows how a model of a name comes


def unwatched(name: str) -> AbstractContextManager[Progress]:
    """For callers that show nothing."""
    return nullcontext(no_progress)


def default_model(*, watch: Watch = unwatched, cache: ModelCache | None = None) -> str:
    """Name of an embedded model that is on this machine when this returns: DEFAULT, or FALLBACK
    with a warning where no source has the other. Blocks while it downloads and converts.

    Raises ModelError where neither can be had, or the disk is full.
    """
    try:
        with watch(DEFAULT) as progress:
            pull(EMBEDDED[DEFAULT], progress=progress, cache=cache)
    except (ModelNotFound, ModelCorrupt) as error:
        try:
            with watch(FALLBACK) as progress:
                pull(EMBEDDED[FALLBACK], progress=progress, cache=cache)
        except (ModelNotFound, ModelCorrupt) as worse:
            raise ModelNotFound(f"{error}; nor can {FALLBACK}, the fallback: {worse}") from error
        log.warning(
            "%s answers, a smaller and poorer model than %s: %s. To get that one: kvweave models "
            "pull %s; to stay with this one: --model %s",
            *(FALLBACK, DEFAULT, error, DEFAULT, FALLBACK),
        )
        return FALLBACK
    return DEFAULT
