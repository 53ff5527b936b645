"""What is fuzzed: each job hands bytes to one part of the product as a stranger could.

A job is opened once and called with one input after the other. It returns for input that was taken
or refused in order, and raises for whatever else happens: a foreign exception, a broken promise. An
input that computes longer than `MOST_S` is a failure as well. `corpora/NAME/` has its first inputs.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from unittest.mock import patch

import torch

from kvweave.corpus.chunker import Chunker
from kvweave.corpus.parsers import ENDINGS, ParseLimits
from kvweave.corpus.parsers.parser_process import parse_in_child
from kvweave.errors import CorpusError, KVWeaveError, TierError
from kvweave.kv.format.header import PRELUDE_BYTES, header_checksum
from kvweave.kv.format.memory import new_memory
from kvweave.kv.format.objects import layer_of, verify_object
from kvweave.model.files.gguf.config import read_config
from kvweave.model.files.gguf.file import GGUFFile
from kvweave.model.files.gguf.tokenizer import read_tokenizer
from kvweave.model.files.tensor_files import TensorFiles
from kvweave.text.tokenizer import Tokenizer
from worlds.kv import make_key
from worlds.tiny_models import make_tokenizer_files

CORPORA = Path(__file__).with_name("corpora")
MOST_S = 10.0  # of computing for one input
KEY = make_key(7)  # that all objects of the codec job are stored under
TENSORS = {"norm.weight": (8,), "up.weight": (4, 8)}  # of the weight files in the corpus
Feed = Callable[[bytes], None]


class BrokenPromise(AssertionError):
    """Input was taken or answered in a way that is wrong."""


class Bytes:
    """A reader over an object in memory, as a tier gives one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read(self, offset: int, out: memoryview) -> None:
        part = self._data[offset : offset + len(out)]
        if len(part) != len(out):
            from kvweave.errors import TierCorrupt

            raise TierCorrupt("the object ends")
        out[:] = part

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def codec_job() -> Iterator[Feed]:
    """A stored chunk. One that was changed is refused; with a header whose checksum was made right
    it may be taken, and then all of it can be decoded."""
    known = {blake2b(data).digest() for data in corpus_of("codec")}

    def feed(data: bytes) -> None:
        try:
            verify_object(Bytes(data), KEY)
        except TierError:
            pass
        else:
            if blake2b(data).digest() not in known:
                raise BrokenPromise("a changed object was taken")
        sealed = bytearray(data)
        if len(sealed) >= PRELUDE_BYTES:  # the corpus has headers of that size
            sealed[PRELUDE_BYTES - 8 : PRELUDE_BYTES] = header_checksum(sealed[: PRELUDE_BYTES - 8])
        try:
            header = verify_object(Bytes(bytes(sealed)), KEY)
        except TierError:
            return
        memory = new_memory(len(sealed), pinned=False)
        memory.view[: len(sealed)] = sealed
        for layer in range(len(header.layers)):
            decoded = layer_of(header, memory, layer).decode()
            if decoded.k.shape != decoded.v.shape:
                raise BrokenPromise("keys and values of two shapes")

    yield feed


@contextmanager
def gguf_job() -> Iterator[Feed]:
    """A model file: its table, the first rows of each tensor, its settings and its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"

        def feed(data: bytes) -> None:
            path.write_bytes(data)
            try:
                gguf = GGUFFile(path)
                for info in gguf.tensors.values():
                    gguf.rows(info, 0, min(2, info.num_rows))
                config = read_config(gguf)
                read_tokenizer(gguf, config["max_position_embeddings"])
            except KVWeaveError:
                return

        yield feed


@contextmanager
def safetensors_job() -> Iterator[Feed]:
    """A weight file: its table, and the tensors that the corpus has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"

        def feed(data: bytes) -> None:
            path.write_bytes(data)
            try:
                files = TensorFiles(Path(folder))
                files.fingerprint()
                for name, shape in TENSORS.items():
                    files.read_into(name, torch.empty(shape, dtype=torch.float32))
            except KVWeaveError:
                return

        yield feed


@contextmanager
def chunker_job() -> Iterator[Feed]:
    """A text: the first byte is the size of chunks, the first line the title."""
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer_files(Path(folder))
        tokenizer = Tokenizer(Path(folder))

        def feed(data: bytes) -> None:
            size = 32 + (data[0] if data else 0)
            title, _, text = data[1:].decode(errors="replace").partition("\n")
            try:
                placed = list(Chunker(tokenizer, size).cut(title, text))
            except CorpusError:
                return
            at = 0
            for chunk, start, end in placed:
                if text[at:start].strip() or end <= start:
                    raise BrokenPromise(f"text between {at} and {start} is in no chunk")
                if len(chunk.token_ids) > size:
                    raise BrokenPromise(f"a chunk of {len(chunk.token_ids)} tokens, not {size}")
                at = end
            if text[at:].strip():
                raise BrokenPromise(f"text behind {at} is in no chunk")

        yield feed


