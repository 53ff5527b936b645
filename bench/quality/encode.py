"""Chunk KV of the quality bench: each encoding context, and what strategies need beside it."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix, passes
from kvweave.fuse.encode.contexts import Variant, context_filler, filler_ids, neighbour_prefix
from kvweave.fuse.encode.extras import (
    INTER,
    REPEAT,
    choose_anchors,
    extra_name,
    inter_attention,
    kvzip_scores,
    pack_anchors,
)
from kvweave.fuse.protocol import Prefix
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.model.decoder import Decoder
from kvweave.text.prompt import Document, chunk_text, split_template
from kvweave.text.tokenizer import Tokenizer
from quality.data import Question


class Encoder:
    """Encodes the chunks of questions for one model. Prefixes are computed once."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, neighbours: Path | None) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.near: dict[str, list[list[tuple[str, str]]]] = {}
        if neighbours is not None:
            with gzip.open(neighbours, "rt", encoding="utf-8") as file:
                stored = json.load(file)
            texts = {int(i): tuple(p) for i, p in stored["passages"].items()}
            self.near = {
                k: [[texts[i] for i in r] for r in v] for k, v in stored["nearest"].items()
            }
        self.prefixes: dict[tuple[int, ...], Prefix] = {}

    def prefix(self, ids: Sequence[int]) -> Prefix:
        key = tuple(ids)
        if key not in self.prefixes:
            self.prefixes[key] = encode_prefix(self.decoder, key)
        return self.prefixes[key]

    def encode(
        self, question: Question, variant: Variant, isolated: list[list[LayerKV]]
    ) -> tuple[list[list[LayerKV]], list[Prefix]]:
        """Chunk KV behind its encoding context; the first chunk isolated, where it is exact."""
        prompt, decoder = question.prompt, self.decoder
        bare = self.prefix(prompt.preamble)
        if variant.kind == "isolated":
            return isolated, [bare] * len(isolated)
        if variant.kind == "filler":
            filled = self.prefix([*prompt.preamble, *filler_ids(self.tokenizer, variant.size)])
            made = encode_chunks(decoder, filled, prompt.chunks)
            return [isolated[0], *made[1:]], [bare, *[filled] * (len(made) - 1)]
        rows = self.near[f"{question.set_name}/{question.number}"]
        ids = {
            passage: tuple(self.tokenizer.encode_text(chunk_text(Document(passage[1], passage[0]))))
            for row in rows
            for passage in row[: variant.size]
        }
        alone: dict[tuple[int, ...], list[LayerKV]] = {}
        unique = list(dict.fromkeys(ids.values()))
        filled = self.prefix([*prompt.preamble, *context_filler(self.tokenizer, variant)])
        for run in passes([len(u) for u in unique], 8192):
            batch = [unique[i] for i in run]
            alone |= dict(zip(batch, encode_chunks(decoder, filled, batch), strict=True))
        prefixes, made = [bare], [isolated[0]]
        for row in rows[1:]:
            near = [(ids[p], alone[ids[p]]) for p in row[: variant.size]]
            prefixes.append(neighbour_prefix(decoder, filled, near))
        for run in passes([len(prefix.token_ids) for prefix in prefixes[1:]], 16384):
            behind = [(prefixes[i + 1], prompt.chunks[i + 1]) for i in run]
            made += encode_chunks(decoder, [p for p, _ in behind], [ids for _, ids in behind])
        return made, prefixes

    def beside(
        self,
        question: Question,
        names: set[str],
        keys: list[ChunkKey],
        made: list[list[LayerKV]],
        prefixes: list[Prefix],
    ) -> dict[str, dict[ChunkKey, bytes]]:
        """What the strategies `names` need beside the chunk KV."""
        found: dict[str, dict[ChunkKey, bytes]] = {}
        chunks = question.prompt.chunks
        if "cachecraft-like" in names:
            found[INTER] = {
                key: inter_attention(self.decoder, prefix, ids, layers)
                .half()
                .cpu()
                .numpy()
                .tobytes()
                for key, ids, layers, prefix in zip(keys, chunks, made, prefixes, strict=True)
            }
        if "qcfuse" in names:
            _, closing = split_template(self.tokenizer, "")
            repeat = [*self.tokenizer.encode_text(REPEAT), *closing]
            found[extra_name("kvzip")] = {}
            sizes = [len(ids) + len(repeat) for ids in chunks]
            for prefix in dict.fromkeys(map(id, prefixes)):  # chunks behind one prefix run together
                mine = [i for i in range(len(keys)) if id(prefixes[i]) == prefix]
                for run in passes([sizes[i] for i in mine], 8192):
                    batch = [mine[j] for j in run]
                    scores = kvzip_scores(
                        self.decoder,
                        prefixes[batch[0]],
                        [chunks[i] for i in batch],
                        [made[i] for i in batch],
                        repeat,
                    )
                    for i, each in zip(batch, scores, strict=True):
                        packed = pack_anchors(choose_anchors(made[i], each))
                        found[extra_name("kvzip")][keys[i]] = packed
        return found
