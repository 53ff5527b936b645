"""Who is let in: the keys there are, and the pages that a browser may ask from."""

from dataclasses import dataclass, field

from kvweave.serve.auth import Keys
from kvweave.serve.origins import OriginRules


@dataclass(frozen=True, slots=True)
class Door:
    """Without keys every client may ask, but pages of others (`origins.py`)."""

    keys: Keys = field(default_factory=dict)
    origins: OriginRules = field(default_factory=OriginRules)

    @property
    def has_keys(self) -> bool:
        return bool(self.keys)
