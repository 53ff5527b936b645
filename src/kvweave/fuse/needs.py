"""What a selector wants to have before it chooses rows."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be there before rows are chosen. The planner prices it."""

    probe: Literal["none", "question", "preamble", "anchors", "full"] = "none"
    probe_depth: int = 0  # the probe runs through this many layers
    key_layers: tuple[int, ...] = ()  # stored keys of the hits that scoring reads
    value_layers: tuple[int, ...] = ()
    extras: tuple[str, ...] = ()  # stored beside the chunk KV
    full_width_layers: int = 0  # layers that every hit runs through (in flight)
    # the probe sees exact KV in front of the chunks alone, and stands at the question's place: it
    # can be ordered before the chunks are looked at
    probes_ahead: bool = False
