"""What one server takes on."""

from dataclasses import dataclass, fields

from kvweave.config import ServerSettings
from kvweave.errors import ConfigError

USUAL = ServerSettings()  # the defaults of all that can be configured
# what a limit may be at least, where that is not 1
LEAST = dict.fromkeys(
    ("waiting", "waiting_tasks", "body_s", "body_rate", "request_s", "slow_s"), 0.0
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond these a request is refused, in words that say so."""

    running: int = USUAL.running  # answers computed at once
    waiting: int = USUAL.waiting  # admitted behind them; beyond that, 429
    choices: int = 16  # `n` times the prompts of one request
    body_bytes: int = USUAL.body_bytes  # of one request; beyond that, 413
    upload_bytes: int = USUAL.upload_bytes  # of one upload; beyond that, 413
    upload_files: int = 64  # in one upload
    tasks: int = 4  # searches, embeddings and the like at once; and as many uploads
    waiting_tasks: int = 64  # admitted behind them; beyond that, 429
    body_s: float = 30.0  # between two pieces of a body; beyond that, 408
    body_rate: int = 2048  # bytes per second of a body, after its first `body_s`; slower is a 408
    connections: int = USUAL.connections  # open at once; beyond that, idle ones are closed
    header_s: float = 10.0  # for the head of a request; beyond that, the connection is closed
    tenant_answers: int | None = USUAL.tenant_answers  # of one tenant; None: as many as fit
    tenant_kbs: int | None = USUAL.tenant_kbs  # knowledge bases of one tenant; None: any number
    tenant_bytes: int | None = USUAL.tenant_bytes  # of a tenant's documents; None: any number
    slow_s: float | None = USUAL.slow_s  # a request that takes longer is logged; None: none is
    request_s: float = USUAL.request_s  # for a whole answer; beyond that, 504, and it is given up

    @classmethod
    def from_settings(cls, server: ServerSettings) -> "Limits":
        """Take the limits that a configuration names."""
        names = {f.name for f in fields(cls)} & {f.name for f in fields(server)}
        return cls(**{name: getattr(server, name) for name in names})

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, least = getattr(self, name), LEAST.get(name, 1)
            if value is not None and value < least:
                raise ConfigError(f"Limits.{name} must be at least {least:g}")
