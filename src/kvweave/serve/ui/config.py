"""What a server keeps for those who look at its web page."""

from dataclasses import dataclass
from pathlib import Path

KEPT_ANSWERS = 64


@dataclass(frozen=True, slots=True)
class PageConfig:
    """See the module."""

    kept_answers: int = KEPT_ANSWERS  # of each tenant, whose details can be asked for; 0: none
    # folder of conversations that are kept for holders of API keys; None: none are
    conversations: Path | None = None
