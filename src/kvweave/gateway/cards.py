"""What an upstream is: which server, which model, and whether it fuses chunk KV."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from kvweave.gateway.connections import Connections, UpstreamFailed

PROBE_S = 30.0  # one token of an engine that may be busy


class UpstreamKind(StrEnum):
    """Servers whose ways are known; all speak OpenAI's API."""

    KVWEAVE = "kvweave"
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    OTHER = "openai"


HEALTH_PATHS = {
    UpstreamKind.KVWEAVE: "/readyz",
    UpstreamKind.VLLM: "/health",
    UpstreamKind.LLAMACPP: "/health",
    UpstreamKind.OTHER: "/v1/models",
}


@dataclass(frozen=True, slots=True)
class UpstreamCard:
    """What an upstream says of itself."""

    kind: UpstreamKind
    model: str  # as it calls it
    max_context: int | None = None  # tokens; None: it does not say
    fuses: bool = False  # takes kv_transfer_params and reuses chunk KV

    @property
    def takes_ids(self) -> bool:
        """Prompts may be token ids."""
        return self.kind is not UpstreamKind.OTHER

    @property
    def health_path(self) -> str:
        return HEALTH_PATHS[self.kind]


def read_card(
    connections: Connections, connector: Literal["auto", "on", "off"], timeout_s: float
) -> UpstreamCard:
    """Ask an upstream what it is. Raises UpstreamFailed."""
    status, listed = connections.get("/v1/models", timeout_s)
    if status in (401, 403):
        raise UpstreamFailed(
            f"{connections.url} refuses the gateway's key; set gateway.key_file", status
        )
    try:
        first: dict[str, Any] = listed["data"][0]
        model = str(first["id"])
    except (TypeError, LookupError):
        raise UpstreamFailed(f"{connections.url}/v1/models names no model", status) from None
    kind = _kind(str(first.get("owned_by", "")))
    most = first.get("max_model_len") or (first.get("meta") or {}).get("n_ctx_train")
    card = UpstreamCard(kind, model, most if isinstance(most, int) else None)
    if kind is UpstreamKind.KVWEAVE:
        fuses = first.get("kv_transfer") is True
    elif kind is UpstreamKind.VLLM and connector != "off":
        fuses = connector == "on" or _answers_probe(connections, model)
    else:
        fuses = False
    return UpstreamCard(kind, model, card.max_context, fuses)


def _kind(owner: str) -> UpstreamKind:
    return next((kind for kind in UpstreamKind if kind == owner.lower()), UpstreamKind.OTHER)


def _answers_probe(connections: Connections, model: str) -> bool:
    """A vLLM with our connector says so in its reply to a request of one token."""
    probe = {
        "model": model,
        "prompt": [1],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"kvweave": {"chunks": []}},  # refused there, in so many words
    }
    status, reply = connections.post("/v1/completions", probe, PROBE_S)
    if status != 200 or not isinstance(reply, dict):
        return False
    told = (reply.get("kv_transfer_params") or {}).get("kvweave")
    return isinstance(told, dict) and "way" in told
