"""Chunk KV of a case, computed on the spot behind one encoding context.

    FixedContext        preamble ‖ nothing, or filler ‖ chunk
    NeighbourContext    preamble ‖ filler ‖ nearest ‖ … ‖ farthest ‖ chunk

Equal to what ingest stores, but for the rounding of its codec. Calibration takes chunk KV through
the `Encoding` protocol, so that a caller may bring another source (stored KV with its codec's
rounding, for example). All of it runs on one thread, the one that owns the decoder.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvweave.calibrate.case import Case
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix, passes
from kvweave.fuse.encode.contexts import neighbour_prefix, parse_variant, variant_name
from kvweave.fuse.encode.extras import compute_extras, extra_name
from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.fuse.sources import ComputedChunks
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey

KVZIP = extra_name("kvzip")

TokenIds = tuple[int, ...]
# Token ids of chunks to those of each one's neighbours, nearest first. May be none.
Nearest = Callable[[Sequence[TokenIds]], Sequence[Sequence[TokenIds]]]


class Encoding(Protocol):
    """Where the chunk KV of a case comes from."""

    @property
    def name(self) -> str:
        """The encoding context as tables name it, "filler:4" for example."""
        ...

    def prepare(self, case: Case, extras: Sequence[str]) -> ComputedChunks:
        """KV of all chunks in prompt order, with `extras` beside it.

        The first chunk's must be exact, computed right behind the preamble, unless the case has a
        history.
        """
        ...


class ContextPrefixes:
    """KV of what stands in front of chunks, computed once each."""

    def __init__(self, decoder: FusionDecoder) -> None:
        self._decoder = decoder
        self._known: dict[tuple[int, ...], Prefix] = {}

    def prefix_for(self, token_ids: Sequence[int]) -> Prefix:
        """Return the KV of these tokens, computed on first use."""
        ids = tuple(token_ids)
        if ids not in self._known:
            self._known[ids] = encode_prefix(self._decoder, ids)
        return self._known[ids]


class FixedContext:
    """One fixed text in front of every chunk but the first: nothing (isolated), or filler.

    The first chunk stands right behind the preamble and is encoded there, unless there is a
    history between them.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        prefixes: ContextPrefixes,
        name: str,
        context_ids: Sequence[int],
        repeat_ids: Sequence[int],
    ) -> None:
        """`repeat_ids` ask for a repetition of the chunk, for KVzip anchors; see extras.py."""
        self.name = name
        self._decoder = decoder
        self._prefixes = prefixes
        self.context = variant_name(parse_variant(name), context_ids)
        self._context = tuple(context_ids)
        self._repeat = tuple(repeat_ids)

    def prepare(self, case: Case, extras: Sequence[str]) -> ComputedChunks:
        num_first = 0 if case.history else 1  # where isolated KV is what full prefill computes
        first, rest = case.keys[:num_first], case.keys[num_first:]
        made: list[list[LayerKV]] = []
        beside: dict[str, dict[ChunkKey, bytes]] = {name: {} for name in extras}
        for keys, context in ((first, ()), (rest, self._context)):
            prefix = self._prefixes.prefix_for((*case.preamble, *context))
            chunks = case.chunks[len(made) : len(made) + len(keys)]
            for run in passes([len(chunk) for chunk in chunks]):
                batch = [chunks[i] for i in run]
                layers = encode_chunks(self._decoder, prefix, batch)
                found = compute_extras(self._decoder, extras, prefix, batch, layers, self._repeat)
                for i, each in zip(run, found, strict=True):
                    for name, blob in each.items():
                        beside[name][keys[i]] = blob
                made += layers
        return ComputedChunks(made, beside)


class NeighbourContext:
    """Chunk KV behind every chunk's own neighbours; the first chunk, and one that has none,
    isolated.

    The first stands right behind the preamble, where its isolated KV is exact; behind a history it
    is like the others.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        prefixes: ContextPrefixes,
        name: str,
        filler_ids: Sequence[int],
        repeat_ids: Sequence[int],
        nearest: Nearest,
    ) -> None:
        """`filler_ids` stand between preamble and neighbours; `repeat_ids` as in FixedContext.
        `nearest` is called once for a case, from `prepare`."""
        self.name = name
        self.context = variant_name(parse_variant(name), filler_ids)
        self._decoder = decoder
        self._prefixes = prefixes
        self._filler = tuple(filler_ids)
        self._repeat = tuple(repeat_ids)
        self._nearest = nearest

    def prepare(self, case: Case, extras: Sequence[str]) -> ComputedChunks:
        num_first = 0 if case.history else 1
        near = self._nearest(case.chunks[num_first:])
        behind: list[Sequence[TokenIds]] = [*[()] * num_first, *near]
        front = self._prefixes.prefix_for((*case.preamble, *self._filler))
        brought = self._brought(front, behind)
        # what is held at a time: each chunk has a stitched copy of all that stands in front of it
        lengths = [
            len(front.token_ids) + sum(map(len, others)) + len(chunk)
            for chunk, others in zip(case.chunks, behind, strict=True)
        ]
        made: list[list[LayerKV]] = []
        beside: dict[str, dict[ChunkKey, bytes]] = {name: {} for name in extras}
        for run in passes(lengths):
            prefixes = [
                neighbour_prefix(self._decoder, front, [(ids, brought[ids]) for ids in behind[i]])
                if behind[i]
                else self._prefixes.prefix_for(case.preamble)
                for i in run
            ]
            layers = encode_chunks(self._decoder, prefixes, [case.chunks[i] for i in run])
            for i, prefix, kv in zip(run, prefixes, layers, strict=True):
                chunk = case.chunks[i]
                (found,) = compute_extras(
                    self._decoder, extras, prefix, [chunk], [kv], self._repeat
                )
                for name, blob in found.items():
                    beside[name][case.keys[i]] = blob
            made += layers
        return ComputedChunks(made, beside)

    def _brought(
        self, front: Prefix, behind: Sequence[Sequence[TokenIds]]
    ) -> dict[TokenIds, list[LayerKV]]:
        """Return the KV of every neighbour right behind the filler: a chunk's never depends on
        chunks that it does not name. Each is computed once, as the chunks of a prompt resemble each
        other and share them."""
        unique = list(dict.fromkeys(ids for others in behind for ids in others))
        made: list[list[LayerKV]] = []
        for run in passes([len(ids) for ids in unique]):
            made += encode_chunks(self._decoder, front, [unique[i] for i in run])
        return dict(zip(unique, made, strict=True))
