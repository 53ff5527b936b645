"""From a model folder to a running decoder."""

import logging
import re
from pathlib import Path

import torch

from kvweave.errors import ConfigError
from kvweave.kernels.native.loading import native_kernels
from kvweave.model.decoder import SMALL_KL, Decoder
from kvweave.model.files.tensor_files import TensorFiles
from kvweave.model.rounding import Rounding, load_notes
from kvweave.model.spec import ModelSpec, read_spec
from kvweave.model.weights import Weights, load_weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTS = ("auto", "none", "int8")
# "auto" asks for half of SMALL_KL: the text that it is measured on is short, and longer prose was
# seen to cost up to twice as much (a licence that the model knows by heart: six times).
AUTO_KL = SMALL_KL / 2
SMALLEST_ROUNDED = 64 << 20  # weights: smaller models are quick in float32, and start at once


def load_decoder(
    folder: Path, *, device: str = "auto", dtype: str = "auto", quant: str = "none"
) -> Decoder:
    """Load the model in `folder`.

    `device`: "auto" takes CUDA where there is one. `dtype`: "auto" is bfloat16 on CUDA and float32
    on a CPU; a CPU without bfloat16 emulates it, and a warning says so. `quant` (float32 on a CPU
    only): "int8" rounds the products to 8 bits where kernels can be compiled here; "auto" does so
    where the CPU has instructions for integers and rounding costs less than AUTO_KL, "none" never.
    The first start measures that cost, in seconds.
    """
    place = torch.device(_resolve_device(device))
    dtype = _resolve_dtype(dtype, place)
    if quant not in QUANTS:
        raise ConfigError(f"quant {quant!r} is unknown; known: {', '.join(QUANTS)}")
    fits = place.type == "cpu" and dtype == "float32"
    if quant == "int8" and not fits:
        raise ConfigError("quant='int8' is for CPUs with dtype float32; drop one of the two")
    spec = read_spec(folder)
    files = TensorFiles(folder)
    is_small = files.num_weights < SMALLEST_ROUNDED
    if fits and not is_small:
        log.info("%s", native_kernels().words)  # compiled here, once per machine
    if fits and (quant == "int8" or (quant == "auto" and not is_small)):
        rounded = _load_rounded(folder, spec, files, quant)
        if rounded is not None:
            return Decoder(spec, rounded)
    return Decoder(spec, load_weights(files, spec, DTYPES[dtype], place))


def resolve_place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Where a model computes and in which precision, as `load_decoder` reads the two."""
    place = torch.device(_resolve_device(device))
    return place, DTYPES[_resolve_dtype(dtype, place)]


def _load_rounded(folder: Path, spec: ModelSpec, files: TensorFiles, quant: str) -> Weights | None:
    """Load the weights in 8 bits. None: they cannot be multiplied so here, or "auto" finds the
    price too high."""
    library, words = native_kernels()
    if library is None:
        if quant == "int8":  # asked for by name: it must be seen
            log.warning("quant: int8 → none, %s", words)
        return None
    if quant == "auto" and not library.has_integers:
        log.info("quant: auto → none, this CPU has no instructions for 8-bit integers")
        return None
    notes = load_notes(files.fingerprint())
    if quant == "auto" and notes is not None and _is_too_dear(notes.kl_nats):
        return None
    rounding = Rounding(spec, library, notes, lambda text: _encode(folder, text))
    weights = load_weights(files, spec, torch.float32, torch.device("cpu"), rounding)
    assert weights.rounding is not None, "what is rounded has a cost"
    if quant == "auto" and _is_too_dear(weights.rounding.kl_nats):
        return None
    log.info("quant: %s → int8, which costs %.4f nats per token", quant, weights.rounding.kl_nats)
    return weights


def _is_too_dear(kl_nats: float) -> bool:
    if kl_nats >= AUTO_KL:
        log.info("quant: auto → none, rounding costs %.4f nats per token", kl_nats)
    return kl_nats >= AUTO_KL


def _resolve_dtype(dtype: str, place: torch.device) -> str:
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
        log.info("dtype: auto → %s", dtype)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; known: auto, {', '.join(DTYPES)}")
    if place.type == "cpu" and dtype == "bfloat16" and not has_bfloat16():
        _emulate_bfloat16()
    return dtype


def has_bfloat16() -> bool:
    """Whether oneDNN has products in bfloat16 for this CPU: x86-64 with AVX-512 or newer, Arm with
    the bf16 extension."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _emulate_bfloat16() -> None:
    """Torch tries oneDNN first, warns when that refuses the first product, and turns it off for the
    process. It is turned off ahead, and what matters is said in our words."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    log.warning(
        "this CPU has no bfloat16: it is emulated, which is slow; leave --dtype out for float32"
    )


def _encode(folder: Path, text: str) -> list[int]:
    """Tokens of a text; none for a folder without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    return ids


def _resolve_device(device: str) -> str:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        log.info("device: auto → %s", device)
    kind = device.split(":")[0]
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device {device!r} is unknown; known: auto, cpu, cuda, cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use cpu")
    if kind == "cuda" and torch.device(device).index not in (
        None,
        *range(torch.cuda.device_count()),
    ):
        raise ConfigError(f"{device} is not there; torch sees {torch.cuda.device_count()} GPUs")
    return device
