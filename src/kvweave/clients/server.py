"""A client of a running server, on the standard library alone.

    client = ServerClient("http://127.0.0.1:8321")
    client.upload_text("notes", "Zorbs", "A zorb is 14 cm wide.")
    reply = client.chat([{"role": "user", "content": "How wide is a zorb?"}], kb="notes")
    print(reply["choices"][0]["message"]["content"], reply["sources"])

Chats alone need no client of ours: any of OpenAI's does.
"""

import http.client
import json
import os
import secrets
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from kvweave.errors import ConfigError, KVWeaveError

URL_VARIABLE, KEY_VARIABLE = "KVWEAVE_URL", "KVWEAVE_API_KEY"
DATA, DONE = b"data:", b"[DONE]"
EVENTS = "text/event-stream"

Reply = dict[str, Any]
Message = Mapping[str, str]


class ServerFailed(KVWeaveError):
    """A server did not answer, or answered with an error; the line is its own where it has one."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; None: there was no reply
        self.code = code  # for programs, where the server gives one


class ServerClient:
    """One server. Any thread: every call has a connection of its own. Raises ServerFailed."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 600.0) -> None:
        """`url` with or without /v1. `api_key` None is that of KVWEAVE_API_KEY, if that is set.
        `timeout_s`: for a connection, and between two pieces of a reply."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server; write http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._parts = urlsplit(self.url)
        self._timeout_s = timeout_s
        key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    # ── answers ──────────────────────────────────────────────────────────────

    def models(self) -> list[Reply]:
        return list(self._json("GET", "/v1/models")["data"])

    def chat(self, messages: Sequence[Message], **fields: Any) -> Reply:
        """A whole reply; `fields` as POST /v1/chat/completions has them, and `kb` and the like."""
        return self._json("POST", "/v1/chat/completions", {"messages": list(messages), **fields})

    def chat_events(self, messages: Sequence[Message], **fields: Any) -> Iterator[Reply]:
        """A reply as events while it is made; `fields` are those of `chat`."""
        body = {"messages": list(messages), "stream": True, **fields}
        yield from self._events("POST", "/v1/chat/completions", json.dumps(body).encode())

    def answers(self) -> list[Reply]:
        """The last answers that the server keeps, newest first."""
        return list(self._json("GET", "/v1/answers")["answers"])

    def answer(self, answer_id: str) -> Reply:
        """All that is known of one, by the id of its chat completion."""
        return self._json("GET", f"/v1/answers/{quote(answer_id, safe='')}")

    # ── knowledge bases ──────────────────────────────────────────────────────

    def kbs(self) -> list[Reply]:
        """All knowledge bases, page by page."""
        return self._pages("/v1/kb")

    def kb(self, name: str) -> Reply:
        return self._json("GET", _kb(name))

    def delete_kb(self, name: str) -> Reply:
        return self._json("DELETE", _kb(name))

    def prepare_kb(self, name: str) -> Reply:
        """Have the chunk KV that it lacks made now, beside answers."""
        return self._json("POST", _kb(name, "prepare"))

    def documents(self, kb: str) -> list[Reply]:
        return self._pages(_kb(kb, "documents"))

    def document(self, kb: str, document_id: str) -> Reply:
        """One document with the lines of its chunks."""
        return self._json("GET", _kb(kb, "documents", document_id))

    def chunk(self, kb: str, chunk_id: str) -> Reply:
        return self._json("GET", _kb(kb, "chunks", chunk_id))

    def delete_document(self, kb: str, document_id: str) -> Reply:
        return self._json("DELETE", _kb(kb, "documents", document_id))

    def search(self, kb: str, query: str, k: int = 5, **fields: Any) -> list[Reply]:
        """The nearest chunks; `fields` are `retrieval`, `min_score` and `filter`."""
        body = {"query": query, "k": k, **fields}
        return list(self._json("POST", _kb(kb, "search"), body)["data"])

    def upload_text(
        self,
        kb: str,
        title: str,
        text: str,
        *,
        key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_for_kv: bool = False,
    ) -> Reply:
        """Bring a text in; the same `key` later means an update."""
        body = {"title": title, "text": text, "key": key, "metadata": dict(metadata or {})}
        path = _kb(kb, "documents") + _query(wait_for_kv=wait_for_kv)
        return self._json("POST", path, body)

    def upload_file(
        self,
        kb: str,
        name: str,
        data: bytes,
        *,
        metadata: Mapping[str, Any] | None = None,
        wait_for_kv: bool = False,
    ) -> Reply:
        """Bring a file in: `name` is shown and chooses the parser."""
        path = _kb(kb, "documents") + _query(
            wait_for_kv=wait_for_kv, metadata=json.dumps(dict(metadata)) if metadata else None
        )
        boundary = secrets.token_hex(16)
        shown = Path(name).name.replace('"', "%22").replace("\r", " ").replace("\n", " ")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{shown}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
        kind = f"multipart/form-data; boundary={boundary}"
        with self._reply("POST", path, body, {"Content-Type": kind}) as reply:
            return _object(reply.read(), self.url)

    def jobs(self, kb: str) -> list[Reply]:
        """Uploads that are taken in behind their reply, newest first."""
        return list(self._json("GET", _kb(kb, "jobs"))["data"])

    def begin_text(self, kb: str, title: str, text: str, **fields: Any) -> Reply:
        """Upload a text and return at once: a job takes it in, to be looked at with `job`."""
        return self._json("POST", _kb(kb, "jobs"), {"title": title, "text": text, **fields})

    def job(self, kb: str, job_id: str) -> Reply:
        return self._json("GET", _kb(kb, "jobs", job_id))

    def cancel_job(self, kb: str, job_id: str) -> Reply:
        return self._json("DELETE", _kb(kb, "jobs", job_id))

    # ── how ──────────────────────────────────────────────────────────────────

    def _pages(self, path: str) -> list[Reply]:
        found: list[Reply] = []
        after: str | None = None
        while True:
            page = self._json("GET", path + _query(after=after, limit=PAGE))
            found += page["data"]
            after = page.get("next")
            if after is None:
                return found

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        sent = None if body is None else json.dumps(body).encode()
        with self._reply(method, path, sent) as reply:
            return _object(reply.read(), self.url)

    def _events(self, method: str, path: str, body: bytes) -> Iterator[Reply]:
        with self._reply(method, path, body, {"Accept": EVENTS}) as reply:
            for line in reply:
                if not line.startswith(DATA):
                    continue  # comments and blank lines
                data = line[len(DATA) :].strip()
                if data == DONE:
                    return
                event = _object(data, self.url)
                if "error" in event:
                    raise _failure_of(event, None, self.url)
                yield event
        raise ServerFailed(f"{self.url} broke off in the middle of an answer; ask again")

    @contextmanager
    def _reply(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """A reply that went well, until the end of the block."""
        connection = self._connection()
        sent = {"Content-Type": "application/json", **self._headers, **(headers or {})}
        try:
            try:
                connection.request(method, self._parts.path + path, body, sent)
                reply = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "strerror", None) or error
                raise ServerFailed(
                    f"{self.url} does not answer: {reason}; is it running?"
                ) from error
            # one that is not read to its end keeps the socket, whatever becomes of the connection
            with reply:
                if reply.status not in (200, 202):
                    raise _failure_of(_object(reply.read(), self.url), reply.status, self.url)
                try:
                    yield reply
                except (OSError, http.client.HTTPException) as error:
                    raise ServerFailed(f"{self.url} broke off: {error}; ask again") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)


PAGE = 200  # of a list at a time


def _kb(*parts: str) -> str:
    return "/v1/kb/" + "/".join(quote(part, safe="") for part in parts)


def _query(**values: str | int | bool | None) -> str:
    given = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None and value is not False
    }
    return f"?{urlencode(given)}" if given else ""


def _object(data: bytes, url: str) -> Reply:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerFailed(f"{url} sent what is no JSON object; is it a kvweave server?")
    return found


def _failure_of(reply: Reply, status: int | None, url: str) -> ServerFailed:
    error = reply.get("error")
    if not isinstance(error, dict):
        return ServerFailed(f"{url} answered with status {status}", status)
    return ServerFailed(str(error.get("message")), status, error.get("code"))
