"""Notes which encodings of chunk KV cover all chunks, so that an upload need not look at each.

    <kb>/kv/encoded.json     { encoding: state of the catalogue that it covers }

A note counts only while the catalogue is in that very state: whoever adds chunks without their KV,
or is killed in between, makes it worthless by that alone, and the next ingest looks at every chunk
again. Part of the composition root: only `upkeep.py` uses it, as the writer.
"""

import json
import logging
from pathlib import Path

from kvweave.kv.keys import ContextId

log = logging.getLogger(__name__)

FILE = "encoded.json"


class EncodedNotes:
    """See the module. It says what was looked at, not what a tier still has: chunk KV that was
    evicted or deleted since is not missed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def covers(self, encoding: ContextId, state: str) -> bool:
        """Whether all chunks of the catalogue in `state` were offered to this encoding."""
        return self._read().get(encoding.hex()) == state

    def put(self, encoding: ContextId, state: str) -> None:
        self._write({**self._read(), encoding.hex(): state})

    def move(self, before: str, after: str) -> None:
        """Chunks went and none came: what covered all of them still does."""
        notes = self._read()
        moved = {name: after if state == before else state for name, state in notes.items()}
        if moved != notes:
            self._write(moved)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s): every chunk is looked at", self._path, error)
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, notes: dict[str, str]) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(notes) + "\n")
        temporary.replace(self._path)
