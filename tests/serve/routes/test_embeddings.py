"""/v1/embeddings with the official client: the embedder of new knowledge bases."""

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from worlds.serving import KbServer
from worlds.tiny_corpus import WordEmbedder


def test_the_client_gets_the_embedders_vectors(kb_server: KbServer) -> None:
    texts = ["drain a node", "a quota of pods"]
    wanted = WordEmbedder().embed_passages(texts)
    with OpenAI(base_url=f"{kb_server.url}/v1", api_key="none") as client:
        got = client.embeddings.create(model="words", input=texts)  # asks for base64
        plain = client.embeddings.create(model="words", input=texts, encoding_format="float")
    assert [item.index for item in got.data] == [0, 1]
    np.testing.assert_array_equal(np.array([d.embedding for d in got.data], "f4"), wanted)
    np.testing.assert_array_equal(np.array([d.embedding for d in plain.data], "f4"), wanted)
    assert got.usage.prompt_tokens == got.usage.total_tokens > 0


def test_base64_is_little_endian_float32(kb_server: KbServer) -> None:
    body = {"input": "drain", "encoding_format": "base64"}
    reply = httpx.post(f"{kb_server.url}/v1/embeddings", json=body).json()
    raw = base64.b64decode(reply["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), WordEmbedder().embed_query("drain"))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"input": []}, "'input' must be a string or a list of strings"),
        ({"input": [1, 2]}, "not token ids"),
        ({"input": ["a", ""]}, "'input.1' is empty"),
        ({"dimensions": 8}, "'dimensions' is not supported other than 64, got 8"),
        ({"encoding_format": "int8"}, "'encoding_format' must be 'float' or 'base64'"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    kb_server: KbServer, fault: dict[str, Any], says: str
) -> None:
    reply = httpx.post(f"{kb_server.url}/v1/embeddings", json={"input": "a", **fault})
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


def test_another_model_is_a_404(kb_server: KbServer) -> None:
    with (
        OpenAI(base_url=f"{kb_server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="this server has 'words'"),
    ):
        client.embeddings.create(model="text-embedding-3-small", input="a")
