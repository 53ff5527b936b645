"""Whose chunk KV it is: the names that kvweave itself would give it for the same weights.

A model that vLLM serves is known to kvweave by its folder: the bytes of its weights, its config and
its tokenizer. Both halves read them by themselves, so no name travels between processes.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch

from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import ISOLATED, variant_name
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.hosts.vllm.lora import Adapter
from kvweave.kv.format.codec import dtype_name
from kvweave.kv.format.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.model.decoder import revision_of
from kvweave.model.files.tensor_files import TensorFiles
from kvweave.model.spec import ModelSpec, read_spec
from kvweave.paths import home
from kvweave.text.tokenizer import Tokenizer

TO_MEASURE = "weave,weave-deep,weave-through"  # what needs nothing that vLLM does not make


class ServedModel(NamedTuple):
    """What vLLM was told to serve."""

    name: str  # a folder or a hub id
    revision: str | None
    dtype: torch.dtype
    quantization: str | None  # of its weights: in the folder, or applied while vLLM loads


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A served model as kvweave's chunk KV knows it."""

    spec: ModelSpec
    context: KeyContext  # without a preamble and a tenant
    preparation: Preparation
    texts: Texts
    weights: str  # fingerprint: a profile is of these
    loadable: Path | None  # its folder; None: packed weights, which kvweave itself cannot load
    num_ranks: int = 1  # that share the heads out: the spec is that of one

    @property
    def encoding_context(self) -> str:
        """What chunks are computed behind, as keys and calibration tables name it."""
        return variant_name(self.preparation.variant, self.texts.filler)

    @property
    def calibration(self) -> str:
        """The way to tables for this very chunk KV, for whoever runs vLLM: it has paths."""
        if self.loadable is None:
            return "kvweave cannot load packed weights: name a strategy, which no bound holds for"
        flags = f"--model {quote(str(self.loadable.absolute()))} --dtype {self.context.dtype}"
        flags = (
            f"{flags} --encodings {self.preparation.variant} --strategies {TO_MEASURE} --qa FILE"
        )
        return f"KVWEAVE_HOME={quote(str(home().absolute()))} kvweave calibrate {flags}"

    def with_lora(self, lora: Adapter | None) -> "ModelIdentity":
        """Names these weights with an adapter on: another model to whoever looks for chunk KV."""
        if lora is None:
            return self
        return replace(self, context=self._context_of(f"lora {lora.digest}"))

    def of_rank(self, rank: int, num_ranks: int) -> "ModelIdentity":
        """Names the heads that one of some tensor-parallel ranks has, cut as vLLM cuts them: where
        there are fewer KV heads than ranks, neighbours have the same one."""
        if num_ranks == 1:
            return self
        spec = replace(
            self.spec,
            num_heads=self.spec.num_heads // num_ranks,
            num_kv_heads=max(1, self.spec.num_kv_heads // num_ranks),
        )
        context = self._context_of(f"rank {rank} of {num_ranks}")
        return replace(self, spec=spec, context=context, num_ranks=num_ranks)

    def _context_of(self, part: str) -> KeyContext:
        """Names a variation of these weights, or a part of them: another model to a store."""
        name = f"{self.context.model}|{part}"
        model = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return replace(self.context, model=model)

    def names(self, preamble_ids: tuple[int, ...], tenant: str) -> "ChunkNames":
        context = replace(self.context, preamble_ids=preamble_ids, tenant_salt=tenant)
        return ChunkNames(context, self.encoding_context)


class ChunkNames:
    """The keys of chunks behind one preamble, as `ChunkEncoder` saves them."""

    def __init__(self, context: KeyContext, variant: str) -> None:
        self.context = context
        self._isolated = replace(context, variant=ISOLATED)
        self._behind = replace(context, variant=variant)

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The key of a chunk behind its encoding context."""
        return make_chunk_key(self._behind, token_ids)

    def exact_key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The key of a chunk right behind the preamble."""
        return make_chunk_key(self._isolated, token_ids)


def identify(served: ServedModel, preparation: Preparation, codec: str) -> ModelIdentity:
    """Reads the model's folder. Raises ModelError or ConfigError for what kvweave cannot name."""
    folder = _folder(served)
    packed = served.quantization is not None
    spec = read_spec(folder, packed=packed)
    weights = TensorFiles(folder, packed=packed).fingerprint()
    revision = revision_of(weights, spec, served.dtype)
    if packed:  # KV is stored as it is computed: its name is all that says how weights were rounded
        name = f"{revision}|vllm {served.quantization}{_packing(folder)}"
        revision = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    tokenizer = Tokenizer(folder)
    context = KeyContext(
        model=revision,
        dtype=dtype_name(served.dtype),
        codec=codec,
        tokenizer=tokenizer.fingerprint,
        preamble_ids=(),
        rope=repr(spec.rope),
    )
    texts = Texts.for_preparation(tokenizer, preparation)
    return ModelIdentity(spec, context, preparation, texts, weights, None if packed else folder)


def _packing(folder: Path) -> str:
    """How the weights of a folder are packed, as its config.json has it; "": they are not."""
    told = json.loads((folder / "config.json").read_text()).get("quantization_config")
    return f"|{json.dumps(told, sort_keys=True)}" if told else ""


def _folder(served: ServedModel) -> Path:
    if Path(served.name).is_dir():
        return Path(served.name)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            served.name,
            revision=served.revision,
            allow_patterns=["*.json", "*.safetensors"],
            local_files_only=True,
        )
    except Exception as error:  # the hub raises a dozen kinds
        raise ConfigError(
            f"model {served.name!r} is neither a folder nor in the hub's cache; serve a folder"
        ) from error
    return Path(found)
