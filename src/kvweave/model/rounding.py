"""Rounds the weights of a model while they are loaded, and measures what that costs.

Layers come one by one in float32. A short text and some random tokens are carried through each,
once in float32 and once as rounded: the first tells which input dims are large, the difference of
the two, behind the last layer, what rounding costs in nats per token. So a model is rounded within
the memory of its rounded weights and one layer. What was found is kept:

    <home>/profiles/rounding-<weights>.json

The first and the last layer stay in float32, and so do embeddings, norms and routers. How far the
dims of a product are evened out is tried on some of these rows: what changes its result least.

Shapes: R rows, I input dims, E hidden dim, V vocabulary.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvweave import paths
from kvweave.kernels.attention import attend
from kvweave.kernels.elementwise import rms_norm
from kvweave.kernels.integer_products import TEXT, Tap, best_dims, round_linear
from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.rope import rotate
from kvweave.kernels.rounded import extra_columns
from kvweave.kernels.types import Segment
from kvweave.model.decoder import Decoder
from kvweave.model.spec import ModelSpec
from kvweave.model.weights import LayerWeights, RoundingCost, Weights

log = logging.getLogger(__name__)

FORMAT = 4
RANDOM_TOKENS = 96
TEXT_TOKENS = 160
_PRODUCTS = ("qkv", "out", "gate_up", "down")
HEAD_ROWS = 40  # whose logits are in memory at a time
Parts = dict[str, list[tuple[int, int]]]  # "layer.product" → (dim, columns) of split dims
Powers = dict[str, str]  # "layer.product" → a letter for each dim, "m" for 2^0


@dataclass(frozen=True, slots=True)
class RoundingNotes:
    """What was found out about the rounding of one model."""

    kl_nats: float  # per token, to float32
    parts: Parts
    powers: Powers


def notes_path(fingerprint: str) -> Path:
    return paths.home() / "profiles" / f"rounding-{fingerprint[:16]}.json"


def load_notes(fingerprint: str) -> RoundingNotes | None:
    """What an earlier start found. None: nothing that can be used."""
    try:
        kept: dict[str, Any] = json.loads(notes_path(fingerprint).read_text())
        if (kept["format"], kept["weights"]) != (FORMAT, fingerprint):
            return None
        parts = {k: [(int(d), int(n)) for d, n in pairs] for k, pairs in kept["parts"].items()}
        powers = {str(k): str(letters) for k, letters in kept["powers"].items()}
        return RoundingNotes(float(kept["kl_nats"]), parts, powers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save_notes(fingerprint: str, notes: RoundingNotes) -> None:
    path = notes_path(fingerprint)
    kept = {"format": FORMAT, "weights": fingerprint, **asdict(notes)}
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(kept) + "\n")
        fresh.replace(path)
    except OSError as error:
        log.warning("cannot keep what rounding costs %s: %s", path, error.strerror)


@dataclass(eq=False)
class Rounding:
    """Rounds one model. Made for one load, on its thread."""

    _spec: ModelSpec
    _library: CompiledLibrary
    _notes: RoundingNotes | None  # with them nothing is measured
    _encode: Callable[[str], list[int]]  # text into tokens
    _parts: Parts = field(default_factory=dict)
    _powers: Powers = field(default_factory=dict)
    _streams: "_Streams | None" = None

    def start(self, embedding: Tensor) -> None:
        """Begin with the embeddings."""
        if self._notes is None:
            self._streams = _Streams(self._spec, embedding, self._encode)

    def layer(self, index: int, exact: LayerWeights) -> LayerWeights:
        """Return the layer with its products rounded."""
        seen = None if self._streams is None else self._streams.run_exact(exact)
        if index in (0, self._spec.num_layers - 1):
            if self._streams is not None:
                self._streams.run_rounded(exact)
            return exact
        rounded: dict[str, Any] = {}  # products by field name
        for name in _PRODUCTS:
            linear = getattr(exact, name)
            if linear is None:
                continue  # experts have none of these
            key = f"{index}.{name}"
            parts, powers = self._dims(key, linear, None if seen is None else seen[name])
            rounded[name] = round_linear(linear, self._library, parts, powers)
        layer = replace(exact, **rounded)
        if self._streams is not None:
            self._streams.run_rounded(layer)
        return layer

    def head(self, final_norm: Tensor, exact: Linear) -> Projection:
        """Round the head: at one row it is up to a third of the work."""
        seen = None if self._streams is None else self._streams.before_head(final_norm)
        parts, powers = self._dims("head", exact, seen)
        product = round_linear(exact, self._library, parts, powers)
        if self._streams is not None:
            kl = self._streams.divergence(final_norm, exact, product)
            self._notes = RoundingNotes(kl, self._parts, self._powers)
        return product

    def cost(self, fingerprint: str) -> RoundingCost:
        """What it costs; `fingerprint` is of the exact weights. Keeps what was measured."""
        assert self._notes is not None, "the head was rounded before"
        if self._streams is not None:
            save_notes(fingerprint, self._notes)
        return RoundingCost(fingerprint, self._notes.kl_nats)

    def _dims(self, key: str, linear: Linear, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Columns and powers of two [I] of every dim, by `rows` [R, I] that went through the exact
        product, or as an earlier start found them."""
        if rows is not None:
            parts, powers = best_dims(linear, rows, extra_columns(rows.shape[1]))
            split = (parts > 1).nonzero()[:, 0].tolist()
            self._parts[key] = [(dim, int(parts[dim])) for dim in split]
            self._powers[key] = "".join(chr(ord("m") + power) for power in powers.tolist())
            return parts, powers
        assert self._notes is not None, "neither notes nor a measurement"
        dim_count = linear.weight.shape[1]
        parts = torch.ones(dim_count, dtype=torch.int64)
        for dim, count in self._notes.parts.get(key, ()):
            parts[dim] = count
        letters = self._notes.powers.get(key, "m" * dim_count)
        return parts, torch.tensor([ord(letter) - ord("m") for letter in letters])


