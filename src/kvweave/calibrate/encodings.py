"""Chunk KV of a case, computed on the spot behind one encoding context.

Calibration and the layer profile take chunk KV through the `Encoding` protocol, so that whoever has
another source (neighbours from a knowledge base, stored KV with its codec's rounding) brings it.
One thread, the one that owns the decoder.
"""

from collections.abc import Sequence
from typing import Protocol

from kvweave.calibrate.case import Case
from kvweave.fuse.encode.anchors import (
    SHARE,
    choose_anchors,
    extra_name,
    kvzip_scores,
    pack_anchors,
)
from kvweave.fuse.encode.chunk_pass import Prefix, encode_chunks, encode_prefix, passes
from kvweave.fuse.encode.contexts import parse_variant, variant_name
from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.sources import ComputedChunks
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.keys import ChunkKey

KVZIP = extra_name("kvzip")


class Encoding(Protocol):
    """Where the chunk KV of a case comes from."""

    @property
    def name(self) -> str:
        """The encoding context as tables name it, "filler:4" for example."""
        ...

    def prepare(self, case: Case, extras: Sequence[str]) -> ComputedChunks:
        """KV of all chunks in prompt order, with `extras` beside it.

        The first chunk's must be exact: computed right behind the preamble.
        """
        ...


class ContextPrefixes:
    """KV of what stands in front of chunks, computed once each."""

    def __init__(self, decoder: FusionDecoder) -> None:
        self._decoder = decoder
        self._known: dict[tuple[int, ...], Prefix] = {}

    def of(self, token_ids: Sequence[int]) -> Prefix:
        ids = tuple(token_ids)
        if ids not in self._known:
            self._known[ids] = encode_prefix(self._decoder, ids)
        return self._known[ids]


class FixedContext:
    """The same text in front of every chunk but the first: nothing (isolated), or filler.

    The first chunk always stands right behind the preamble and is encoded there.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        prefixes: ContextPrefixes,
        name: str,
        context_ids: Sequence[int],
        repeat_ids: Sequence[int],
        *,
        anchor_share: float = SHARE,
    ) -> None:
        """`repeat_ids` ask for a repetition of the chunk, for KVzip anchors; see anchors.py."""
        self.name = name
        self._decoder = decoder
        self._prefixes = prefixes
        self.context = variant_name(parse_variant(name), context_ids)
        self._context = tuple(context_ids)
        self._repeat = tuple(repeat_ids)
        self._anchor_share = anchor_share

    def prepare(self, case: Case, extras: Sequence[str]) -> ComputedChunks:
        unknown = set(extras) - {KVZIP}
        assert not unknown, f"{sorted(unknown)} cannot be computed on the spot"
        first, rest = case.keys[:1], case.keys[1:]
        made: list[list[LayerKV]] = []
        anchors: dict[ChunkKey, bytes] = {}
        for keys, context in ((first, ()), (rest, self._context)):
            prefix = self._prefixes.of((*case.preamble, *context))
            chunks = case.chunks[len(made) : len(made) + len(keys)]
            for run in passes([len(chunk) for chunk in chunks]):
                batch = [chunks[i] for i in run]
                layers = encode_chunks(self._decoder, prefix, batch)
                if KVZIP in extras:
                    scores = kvzip_scores(self._decoder, prefix, batch, layers, self._repeat)
                    for i, kv, each in zip(run, layers, scores, strict=True):
                        packed = pack_anchors(choose_anchors(kv, each, self._anchor_share))
                        anchors[keys[i]] = packed
                made += layers
        return ComputedChunks(made, {KVZIP: anchors} if anchors else None)
