"""The extras of an object on its way: which of them are read, when, and what becomes of a bad one.

Only those are read that some load has asked for, in front of the layers, or behind them for a load
that joins later, and those that say whose text it is. The place of the others in memory is empty.

An extra that cannot be had is lost to those who want it and costs nobody else anything, but for
what says whose text it is: no copy can do without.
"""

import time
from abc import abstractmethod
from collections.abc import Collection
from functools import partial

from kvweave.errors import TierCorrupt, TierError
from kvweave.kv.format.header import Header, Section, check_section
from kvweave.kv.io_pool import IoPool
from kvweave.kv.memory import new_memory
from kvweave.kv.provenance import PROVENANCE
from kvweave.kv.read_plan import extra_runs
from kvweave.kv.reads import Reads, miss_of
from kvweave.kv.residency import Miss
from kvweave.kv.tiers.base import Reader


class Beside(Reads):
    """Thread-safe. `Arrival` opens the object and reads its layers."""

    def __init__(self, tier_name: str, pool: IoPool, deadline_s: float) -> None:
        super().__init__(tier_name, pool, deadline_s)
        self.front: frozenset[str] = frozenset()  # extras that came before the layers
        self._reader: Reader | None = None
        self._wanted = PROVENANCE  # extras that somebody asked for, and these
        self._taken: frozenset[str] = frozenset()  # extras read, or being read

    @abstractmethod
    def _on_extra(self, name: str, data: memoryview) -> None:
        """One came late, checked and with its padding. On an IO thread, with no lock held."""

    @abstractmethod
    def _on_lost(self, miss: Miss, detail: str) -> None:
        """One will not come; the layers may. On an IO thread, with no lock held."""

    def want_extras(self, names: Collection[str]) -> None:
        """Ask for extras, those that the object has. Returns at once."""
        with self._changed:
            self._wanted |= frozenset(names)
        self._launch_extras()

    def _take_front(
        self, reader: Reader, header: Header, raw: memoryview, view: memoryview
    ) -> dict[str, str]:
        """Header and wanted extras into memory: what was read is copied, the rest read. Checked.
        Returns what is wrong with damaged ones."""
        view[: header.header_bytes] = raw[: header.header_bytes]
        for start, end in extra_runs(header, self._taken):
            here = max(start, min(len(raw), end))
            view[start:here] = raw[start:here]
            if here < end:
                reader.read(here, view[here:end])
        damaged: dict[str, str] = {}
        for name in self._taken:
            section = header.extras[name]
            data = view[section.offset : header.padded_end(section)]
            try:
                check_section(header, name, section, data)
            except TierCorrupt as error:
                if name in PROVENANCE:
                    raise
                damaged[name] = str(error)
        return damaged

    def _launch_extras(self) -> None:
        """Have extras read that were asked for after the front was."""
        with self._changed:
            if self.header is None or self._reader is None or self._cancelled or self._failure:
                return
            due = self._wanted & self.header.extras.keys() - self._taken
            self._taken |= due
        for name in sorted(due):
            self._launch(partial(self._read_extra, name, self.header.extras[name]))

    def _read_extra(self, name: str, section: Section) -> None:
        """Read and check one, apart: others may be reading what lies in memory."""
        header, reader = self.header, self._reader
        assert header is not None
        assert reader is not None
        padded = header.padded_end(section) - section.offset
        data = new_memory(padded, pinned=False).view[:padded]
        try:
            reader.read(section.offset, data)
            check_section(header, name, section, data)
        except TierError as error:
            with self._changed:
                self._lose({name: miss_of(error)})
            self._on_lost(miss_of(error), str(error))
            return
        self._on_extra(name, data)
        with self._changed:
            self.ended_s = self._progress_s = time.monotonic()
            self._changed.notify_all()
