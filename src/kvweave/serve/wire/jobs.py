"""Ingests that nobody waits for: replies."""

from typing import Literal

from kvweave.serve.uploads.job_board import UploadJob
from kvweave.serve.wire.base import Outgoing
from kvweave.serve.wire.kb import IngestOut, ProgressOut, progress_out, report_out


class JobOut(Outgoing):
    """How far a job is."""

    id: str
    object: Literal["ingest.job"] = "ingest.job"
    kb: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    created: float  # seconds since 1970
    ended: float | None  # null: it is not over
    progress: ProgressOut | None  # null: it has not begun
    report: IngestOut | None  # the outcome, once it is done
    error: str | None  # why it failed


class JobList(Outgoing):
    object: Literal["list"] = "list"
    data: list[JobOut]  # newest first


def job_out(job: UploadJob) -> JobOut:
    progress, report = job.progress, job.report
    return JobOut(
        id=job.id,
        kb=job.kb,
        state=job.state,
        created=round(job.created, 3),
        ended=None if job.ended is None else round(job.ended, 3),
        progress=None if progress is None else progress_out(progress),
        report=None if report is None else report_out(report),
        error=job.error,
    )
