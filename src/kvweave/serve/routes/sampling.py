"""The fields that say how answers are drawn, and how many."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from kvweave.app.hosts import ModelHost
from kvweave.app.question import KVTransfer
from kvweave.app.weave import Answer, Sampling
from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError
from kvweave.serve.wire.base import KVTransferOut, SamplingFields, TransferOut
from kvweave.types import ChunkId

# fields of `Sampling` that a request may leave to the configuration and the model
DRAWN = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop_loops")


def check_model(request: SamplingFields, weave: ModelHost) -> None:
    """Raise a 404 unless the request is for a model that is served."""
    if request.model is not None:
        find_model(request.model, weave)


def find_model(name: str, weave: ModelHost) -> int | None:
    """The context of a model that is served, None if it is not known; raises a 404 for others."""
    known = weave.models()
    if name not in known:
        names = ", ".join(map(repr, known))
        message = f"no model {name!r} here; this server has {names}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return known[name]


def check_neutral(request: SamplingFields, neutral: dict[str, object]) -> None:
    """Fields that clients send with the value that asks for nothing: no other is accepted."""
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, **neutral}
    given = request.model_dump(include=set(neutral))
    for name, value in neutral.items():
        if (got := given[name]) != value:
            wants = str(value).lower() or "an empty string"
            message = f"'{name}' is not supported other than {wants}, got {got!r}"
            raise ApiError(400, message, param=name)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "'stream_options' needs 'stream': true", param="stream_options")


def transfer_of(request: SamplingFields, context: Context) -> KVTransfer | None:
    """What a gateway says of the prompt, if it does. Raises ApiError or RequestError."""
    if request.kv_transfer_params is None:
        return None
    field = "kv_transfer_params"
    if not context.weave.takes_transfer:
        message = f"'{field}' is for engines; this is a gateway"
        raise ApiError(400, message, param=field)
    sent = request.kv_transfer_params.kvweave
    return KVTransfer(
        chunks=tuple((start, end) for start, end in sent.chunks),
        preamble=sent.preamble,
        reuse=sent.reuse,
        ratio=sent.ratio,
        bound=sent.bound,
        asked=None if sent.asked is None else (sent.asked[0], sent.asked[1]),
        tenant=sent.tenant,
        forget=tuple(ChunkId(each) for each in sent.forget),
    )


def transfer_out(answer: Answer, forgotten: int = 0) -> KVTransferOut:
    """What was done for a prompt that a gateway sent."""
    record = answer.explain
    counts = {"exact": 0, "reused": 0, "recomputed": 0, "computed": answer.prompt_tokens}
    if record is not None:
        counts = record.counts
    told = TransferOut(
        way="fused" if counts["reused"] else "exact",
        strategy="full" if record is None else record.strategy,
        ratio=0.0 if record is None else record.ratio,
        exact=counts["exact"],
        reused=counts["reused"],
        recomputed=counts["recomputed"],
        computed=counts["computed"],
        why=None if record is None else record.why,
        forgotten=forgotten,
    )
    return KVTransferOut(kvweave=told)


def samplings(
    request: SamplingFields,
    max_tokens: int,
    logprobs: int | None,
    context: Context,
    num_prompts: int = 1,
) -> list[Sampling]:
    """One for each of the `n` answers to a prompt. Raises ApiError or RequestError."""
    most = max(1, context.limits.choices // num_prompts)
    if not 1 <= request.n <= most:
        raise ApiError(400, f"'n' must be between 1 and {most}, got {request.n}", param="n")
    asked = {name: getattr(request, name) for name in DRAWN if name in request.model_fields_set}
    first = context.weave.sampling(
        {
            **context.sampling,
            **asked,
            "max_tokens": max_tokens,
            "stop": tuple(request.stop),
            "logprobs": logprobs,
        },
        built_in={"temperature": request.temperature},  # of the wire format
        model=request.model,
    )
    return [replace(first, seed=seed) for seed in seeds(first.seed, request.n)]


def seeds(seed: int | None, n: int) -> Sequence[int | None]:
    """The first answer has the seed itself, so that `n` does not change it; the others differ."""
    if seed is None:
        return [None] * n
    return [seed] + [_derived(seed, index) for index in range(1, n)]


def _derived(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # below 2**63
