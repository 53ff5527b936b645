"""What an upstream is: which server, which models, and whether it fuses chunk KV."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from kvweave.gateway.connections import Connections, UpstreamFailed, failure_of

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
    model: str  # as it calls it; the first that it lists
    max_context: int | None = None  # tokens; None: it does not say
    fuses: bool = False  # takes kv_transfer_params and reuses chunk KV
    others: tuple[tuple[str, int | None], ...] = ()  # further models, with their max_context
    # that keep chunk KV of prompts; none: it is not kept; None: it does not say
    kv_tiers: tuple[str, ...] | None = None

    @property
    def models(self) -> dict[str, int | None]:
        """All that it lists, with the context of each."""
        return {self.model: self.max_context, **dict(self.others)}

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
    if status >= 400:
        raise failure_of(connections.url, status, listed)
    try:
        found = [(str(each["id"]), each) for each in listed["data"] if _answers(each)]
        model, first = found[0]
        contexts = {name: _context(each) for name, each in found}
    except (TypeError, LookupError, AttributeError):
        raise UpstreamFailed(f"{connections.url}/v1/models names no model", status) from None
    kind = _kind(str(first.get("owned_by", "")))
    if kind is UpstreamKind.KVWEAVE:
        fuses = first.get("kv_transfer") is True
    elif kind is UpstreamKind.VLLM and connector != "off":
        fuses = connector == "on" or _answers_probe(connections, model)
    else:
        fuses = False
    return UpstreamCard(
        kind,
        model,
        contexts.pop(model),
        fuses,
        tuple(contexts.items()),
        _kv_tiers(first) if kind is UpstreamKind.KVWEAVE else None,
    )


def _answers(listed: Mapping[str, Any]) -> bool:
    """Whether it is a model by itself: a kvweave also lists its embedder, and its knowledge bases,
    which are not the gateway's."""
    return listed.get("kind") not in ("kb", "embedder")


def _context(listed: Mapping[str, Any]) -> int | None:
    """Tokens of prompt and answer, by the names that servers have for it."""
    meta = listed.get("meta")
    most = listed.get("max_model_len")
    if most is None and isinstance(meta, Mapping):
        most = meta.get("n_ctx_train")
    return most if isinstance(most, int) else None


def _kv_tiers(listed: Mapping[str, Any]) -> tuple[str, ...] | None:
    tiers = listed.get("kv_tiers")
    return tuple(map(str, tiers)) if isinstance(tiers, list) else None


def _kind(owner: str) -> UpstreamKind:
    return next((kind for kind in UpstreamKind if kind == owner.lower()), UpstreamKind.OTHER)


def _answers_probe(connections: Connections, model: str) -> bool:
    """A vLLM with our connector says so in its reply to a request of one token. Raises
    UpstreamFailed where it is too busy to say anything: it is asked again then."""
    probe = {
        "model": model,
        "prompt": [1],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"kvweave": {"chunks": []}},  # refused there, in so many words
    }
    status, reply = connections.post("/v1/completions", probe, PROBE_S)
    if status == 429 or status >= 500:
        raise failure_of(connections.url, status, reply)
    params = reply.get("kv_transfer_params") if isinstance(reply, Mapping) else None
    told = params.get("kvweave") if isinstance(params, Mapping) else None
    return status == 200 and isinstance(told, Mapping) and "way" in told
