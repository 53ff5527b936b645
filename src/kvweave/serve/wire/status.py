"""GET /v1/models, /healthz and /readyz: replies."""

from typing import Literal

from kvweave.serve.wire.base import Outgoing


class ModelCard(Outgoing):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvweave"
    # extension; alias: another name of the model, kb: it answers from a knowledge base
    kind: Literal["model", "alias", "kb", "embedder"] = "model"
    # tokens of prompt and answer together, by the name other servers use; null: not known
    max_model_len: int | None
    kv_transfer: bool = False  # extension; takes `kv_transfer_params`


class ModelList(Outgoing):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Outgoing):
    status: Literal["ok"] = "ok"
    model: str
    running: int  # answers being computed
    waiting: int  # admitted, not begun
    finished: int  # since the start, as are the next two
    failed: int
    abandoned: int  # the client left
    pinned: int  # chunk KV that some lease holds


class Ready(Outgoing):
    status: Literal["ready"] = "ready"
    model: str
