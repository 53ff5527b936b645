"""A vector server as if it were far larger: bench/speculation/slow_search.py asks it.

It speaks Qdrant's REST API as far as kvweave does. Collections are qdrant-client's own, in memory;
a query walks a real HNSW graph with the effort that it asks for. What is made up is the time: an
answer is held until `--search-ms` after its query came where the walk compared as many vectors as a
full walk does on average, and in proportion where it compared fewer or more. So a walk of a quarter
of the effort comes as much earlier as it is shorter. `--wire-ms` comes on top of each, there and
back. Held answers use no processor, as beside a server elsewhere.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import faiss
import numpy as np
from pydantic import BaseModel
from qdrant_client import QdrantClient, models

from kvweave.corpus.index.base import SEARCH_EFFORT, IndexHits, Vector
from kvweave.corpus.index.hnsw import HnswIndex

SAMPLED = 64  # vectors that tell what a full walk compares
Body = Mapping[str, Any]


class Collections:
    """What is stored, and a graph over it. Any thread."""

    def __init__(self) -> None:
        self._client = QdrantClient(":memory:", force_disable_check_same_thread=True)
        self._lock = threading.Lock()
        self._graphs: dict[str, tuple[HnswIndex, float]] = {}  # and what a full walk compares

    def reply(self, method: str, name: str, what: str, body: Body) -> Any:
        """What a request is told."""
        client = self._client
        with self._lock:
            match method, what:
                case "GET", "exists":
                    return {"exists": client.collection_exists(name)}
                case "GET", "":
                    return client.get_collection(name)
                case "PUT", "":
                    config = models.VectorParams.model_validate(body["vectors"])
                    return client.create_collection(name, config)
                case "POST", "points/count":
                    return client.count(name, exact=True)
                case "POST", "points/scroll":
                    points, after = client.scroll(
                        name,
                        limit=body["limit"],
                        offset=body.get("offset"),
                        with_payload=bool(body.get("with_payload")),
                    )
                    return {"points": points, "next_page_offset": after}
                case "PUT", "points":
                    self._graphs.pop(name, None)
                    batch = models.Batch.model_validate(body["batch"])
                    return client.upsert(name, batch)
                case "POST", "points/delete":
                    self._graphs.pop(name, None)
                    return client.delete(name, models.PointIdsList(points=body["points"]))
        raise ValueError(f"{method} {what} is not spoken here")

    def build(self) -> None:
        """Make the graphs that are missing: no query should wait for that."""
        with self._lock:
            for each in self._client.get_collections().collections:
                if each.name not in self._graphs:
                    self._build(each.name)

    def walk(self, name: str, body: Body) -> tuple[IndexHits, float]:
        """Hits, and what finding them compared over what a full walk compares."""
        effort = (body.get("params") or {}).get("hnsw_ef") or SEARCH_EFFORT
        with self._lock:
            graph, full = self._graphs.get(name) or self._build(name)
            vector = np.array(body["query"]["nearest"], np.float32)
            hits, compared = self._compared(graph, vector, body["limit"], effort)
            return hits, compared / full

    def _build(self, name: str) -> tuple[HnswIndex, float]:
        points, _ = self._client.scroll(name, limit=1 << 30, with_payload=False, with_vectors=True)
        points.sort(key=lambda point: int(point.id))
        ids = np.array([int(point.id) for point in points], np.int64)
        vectors = np.array([point.vector for point in points], np.float32)
        graph = HnswIndex(vectors.shape[1])
        graph.add(ids, vectors)
        walks = [
            self._compared(graph, vector, 10, SEARCH_EFFORT)[1] for vector in vectors[:SAMPLED]
        ]
        self._graphs[name] = graph, max(1.0, float(np.mean(walks)))
        return self._graphs[name]

    @staticmethod
    def _compared(graph: HnswIndex, vector: Vector, k: int, effort: int) -> tuple[IndexHits, int]:
        faiss.cvar.hnsw_stats.reset()
        hits = graph._walk(vector.reshape(1, -1), k, effort)
        return hits, int(faiss.cvar.hnsw_stats.ndis)


class VectorServer(ThreadingHTTPServer):
    """`search_ms` may change while it runs: `PUT /search_ms` with a number, behind all vectors."""

    daemon_threads = True

    def __init__(self, port: int, search_ms: float, wire_ms: float) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.collections = Collections()
        self.search_ms = search_ms
        self.wire_ms = wire_ms


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _answer(self) -> None:
        came_s = time.perf_counter()
        server = self.server
        assert isinstance(server, VectorServer), "made by it"
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        parts = self.path.partition("?")[0].strip("/").split("/", 2)
        if parts[0] == "search_ms":
            server.search_ms, told = float(body), True
            server.collections.build()
        elif parts[2:] == ["points/query"]:
            hits, share = server.collections.walk(parts[1], body)
            pairs = zip(hits.ids.tolist(), hits.scores.tolist(), strict=True)
            told = {"points": [{"id": i, "version": 0, "score": s} for i, s in pairs]}
            held_s = (server.wire_ms + server.search_ms * share) / 1e3
            time.sleep(max(0.0, came_s + held_s - time.perf_counter()))
        else:
            what = parts[2] if len(parts) > 2 else ""
            told = server.collections.reply(self.command, parts[1], what, body)
        self._send({"result": told, "status": "ok", "time": time.perf_counter() - came_s})

    do_GET = do_PUT = do_POST = _answer

    def _send(self, told: Mapping[str, Any]) -> None:
        text = json.dumps(told, default=_plain).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """A line per request is of no use."""


def _plain(thing: object) -> Any:
    assert isinstance(thing, BaseModel), f"{thing!r} is no part of an answer"
    return thing.model_dump(mode="json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--search-ms", type=float, default=100.0)
    parser.add_argument("--wire-ms", type=float, default=0.0)
    args = parser.parse_args()
    VectorServer(args.port, args.search_ms, args.wire_ms).serve_forever()


if __name__ == "__main__":
    main()