class _Streams:
    """Hidden states of the same tokens, computed exactly and as rounded."""

    def __init__(
        self, spec: ModelSpec, embedding: Tensor, encode: Callable[[str], list[int]]
    ) -> None:
        self._spec = replace(spec, num_layers=1)
        generator = torch.Generator().manual_seed(0)
        random_ids = torch.randint(0, spec.vocab_size, (RANDOM_TOKENS,), generator=generator)
        text_ids = torch.tensor(encode(TEXT)[:TEXT_TOKENS], dtype=torch.int64)
        if not len(text_ids):
            text_ids = random_ids.flip(0)
        ids = torch.cat([random_ids, text_ids]).clamp_max(spec.vocab_size - 1)
        self._bounds = ((0, RANDOM_TOKENS), (RANDOM_TOKENS, len(ids)))
        self._positions = torch.cat([torch.arange(end - start) for start, end in self._bounds])
        self._embedding = embedding
        self._h = torch.nn.functional.embedding(ids, embedding)
        self._h_rounded = self._h.clone()

    def run_exact(self, layer: LayerWeights) -> dict[str, Tensor]:
        """Run the exact layer; return the rows that went into it, by product."""
        taps: dict[str, Any] = {
            name: Tap(linear) for name in _PRODUCTS if (linear := getattr(layer, name)) is not None
        }
        self._h = self._through(replace(layer, **taps), self._h)
        return {name: tap.rows for name, tap in taps.items()}

    def run_rounded(self, layer: LayerWeights) -> None:
        self._h_rounded = self._through(layer, self._h_rounded)

    def before_head(self, final_norm: Tensor) -> Tensor:
        """The rows that go into the head."""
        return rms_norm(self._h, final_norm, self._spec.norm_eps)

    @torch.inference_mode()
    def divergence(self, final_norm: Tensor, exact: Projection, rounded: Projection) -> float:
        """Mean KL of the text's next tokens, in nats."""
        start, end = self._bounds[1]
        heads = [self._decoder(None, final_norm, head) for head in (exact, rounded)]
        total = 0.0
        # some rows at a time, within little memory: a row is the same beside any others
        for at in range(start, end, HEAD_ROWS):
            part = slice(at, min(at + HEAD_ROWS, end))
            right, found = (
                decoder.logits(h[part]).log_softmax(-1)
                for decoder, h in zip(heads, (self._h, self._h_rounded), strict=True)
            )
            total += float((right.exp() * (right - found)).sum())
        return max(total / (end - start), 0.0)

    @torch.inference_mode()
    def _through(self, layer: LayerWeights, h: Tensor) -> Tensor:
        decoder = self._decoder(layer, h.new_ones(h.shape[1]), Linear(self._embedding))
        angles = decoder.angles(self._positions)
        q, k, v = decoder.qkv(0, h)
        k = rotate(k, angles)
        segments = [Segment(a, b, k[a:b], v[a:b]) for a, b in self._bounds]
        return decoder.finish(0, h, attend(rotate(q, angles), self._positions, segments))

    def _decoder(self, layer: LayerWeights | None, final_norm: Tensor, head: Projection) -> Decoder:
        layers = () if layer is None else (layer,)
        return Decoder(self._spec, Weights(self._embedding, layers, final_norm, head, ""))
