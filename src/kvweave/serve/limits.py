"""What one server takes on."""

from dataclasses import dataclass, fields

from kvweave.config import ServerSettings
from kvweave.errors import ConfigError

USUAL = ServerSettings()  # has the defaults of all that can be configured


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond these a request is refused, in words that say so."""

    running: int = USUAL.running  # answers computed at once
    waiting: int = USUAL.waiting  # admitted behind them; beyond that, 429
    choices: int = 16  # `n` times the prompts of one request
    body_bytes: int = USUAL.body_bytes  # of one request; beyond that, 413
    upload_bytes: int = USUAL.upload_bytes  # the same for uploads
    upload_files: int = 64  # in one upload
    tasks: int = 4  # searches, embeddings and the like at once; and as many uploads
    waiting_tasks: int = 64  # admitted behind them; beyond that, 429
    body_s: float = 30.0  # between two pieces of a body; beyond that, 408
    body_rate: int = 2048  # bytes per second of a body, after its first `body_s`; slower is a 408
    connections: int = (
        USUAL.connections
    )  # open at once; of more the ones that do nothing are closed
    header_s: float = 10.0  # for the head of a request; beyond that, the connection is closed
    tenant_answers: int | None = None  # of one tenant, running or waiting; None: as many as fit
    tenant_kbs: int | None = None  # knowledge bases of one tenant; None: any number
    tenant_bytes: int | None = None  # of their documents on the disk; None: any number
    slow_s: float | None = None  # a request that takes longer is told of in the log; None: none is
    request_s: float = (
        USUAL.request_s
    )  # for a whole answer; beyond that, 504, and the work is given up

    @classmethod
    def from_settings(cls, server: ServerSettings) -> "Limits":
        """Those that are configured, as a configuration has them."""
        names = {each.name for each in fields(cls)} & {each.name for each in fields(server)}
        return cls(**{name: getattr(server, name) for name in names})

    def __post_init__(self) -> None:
        least = {
            "waiting": 0,
            "waiting_tasks": 0,
            "body_s": 0.0,
            "body_rate": 0,
            "request_s": 0.0,
            "slow_s": 0.0,
        }
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < least.get(name, 1):
                raise ConfigError(f"Limits.{name} must be at least {least.get(name, 1):g}")
