"""Turns a GGUF file into a Hugging Face style model folder, once.

    config.json  model.safetensors (float32)  tokenizer.json  tokenizer_config.json
    generation_config.json

Weights stream through in slabs of rows, so memory stays at a few slabs whatever the model's size.
The same file always gives the same bytes. The folder appears whole or not at all.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvweave.errors import ModelCorrupt, ModelError, UnsupportedModel
from kvweave.model.files.gguf.config import read_config
from kvweave.model.files.gguf.file import GGUFFile, TensorInfo
from kvweave.model.files.gguf.packings import F32
from kvweave.model.files.gguf.tokenizer import read_tokenizer

_HEADER_ALIGNMENT = 8


class SafetensorsWriter:
    """Writes float32 tensors in the order of `shapes`. Same shapes and data give the same bytes.

    Use as a context manager. Leaving it checks that every tensor arrived in full and flushes to
    the disk; leaving it through an exception leaves a useless file for the caller to remove.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + 4 * int(np.prod(shape))
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self.total_bytes = 8 + len(text) + end
        self._shapes = dict(shapes)
        self._waiting = list(shapes)[::-1]
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self.done_bytes = 8 + len(text)

    def write(self, name: str, slabs: Iterable[F32]) -> None:
        """Write one tensor, handed over in slabs of rows; only one slab is alive at a time."""
        assert self._waiting, f"{name} was never announced"
        expected = self._waiting.pop()
        assert name == expected, f"tensors must come in the announced order: {expected}, not {name}"
        num_values = 0
        for slab in slabs:
            num_values += slab.size
            self._file.write(np.ascontiguousarray(slab, "<f4").data)
            self.done_bytes += 4 * slab.size
        assert num_values == int(np.prod(self._shapes[name])), f"{name}: {num_values} values"

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        with self._file:
            if error is None:
                assert not self._waiting, f"never written: {self._waiting[::-1]}"
                self._file.flush()
                os.fsync(self._file.fileno())


CONVERTER_VERSION = 1  # raise when the same GGUF gives other bytes: cached folders are rebuilt

_SLAB_VALUES = 4 << 20  # 16 MiB of float32 at a time
_BLOCK = "model.layers.{i}."


class _Source(NamedTuple):
    """Where one Hugging Face tensor comes from."""

    gguf_name: str
    shape: tuple[int, ...]  # of the Hugging Face tensor
    rope_heads: int = 0  # > 0: rows are permuted per head and must be put back
    part: int = 0  # which expert, where GGUF stacks them
    num_parts: int = 1