@contextmanager
def parsers_job() -> Iterator[Feed]:
    """A file: its first line is its name, which chooses the parser."""
    limits = ParseLimits(file_bytes=1 << 20, seconds=5.0)
    endings = sorted(ENDINGS)

    def feed(data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        ending = Path(name.decode(errors="replace").replace("\0", "")).suffix.lower()
        if ending not in ENDINGS:
            ending = endings[len(data) % len(endings)]
        try:
            records = parse_in_child(Path(f"file{ending}"), content, limits)
        except CorpusError:
            return
        for record in records:
            record.text.encode()  # no half of a character gets into the catalogue

    yield feed


@contextmanager
def http_job() -> Iterator[Feed]:
    """A request: the first line is method, path and content type, the rest the body. Never a 500,
    and a refusal says so in the usual shape."""
    import httpx

    from kvweave.model.load import load_decoder
    from kvweave.serve.access.limits import Limits
    from worlds.serving import make_libraries, serving
    from worlds.tiny_models import make_chat_model_folder
    from worlds.weaves import plain_weave

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_chat_model_folder(Path(folder) / "model")
        weave = plain_weave(load_decoder(model, device="cpu"), Tokenizer(model))
        stack.callback(weave.close)
        libraries = make_libraries(weave, Path(folder) / "kbs")
        stack.callback(libraries.close)
        url = stack.enter_context(serving(weave, Limits(request_s=5.0), libraries=libraries))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=120))

        def feed(data: bytes) -> None:
            line, _, body = data.partition(b"\n")
            words = line.decode("latin-1").split()
            method = words[0] if words and words[0] in ("GET", "POST", "DELETE", "PUT") else "POST"
            path = words[1] if len(words) > 1 else "/v1/chat/completions"
            kind = words[2] if len(words) > 2 and words[2].isprintable() else "application/json"
            path = "/" + "".join(c for c in path if c.isascii() and c.isprintable()).lstrip("/")
            if path.startswith(("/v1/demo", "/v1/compare")):
                return  # minutes of work by design
            headers = {"Content-Type": kind.encode("ascii", "replace").decode()}
            try:
                reply = http.request(method, path, content=body, headers=headers)
            except (httpx.InvalidURL, httpx.LocalProtocolError):
                return  # the client refuses to send it
            if reply.status_code >= 500 and reply.status_code not in (503, 504):
                raise BrokenPromise(f"{method} {path}: {reply.status_code} {reply.text[:200]}")
            is_refused = reply.status_code >= 400 and reply.status_code not in (404, 405)
            if is_refused and path.startswith("/v1/") and "error" not in reply.json():
                raise BrokenPromise(f"{method} {path}: a refusal of another shape")

        yield feed


@contextmanager
def template_job() -> Iterator[Feed]:
    """A chat template with a conversation: JSON with `template` and `messages`, or a template."""
    with tempfile.TemporaryDirectory() as folder, patch("kvweave.text.tokenizer.RENDER_S", 1.0):
        place = Path(folder)
        make_tokenizer_files(place)
        config = json.loads((place / "tokenizer_config.json").read_text())
        hello = [{"role": "user", "content": "Hello"}]

        def feed(data: bytes) -> None:
            text = data.decode(errors="replace")
            template, messages = text, hello
            try:
                said = json.loads(text)
                template, messages = str(said["template"]), said["messages"]
            except (ValueError, KeyError, TypeError, RecursionError):
                pass
            is_talk = isinstance(messages, list) and all(
                isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages
            )
            changed = {**config, "chat_template": template}
            (place / "tokenizer_config.json").write_text(json.dumps(changed))
            try:
                tokenizer = Tokenizer(place)
                tokenizer.render_chat(messages if is_talk else hello)
                parts = tokenizer.render_parts(messages if is_talk else hello)
                tokenizer.encode_parts(parts)
            except KVWeaveError:
                return

        yield feed


JOBS: dict[str, Callable[[], AbstractContextManager[Feed]]] = {
    "codec": codec_job,
    "gguf": gguf_job,
    "safetensors": safetensors_job,
    "chunker": chunker_job,
    "parsers": parsers_job,
    "http": http_job,
    "template": template_job,
}


def corpus_of(job: str) -> list[bytes]:
    """What `corpora/` has for a job, by name."""
    return [path.read_bytes() for path in sorted((CORPORA / job).iterdir())]


def run_one(feed: Feed, data: bytes) -> str | None:
    """What was wrong with an input; None: nothing."""
    began_s = time.process_time()  # of this process: others may keep the machine busy
    try:
        feed(data)
    except Exception as error:  # whatever it is: that is what is looked for
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    took_s = time.process_time() - began_s
    return f"took {took_s:.1f} s" if took_s > MOST_S else None
