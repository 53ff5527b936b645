"""How to ingest; what to ingest are the sources."""

from dataclasses import dataclass, field

from kvweave.corpus.metadata import Metadata, check_metadata
from kvweave.corpus.parsers import ParseLimits
from kvweave.ingest.sources import Selection


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Options of one ingest. Raises RequestError for metadata that cannot be."""

    selection: Selection = field(default_factory=Selection)
    limits: ParseLimits = field(default_factory=ParseLimits)
    prune: bool = False  # remove documents of files that are gone from the given folders
    # of every document of the run; what a source says of itself goes before
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_metadata(self.metadata)