def convert_gguf(
    path: Path,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Convert into `folder`, which must not exist. `progress` gets bytes written and their total;
    `generation` says how answers are drawn, in the words of generation_config.json.

    A failure or a kill leaves `folder` absent; a kill leaves `folder` + ".part", which the next
    call removes.
    """
    assert not folder.exists(), f"{folder} exists"
    gguf = GGUFFile(path)
    config = read_config(gguf)
    tokenizer = read_tokenizer(gguf, config["max_position_embeddings"])
    sources = _sources(gguf, config)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _write_weights(gguf, sources, part / "model.safetensors", progress or _ignore)
        config["eos_token_id"] = _one_or_list(tokenizer.eos_ids)
        special = {
            key: config[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if config.get(key) is not None
        }
        _write_json(part / "config.json", config)
        _write_json(part / "generation_config.json", {**special, **(generation or {})})
        _write_json(part / "tokenizer_config.json", tokenizer.tokenizer_config)
        (part / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _sources(gguf: GGUFFile, config: dict[str, Any]) -> dict[str, _Source]:
    """Every tensor of the result in the order it is written; checks that the file has them all."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    rotated = config["model_type"] in ("llama", "mixtral")
    sources = {"model.embed_tokens.weight": _Source("token_embd.weight", _embedding(config))}
    for i in range(config["num_hidden_layers"]):
        hf, blk = _BLOCK.format(i=i), f"blk.{i}."
        sources[hf + "input_layernorm.weight"] = _Source(blk + "attn_norm.weight", (hidden,))
        for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            rope_heads = count if rotated and letter != "v" else 0
            rows, name = count * head_dim, f"{hf}self_attn.{letter}_proj."
            weight = _Source(f"{blk}attn_{letter}.weight", (rows, hidden), rope_heads)
            sources[name + "weight"] = weight
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                sources[name + "bias"] = _Source(f"{blk}attn_{letter}.bias", (rows,), rope_heads)
        out = f"{hf}self_attn.o_proj."
        sources[out + "weight"] = _Source(blk + "attn_output.weight", (hidden, heads * head_dim))
        if config.get("attention_bias"):
            sources[out + "bias"] = _Source(blk + "attn_output.bias", (hidden,))
        if config["model_type"].startswith("qwen3"):
            for letter in "qk":
                norm = _Source(f"{blk}attn_{letter}_norm.weight", (head_dim,))
                sources[f"{hf}self_attn.{letter}_norm.weight"] = norm
        sources[hf + "post_attention_layernorm.weight"] = _Source(
            blk + "ffn_norm.weight", (hidden,)
        )
        sources |= _feed_forward(config, hf, blk)
    sources["model.norm.weight"] = _Source("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = _Source("output.weight", _embedding(config))
    _check_tensors(gguf, sources)
    return sources


def _feed_forward(config: dict[str, Any], hf: str, blk: str) -> dict[str, _Source]:
    hidden = config["hidden_size"]
    experts = config.get("num_local_experts") or config.get("num_experts")
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if experts is None:
        return {
            f"{hf}mlp.{name}_proj.weight": _Source(f"{blk}ffn_{name}.weight", shape)
            for name, shape in shapes.items()
        }
    if config["model_type"] == "mixtral":
        block, names = "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    else:
        block, names = "mlp", {name: f"{name}_proj" for name in shapes}
    router = _Source(blk + "ffn_gate_inp.weight", (experts, hidden))
    return {f"{hf}{block}.gate.weight": router} | {
        f"{hf}{block}.experts.{e}.{names[name]}.weight": _Source(
            f"{blk}ffn_{name}_exps.weight", shape, part=e, num_parts=experts
        )
        for e in range(experts)
        for name, shape in shapes.items()
    }


def _embedding(config: dict[str, Any]) -> tuple[int, int]:
    return config["vocab_size"], config["hidden_size"]


def _check_tensors(gguf: GGUFFile, sources: dict[str, _Source]) -> None:
    for source in sources.values():
        info = gguf.tensors.get(source.gguf_name)
        if info is None:
            raise ModelCorrupt(f"{gguf.path} has no tensor {source.gguf_name}; download it again")
        stacked = (source.num_parts,) if source.num_parts > 1 else ()
        if info.shape != stacked + source.shape:
            raise ModelCorrupt(
                f"{gguf.path}: tensor {info.name} has shape {info.shape}, "
                f"not {stacked + source.shape}; download it again"
            )
    used = {source.gguf_name for source in sources.values()} | {"rope_freqs.weight"}
    extra = sorted(gguf.tensors.keys() - used)
    if extra:
        raise UnsupportedModel(
            f"{gguf.path} has {len(extra)} tensors this architecture does not use, "
            f"such as {extra[0]!r}; it is another kind of model"
        )


def _write_weights(
    gguf: GGUFFile,
    sources: dict[str, _Source],
    path: Path,
    progress: Callable[[int, int], None],
) -> None:
    shapes = {name: source.shape for name, source in sources.items()}
    needed, free = 4 * sum(map(math.prod, shapes.values())), shutil.disk_usage(path.parent).free
    if needed > free:
        raise ModelError(
            f"{gguf.path.name} takes {needed / 1e9:.1f} GB as float32 and {path.parent} has "
            f"{free / 1e9:.1f} GB left; make room there or point KVWEAVE_HOME elsewhere"
        )
    with SafetensorsWriter(path, shapes) as writer:
        for name, source in sources.items():
            writer.write(name, _slabs(gguf, gguf.tensors[source.gguf_name], source))
            progress(writer.done_bytes, writer.total_bytes)


def _slabs(gguf: GGUFFile, info: TensorInfo, source: _Source) -> Iterator[F32]:
    """The tensor as runs of whole rows, each at most a slab (or one row, or one head) long."""
    if source.rope_heads and len(source.shape) == 1:  # a bias: its rows lie along the last axis
        yield _put_back(gguf.rows(info).reshape(-1, 1), source.rope_heads)
        return
    num_rows = info.num_rows // source.num_parts
    first = source.part * num_rows
    unit = num_rows // source.rope_heads if source.rope_heads else 1
    step = max(1, _SLAB_VALUES // (info.shape[-1] * unit)) * unit
    for start in range(first, first + num_rows, step):
        end = min(start + step, first + num_rows)
        slab = gguf.rows(info, start, end)
        yield _put_back(slab, (end - start) // unit) if source.rope_heads else slab


def _put_back(rows: F32, heads: int) -> F32:
    """Undo the row order of GGUF's Llama: pairs that RoPE turns lie side by side there.

    Hugging Face keeps the first halves of a head's pairs first, then the second halves.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])  # [H, D/2, 2, C]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _one_or_list(ids: list[int]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else ids or None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _ignore(done_bytes: int, total_bytes: int) -> None:
    """For callers that show no progress."""
