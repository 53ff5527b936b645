"""The write side: documents → chunks → vectors, and chunk KV through an encoder from outside."""

from kvweave.ingest.encoder import Encoder
from kvweave.ingest.pipeline import IngestOptions, ingest
from kvweave.ingest.report import IngestProgress, IngestReport, Skipped

__all__ = ["Encoder", "IngestOptions", "IngestProgress", "IngestReport", "Skipped", "ingest"]
