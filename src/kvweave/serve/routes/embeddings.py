"""POST /v1/embeddings: vectors of the embedder that knowledge bases use."""

import base64
from functools import partial

from fastapi import Response
from fastapi.responses import JSONResponse

from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError
from kvweave.serve.wire.embeddings import MOST_CHARS, EmbeddingRequest


async def embeddings(request: EmbeddingRequest, context: Context, client: str) -> Response:
    """The reply of EmbeddingReply, made by hand: validating each number again takes longer. The
    work counts as that of `client`."""
    libraries = context.libraries
    name = libraries.config.embedder
    if request.model not in (None, name):
        message = f"no embedding model {request.model!r} here; this server has {name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    if (num_chars := sum(map(len, request.input))) > MOST_CHARS:
        message = f"'input' must be at most {MOST_CHARS:,} characters, got {num_chars:,}; send less"
        raise ApiError(400, message, param="input")
    for place, text in enumerate(request.input):
        if not text:
            raise ApiError(400, f"'input.{place}' is empty; leave it out", param="input")
    as_query = request.input_type == "query"
    made = await context.tasks.run(
        partial(libraries.embed, request.input, as_query=as_query), client=client
    )
    dim = made.vectors.shape[1]
    if request.dimensions not in (None, dim):
        message = f"'dimensions' is not supported other than {dim}, got {request.dimensions}"
        raise ApiError(400, message, param="dimensions")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": vector.tolist()
            if request.encoding_format == "float"
            else base64.b64encode(vector.astype("<f4").tobytes()).decode(),
        }
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens}
    return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})
