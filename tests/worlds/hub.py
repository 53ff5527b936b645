"""A model hub with one file, on this machine."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Where it listens, and how often its file was taken."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_downloads = 0


@contextmanager
def running_hub(path: str, data: bytes) -> Iterator[Hub]:
    """Serves `data` at `path` ("org/name/file")."""
    where = "{}/{}/resolve/main/{}".format(*path.split("/"))
    etag = hashlib.sha256(data).hexdigest()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._head()

        def do_GET(self) -> None:
            if self._head():
                hub.num_downloads += 1
                self.wfile.write(data)

        def _head(self) -> bool:
            is_here = self.path.strip("/") == where
            self.send_response(200 if is_here else 404)
            if is_here:
                self.send_header("ETag", f'"{etag}"')
                self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("Content-Length", str(len(data) if is_here else 0))
            self.end_headers()
            return is_here

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
