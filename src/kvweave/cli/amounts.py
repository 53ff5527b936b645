"""Bytes, times and progress in words, rounded as people say them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvweave.app.library.kv_progress import KVProgress


def size_text(num_bytes: float) -> str:
    """412 MB, 1.3 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            amount = num_bytes / scale
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"
    return f"{num_bytes / 1e3:,.0f} kB"


def time_text(seconds: float) -> str:
    """40 s, 3 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def progress_text(progress: "KVProgress") -> str:
    """KV 120 of 170 chunks, 412 MB, about 3 min left."""
    parts = [f"KV {progress.chunks_done:,} of {progress.chunks_total:,} chunks"]
    if progress.num_bytes:
        parts.append(size_text(progress.num_bytes))
    if progress.chunks_in_front:
        parts.append(f"{progress.chunks_in_front:,} also for the first place in a prompt")
    if progress.eta_s is not None:
        parts.append(f"about {time_text(progress.eta_s)} left")
    if progress.state in ("full", "failed"):
        parts.append(f"{progress.state}: {progress.why}" if progress.why else progress.state)
    return ", ".join(parts)
