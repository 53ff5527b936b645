"""Uploads that are taken in behind the reply: begun, looked at, cancelled."""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvweave.app.libraries.libraries import IngestProgress, Libraries
from kvweave.serve.uploads.jobs import JobBoard
from worlds.serving import KbServer

TEXT = {"title": "Jobs", "text": "A job takes an upload in behind the reply."}


def until_over(url: str, name: str, job: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = httpx.get(f"{url}/v1/kb/{name}/jobs/{job['id']}", timeout=60).json()
        if seen["state"] in ("done", "failed", "cancelled"):
            return dict(seen)
        time.sleep(0.05)
    raise AssertionError(f"still {seen['state']}")


def begin(url: str, name: str, **how: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/kb/{name}/jobs", timeout=60, **how)
    assert reply.status_code == 202, reply.text
    return dict(reply.json())


def test_a_job_is_begun_looked_at_and_done(kb_server: KbServer) -> None:
    job = begin(kb_server.url, "jobbed", json={**TEXT, "metadata": {"by": "job"}})
    assert job["state"] in ("waiting", "running", "done")
    assert (job["kb"], job["object"]) == ("jobbed", "ingest.job")
    over = until_over(kb_server.url, "jobbed", job)
    assert (over["state"], over["error"]) == ("done", None)
    assert over["report"]["added"] == 1
    assert over["ended"] >= over["created"]
    (document,) = httpx.get(f"{kb_server.url}/v1/kb/jobbed/documents", timeout=60).json()["data"]
    assert document["metadata"] == {"by": "job"}
    files = {"file": ("more.md", b"More about jobs.")}
    second = begin(kb_server.url, "jobbed", files=files, params={"wait_for_kv": "true"})
    assert until_over(kb_server.url, "jobbed", second)["report"]["kv_chunks"] > 0
    listed = httpx.get(f"{kb_server.url}/v1/kb/jobbed/jobs", timeout=60).json()["data"]
    assert [each["id"] for each in listed] == [second["id"], job["id"]]


def test_a_bad_upload_is_refused_at_once_and_a_bad_file_fails_its_job(kb_server: KbServer) -> None:
    url = f"{kb_server.url}/v1/kb/jobbed/jobs"
    assert httpx.post(url, json={"text": ""}, timeout=60).status_code == 400
    assert httpx.post(url, content=b"x", timeout=60).status_code == 415
    job = begin(kb_server.url, "jobbed", files={"file": ("bad.pdf", b"no pdf at all")})
    over = until_over(kb_server.url, "jobbed", job)
    assert over["state"] == "done"
    assert over["report"]["skipped"][0]["source"].endswith("bad.pdf")
    missing = httpx.get(f"{url}/job-of-nobody", timeout=60)
    assert missing.status_code == 404
    assert httpx.get(f"{kb_server.url}/v1/kb/other/jobs/{job['id']}", timeout=60).status_code == 404


def test_a_job_is_cancelled_where_it_is(
    kb_server: KbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ingest is held where it tells of its progress; what waits behind it never begins."""
    reached, go_on = threading.Event(), threading.Event()
    plain = Libraries.ingest

    def held(self: Libraries, *args: Any, progress: Callable[..., None], **how: Any) -> Any:
        def told(news: IngestProgress) -> None:
            reached.set()
            assert go_on.wait(60)
            progress(news)

        return plain(self, *args, progress=told, **how)

    monkeypatch.setattr(Libraries, "ingest", held)
    url = f"{kb_server.url}/v1/kb/cancelled/jobs"
    first = begin(kb_server.url, "cancelled", json=TEXT)
    assert reached.wait(60)
    behind = begin(kb_server.url, "cancelled", json={**TEXT, "text": "Another."})
    assert httpx.get(f"{url}/{first['id']}", timeout=60).json()["state"] == "running"
    assert httpx.get(f"{url}/{behind['id']}", timeout=60).json()["state"] == "waiting"
    for job in (first, behind):
        assert httpx.delete(f"{url}/{job['id']}", timeout=60).status_code == 200
    go_on.set()
    for job in (first, behind):
        assert until_over(kb_server.url, "cancelled", job)["state"] == "cancelled"


def test_of_jobs_that_are_over_the_oldest_makes_way() -> None:
    board = JobBoard(kept=2)
    jobs = [board.add("", "kb") for _ in range(5)]
    assert len(board.all("", "kb")) == 5, "those that run stay"
    for job in jobs:
        job.drop()
    newest = board.add("", "kb")
    assert [j.id for j in board.all("", "kb")] == [newest.id, jobs[4].id, jobs[3].id]
    assert board.all("tenant", "kb") == []
    assert jobs[0].state == "failed"
