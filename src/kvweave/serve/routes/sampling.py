"""The fields that say how answers are drawn, and how many."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from kvweave.app.answer.question import KVTransfer
from kvweave.app.weave import Answer, Sampling
from kvweave.serve.access.errors import ApiError, quote
from kvweave.serve.routes.context import Context
from kvweave.serve.wire.base import KVTransferOut, SamplingFields, TransferOut
from kvweave.types import ChunkId

# fields of `Sampling` that a request may leave to the configuration and the model
DRAWN = ({f.name for f in fields(Sampling)} & SamplingFields.model_fields.keys()) - {
    *("max_tokens", "stop", "logit_bias")  # made of more than the field
}


def check_neutral(request: SamplingFields) -> None:
    """Refuse other values of the fields that are there for clients who ask for nothing."""
    for name in request.model_fields_set:
        extra = type(request).model_fields[name].json_schema_extra
        values = extra.get("enum") if isinstance(extra, dict) else None
        got = getattr(request, name)
        if isinstance(values, list) and not any(_is_same(got, value) for value in values):
            wants = " or ".join(json.dumps(value) for value in values)
            message = f"'{name}' is not supported other than {wants}, got {quote(got)}"
            raise ApiError(400, message, param=name)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "'stream_options' needs 'stream': true", param="stream_options")


def _is_same(got: object, value: object) -> bool:
    return type(got) is type(value) and got == value  # 0 is not false


def transfer_of(request: SamplingFields, context: Context) -> KVTransfer | None:
    """What a gateway says of the prompt, if it does. Raises ApiError or RequestError."""
    if request.kv_transfer_params is None:
        return None
    field = "kv_transfer_params"
    if not context.weave.engines:
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
        loaded=[] if record is None else record.loaded_starts,
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
            **context.usual.sampling,
            **asked,
            "max_tokens": max_tokens,
            "stop": tuple(request.stop),
            "logprobs": logprobs,
            "logit_bias": _bias(request.logit_bias),
        },
        built_in={"temperature": request.temperature},  # of the wire format
        model=request.model,
    )
    return [replace(first, seed=seed) for seed in seeds(first.seed, request.n)]


def _bias(sent: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """JSON has token ids as text. Raises ApiError."""
    for name in sent:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            message = f"'logit_bias' must have token ids as its keys, got {quote(name)}"
            raise ApiError(400, message, param="logit_bias")
    return tuple((int(name), bias) for name, bias in sent.items())


def seeds(seed: int | None, n: int) -> Sequence[int | None]:
    """The first answer has the seed itself, so that `n` does not change it; the others differ."""
    if seed is None:
        return [None] * n
    return [seed] + [_derive_seed(seed, index) for index in range(1, n)]


def _derive_seed(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # below 2**63
