"""Writes the first inputs of every fuzz job into corpora/: python tests/fuzz/make_corpora.py

All of them are made here, small, and take a job through its ordinary ways. Inputs that once broke
something are added by hand under a name that says what they did; this script leaves them alone.
"""

import io
import json
import struct
import sys
import zipfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # tests/ instead of this folder

import torch
from safetensors.torch import save

from fuzz.jobs import CORPORA, TENSORS
from kvweave.kv.format.objects import pack_chunk
from worlds.kv import make_key, make_layers
from worlds.tiny_models import CHAT_TEMPLATE


def codec() -> dict[str, bytes]:
    layers = make_layers(7, num_layers=2)
    extras = {"chunk": b"0123456789abcdef", "behind": b"aa\nbb"}
    return {
        name: bytes(pack_chunk(make_key(7), layers, name, extras).view)
        for name in ("raw", "int8", "int4", "fp8")
    }


def gguf() -> dict[str, bytes]:
    """A table with every kind of value, one plain and one packed tensor."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words.encode())) + words.encode()

    def pair(name: str, kind: int, value: bytes) -> bytes:
        return text(name) + struct.pack("<I", kind) + value

    def texts(*words: str) -> bytes:
        return struct.pack("<IQ", 8, len(words)) + b"".join(map(text, words))

    def number(value: int) -> bytes:
        return struct.pack("<I", value)

    pairs = [
        pair("general.architecture", 8, text("llama")),
        *(
            pair(f"llama.{name}", 4, number(value))
            for name, value in {
                "block_count": 1,
                "context_length": 64,
                "embedding_length": 32,
                "feed_forward_length": 32,
                "attention.head_count": 2,
                "attention.head_count_kv": 1,
                "vocab_size": 6,
            }.items()
        ),
        pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        pair("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        pair("tokenizer.ggml.model", 8, text("gpt2")),
        pair("tokenizer.ggml.pre", 8, text("gpt-2")),
        pair("tokenizer.ggml.tokens", 9, texts("a", "b", "c", "ab", "abc", "<|end|>")),
        pair("tokenizer.ggml.merges", 9, texts("a b", "ab c")),
        pair("tokenizer.ggml.token_type", 9, struct.pack("<IQ6i", 5, 6, 1, 1, 1, 1, 1, 3)),
        pair("tokenizer.ggml.eos_token_id", 4, number(5)),
        pair("some.flag", 7, b"\1"),
        pair("some.long", 10, struct.pack("<Q", 1 << 40)),
    ]
    tensors = [
        text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 6, 0, 0),
        text("output_norm.weight") + struct.pack("<IQIQ", 1, 32, 0, 32 * 6 * 4),
        text("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 32, 32, 8, 32 * 7 * 4),  # Q8_0
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    table = head + b"".join(pairs) + b"".join(tensors)
    table += bytes(-len(table) % 32)
    data = struct.pack("<224f", *range(224)) + bytes(range(34)) * 32
    return {"whole": table + data, "table": table}


def safetensors() -> dict[str, bytes]:
    return {
        dtype: save({name: torch.ones(shape).to(getattr(torch, dtype)) for name, shape in
                     TENSORS.items()})
        for dtype in ("float32", "float16", "bfloat16")
    }  # fmt: skip


def chunker() -> dict[str, bytes]:
    prose = "A quota limits the pods of a namespace. Without one, it may take a cluster.\n\n"
    return {
        "prose": b"\x10Quotas\n" + prose.encode() * 6,
        "headings": b"\x00Notes\n" + b"# One\n\ntext.\n\n## Two\n\nmore text here.\n" * 8,
        "one word": b"\x05\n" + b"x" * 900,
        "blank": b"\x40Title\n \n\t\n   \n",
        "other scripts": b"\x08\n" + "東京。日本語の文。 Größe, naïve 👩‍🚀.\n".encode() * 12,
        "code": b"\x20f\n```\n" + b"def f(x):\n    return x\n" * 20 + b"```\n",
    }


def parsers() -> dict[str, bytes]:
    def zipped(files: dict[str, str]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(zipfile.ZipInfo(name), text)
        return out.getvalue()

    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    package = "http://schemas.openxmlformats.org/package/2006"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    main_type = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    document = (
        f'<w:document xmlns:w="{word}"><w:body><w:p><w:r><w:t>Drain a node</w:t></w:r></w:p>'
        "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>cell</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
        "</w:body></w:document>"
    )
    docx = zipped(
        {
            "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default '
            'Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships'
            f'+xml"/><Override PartName="/word/document.xml" ContentType="{main_type}"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
            f'Type="{office}/officeDocument" Target="word/document.xml"/></Relationships>',
            "word/document.xml": document,
        }
    )
    stream = b"BT /F1 12 Tf 20 100 Td (Drain a node) Tj ET"
    pdf = (
        b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
        b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
        b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R/Resources<</Font"
        b"<</F1 5 0 R>>>>>>endobj\n4 0 obj<</Length "
        + str(len(stream)).encode()
        + b">>stream\n"
        + stream
        + b"\nendstream endobj\n5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj\n"
        b"trailer<</Root 1 0 R/Size 6>>\n%%EOF\n"
    )
    return {
        "markdown": b"a.md\n# Title\n\nText with *marks*.\n\n- one\n- two\n",
        "text": "a.txt\nTitle\n\nGröße.\n".encode(),
        "html": b"a.html\n<html><head><title>T</title></head><body><h1>Hi</h1><p>Text &amp; more"
        b"<table><tr><td>1<td>2</table></body></html>",
        "csv": b'a.csv\ntitle,text\nOne,first\nTwo,"second, with comma"\n',
        "tsv": b"a.tsv\nid\ttext\n1\tfirst\n2\tsecond\n",
        "jsonl": b'a.jsonl\n{"title": "One", "text": "first"}\n{"text": "second", "id": 7}\n',
        "pdf": b"a.pdf\n" + pdf,
        "docx": b"a.docx\n" + docx,
    }


def http() -> dict[str, bytes]:
    hello = [{"role": "user", "content": "Hello"}]
    chat = {"messages": hello, "max_tokens": 2, "temperature": 0}
    kb = "/v1/kb/notes"

    def asked(line: str, body: object) -> bytes:
        return f"{line} application/json\n{json.dumps(body)}".encode()

    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.md"\r\n\r\n# T\n\ntext'
        b"\r\n--x--\r\n"
    )
    return {
        "chat": asked("POST /v1/chat/completions", chat),
        "chat with kb": asked("POST /v1/chat/completions", {**chat, "kb": "notes", "k": 2}),
        "chat with documents": asked(
            "POST /v1/chat/completions",
            {**chat, "documents": [{"title": "T", "text": "t"}], "reuse": {"strategy": "weave"}},
        ),
        "completion": asked("POST /v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
        "embeddings": asked("POST /v1/embeddings", {"input": ["a"]}),
        "upload": asked(f"POST {kb}/documents", {"title": "T", "text": "drain a node", "key": "1"}),
        "form": f"POST {kb}/documents multipart/form-data;boundary=x\n".encode() + form,
        "search": asked(f"POST {kb}/search", {"query": "drain", "k": 2, "mode": "hybrid"}),
        "list": f"GET {kb}/documents?limit=2 -\n".encode(),
        "delete": f"DELETE {kb}/documents/0123 -\n".encode(),
        "conversation": asked(
            "PUT /v1/conversations/abc", {"title": "T", "messages": hello, "updated": 1.0}
        ),
    }


def template() -> dict[str, bytes]:
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    both = {"template": CHAT_TEMPLATE, "messages": talk}
    counting = "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}"
    return {
        "chatml": json.dumps(both).encode(),
        "plain": CHAT_TEMPLATE.encode(),
        "counting": (counting + "{{ n.i }}{{ m.content|trim }}{% endfor %}").encode(),
        "macro": b"{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) }}",
        "refusing": b"{{ raise_exception('no') }}",
    }


def main() -> None:
    for make in (codec, gguf, safetensors, chunker, parsers, http, template):
        folder = CORPORA / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in make().items():
            (folder / name.replace(" ", "-")).write_bytes(data)


if __name__ == "__main__":
    main()
