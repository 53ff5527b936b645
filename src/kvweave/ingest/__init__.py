"""The write side: documents → chunks → vectors, and chunk KV through an encoder from outside."""

from kvweave.ingest.pipeline import Encoder, ingest
from kvweave.ingest.report import IngestProgress, IngestReport, Skipped
from kvweave.ingest.sources import IngestOptions

__all__ = ["Encoder", "IngestOptions", "IngestProgress", "IngestReport", "Skipped", "ingest"]
