"""From what the user typed to a model folder on disk.

qwen2.5-coder-0.5b    an embedded model, pulled on first use
./my-model            a folder with config.json, model.safetensors, tokenizer.json
weights.Q4_K_M.gguf   a GGUF file, converted once and kept in the cache
org/name              a model hub id, through huggingface_hub
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvweave.errors import ModelNotFound
from kvweave.model.files.embedded import EMBEDDED, peek
from kvweave.model.files.embedded import pull as pull_embedded
from kvweave.model.files.gguf.convert import CONVERTER_VERSION, convert_gguf
from kvweave.model.files.model_cache import CacheOrigin, ModelCache, Progress, PullStep, tell_stages
from kvweave.paths import sha256_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "vocab.txt"]
_HUB_SMALL_FILES = ["*.json", "*.jinja", "vocab.txt"]
_HUB_TWINS = ["original/*", "onnx/*", "openvino/*", "consolidated*"]  # the same weights again
_FORMS = "a folder with config.json, a .gguf file or a hub id org/name"


def locate(
    name: str,
    *,
    pull: bool = True,
    progress: Progress | None = None,
    cache: ModelCache | None = None,
) -> Path:
    """The folder of the model called `name`. Blocks while it downloads or converts.

    With `pull=False` an embedded model or hub id that is not on this machine is a ModelNotFound.
    A folder that shares its name with an embedded model is written ./name.
    """
    cache = cache or ModelCache()
    path = Path(name).expanduser()
    if name in EMBEDDED:
        return _find_embedded(name, pull, progress, cache)
    if path.suffix.lower() == ".gguf":
        return gguf_folder(path, progress=progress, cache=cache)
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json, so it is not a model folder")
        return path
    if path.is_file():
        raise ModelNotFound(f"{path} is a file but not a .gguf; pass {_FORMS}")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, pull)
    raise ModelNotFound(
        f"no model {name!r}; pass an embedded name ({', '.join(EMBEDDED)}), {_FORMS}"
    )


def locate_tokenizer(name: str, *, pull: bool = True) -> Path:
    """Find the folder for those who need no weights: of a hub id only small files are fetched."""
    is_hub_id = _HUB_ID.fullmatch(name) is not None and not Path(name).expanduser().exists()
    if not is_hub_id:
        return locate(name, pull=pull)
    try:
        return _from_hub(name, pull=False)
    except ModelNotFound:
        return _from_hub(name, pull, _HUB_SMALL_FILES)


def gguf_folder(
    path: Path, *, progress: Progress | None = None, cache: ModelCache | None = None
) -> Path:
    """The folder converted from a GGUF file, by content: a moved file is not converted twice."""
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist or is not a file; check the path")
    cache = cache or ModelCache()
    report = tell_stages(path.name, progress)
    sha256 = _content_hash(path, cache)
    folder_name = f"gguf-{sha256[:16]}"
    origin = CacheOrigin(
        name=folder_name,
        what=path.name,
        source="GGUF file",
        licence="",
        sha256=sha256,
        converter=CONVERTER_VERSION,
    )
    found = cache.peek(folder_name, origin)
    if found is not None:
        return found.path
    return cache.make(
        folder_name,
        origin,
        lambda folder, scratch: convert_gguf(
            path, folder, lambda done, total: report(PullStep("converting", done, total))
        ),
        report,
    )


def _find_embedded(name: str, pull: bool, progress: Progress | None, cache: ModelCache) -> Path:
    if pull:
        return pull_embedded(EMBEDDED[name], progress=progress, cache=cache)
    found = peek(EMBEDDED[name], cache)
    if found is None:
        raise ModelNotFound(f"{name} is not here yet; run `kvweave models pull {name}`")
    return found.path


def _content_hash(path: Path, cache: ModelCache) -> str:
    """sha256 of a file, remembered by path, size and time of change: hashing 100 GB takes minutes.

    The memory is one tiny file per answer. Losing it costs a hash, two writers write the same.
    """
    stat = path.stat()
    facts = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    note = cache.root / ".hashes" / hashlib.sha256(facts.encode()).hexdigest()[:32]
    if note.is_file() and re.fullmatch(r"[0-9a-f]{64}", known := note.read_text()):
        return known
    try:
        sha256 = sha256_of(path)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
    with suppress(OSError):  # a read-only cache folder: the price is this hash, next time again
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_suffix(".new")
        fresh.write_text(sha256)
        fresh.replace(note)
    return sha256


def _from_hub(name: str, pull: bool, files: Sequence[str] = _HUB_FILES) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    way_out = "download the model elsewhere and pass its folder"
    try:
        folder = Path(
            snapshot_download(
                name,
                allow_patterns=list(files),
                ignore_patterns=_HUB_TWINS,
                local_files_only=not pull,
            )
        )
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{name} asks for a login on the hub: run `hf auth login`, or {way_out}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {name} that you may read; check the spelling, or {way_out}"
        ) from error
    except (EntryNotFoundError, HFValidationError, OSError) as error:  # offline is an OSError
        raise ModelNotFound(
            f"{name} is no folder here and the model hub cannot be reached; go online or {way_out}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{name} on the hub has no config.json, so it is not a model folder")
    return folder
