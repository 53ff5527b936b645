"""RoPE settings of a GGUF file under Hugging Face's names, or a refusal by name.

GGUF keeps linear and yarn scaling as metadata. Llama 3's rule is not there: the converter that
made the file bakes its outcome into a tensor, `rope_freqs.weight`, one divisor per frequency. We
find the rule that gives those divisors again and check it number by number.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave.errors import ModelCorrupt, UnsupportedModel
from kvweave.model.files.gguf import GGUFFile
from kvweave.model.files.gguf_settings import Settings

_DEFAULT_BASE = 10000.0  # what GGUF runtimes assume when the file does not say
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0  # every published Llama 3.x has these two
_LLAMA3_CONTEXTS = (8192, 2048, 4096, 16384, 32768, 65536, 131072)


def read_rope(gguf: GGUFFile, s: Settings, head_dim: int, context: int) -> dict[str, Any]:
    """`rope_theta` and, where the model scales, `rope_scaling`."""
    theta = s.get_or("rope.freq_base", _DEFAULT_BASE)
    scaling = _from_metadata(s, context)
    if "rope_freqs.weight" in gguf.tensors:
        baked = _from_tensor(gguf, theta, head_dim)
        if baked and scaling:
            raise UnsupportedModel(
                f"{gguf.path} scales RoPE twice, by metadata and by rope_freqs.weight"
            )
        scaling = scaling or baked
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def _from_metadata(s: Settings, context: int) -> dict[str, Any] | None:
    kind = s.get("rope.scaling.type", str)
    factor = s.get("rope.scaling.factor", float)
    if kind is None:  # the old key, from before there were kinds
        kind, factor = "linear", s.get("rope.scale_linear", float)
    if kind == "none" or factor is None or (kind == "linear" and factor == 1.0):
        return None
    if factor < 1.0:
        raise ModelCorrupt(f"{s.path}: {s.arch}.rope.scaling.factor is {factor}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{s.path} scales RoPE by {kind!r}; supported: linear, yarn and Llama 3's rule"
        )
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        if s.get_or(f"rope.scaling.{key}", neutral) != neutral:
            raise UnsupportedModel(f"{s.path}: {s.arch}.rope.scaling.{key} is not supported")
    if s.get_or("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise UnsupportedModel(
            f"{s.path}: {s.arch}.rope.scaling.yarn_log_multiplier is not supported"
        )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": s.get_or(
            "rope.scaling.original_context_length", context
        ),
        "beta_fast": s.get_or("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": s.get_or("rope.scaling.yarn_beta_slow", 1.0),
    }


def _from_tensor(gguf: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    info = gguf.tensors["rope_freqs.weight"]
    if info.shape != (head_dim // 2,):
        raise ModelCorrupt(
            f"{gguf.path}: rope_freqs.weight has shape {info.shape}, not {(head_dim // 2,)}; "
            "download it again"
        )
    divisors = gguf.rows(info)[0].astype(np.float64)
    if np.all(divisors == 1.0):
        return None
    factor = round(float(divisors.max()), 4)  # it passed through float32; checked below
    for original in _LLAMA3_CONTEXTS:
        if np.allclose(divisors, _llama3(theta, head_dim, factor, original), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel(
        f"{gguf.path}: rope_freqs.weight follows no RoPE rule we know; "
        "pass the model's original folder instead"
    )


def _llama3(theta: float, head_dim: int, factor: float, original: int) -> npt.NDArray[np.float64]:
    """What Llama 3's rule divides each frequency by: 1 for fast ones, `factor` for slow ones."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = (original / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    blend = np.clip(blend, 0.0, 1.0)  # 1: keep, 0: divide
    result: npt.NDArray[np.float64] = 1.0 / ((1.0 - blend) / factor + blend)
    return result
