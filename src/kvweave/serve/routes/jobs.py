"""Uploads that are taken in behind the reply: begin, look, cancel."""

from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter, Request

from kvweave.serve.auth import tenant_of
from kvweave.serve.context import Context
from kvweave.serve.routes.kb import Upload, ingest_upload, read_metadata, receive_upload
from kvweave.serve.routes.parameters import Name
from kvweave.serve.uploads.job_board import JobBoard
from kvweave.serve.wire.jobs import JobList, JobOut, job_out
from kvweave.serve.wire.schema import KB_ERRORS, UPLOAD_BODY


def job_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1/kb", tags=["knowledge bases"], responses=KB_ERRORS)
    board = JobBoard()

    @routes.post("/{name}/jobs", status_code=202, openapi_extra=UPLOAD_BODY)
    async def begin_job(
        request: Request, name: str = Name, wait_for_kv: bool = False, metadata: str = "{}"
    ) -> JobOut:
        """Take an upload in behind this reply. `wait_for_kv`: the job ends when its chunk KV is
        there, too."""
        tenant, said = tenant_of(request.scope), read_metadata(metadata)
        with ExitStack() as held:
            admission, sources = await receive_upload(context, request, name, held)
            job = board.add(tenant, name)
            upload = Upload(tenant, name, sources, wait_for_kv, said)
            run = partial(job.run, partial(ingest_upload, context, upload))
            over = held.pop_all()  # from here on it goes when the work is over
            over.callback(job.drop)
            admission.begin(run, over.close, (tenant, name))
        return job_out(job)

    @routes.get("/{name}/jobs")
    async def list_jobs(request: Request, name: str = Name) -> JobList:
        jobs = board.all(tenant_of(request.scope), name)
        return JobList(data=[job_out(job) for job in jobs])

    @routes.get("/{name}/jobs/{job_id}")
    async def get_job(request: Request, job_id: str, name: str = Name) -> JobOut:
        return job_out(board.get(tenant_of(request.scope), name, job_id))

    @routes.delete("/{name}/jobs/{job_id}")
    async def cancel_job(request: Request, job_id: str, name: str = Name) -> JobOut:
        """End a job where it is; documents that are complete stay. Nothing to one that is over."""
        job = board.get(tenant_of(request.scope), name, job_id)
        job.cancel()
        return job_out(job)

    return routes
