"""Where kvweave looks for files of its own on this machine, and what every room does with files."""

import hashlib
import os
from pathlib import Path


def home() -> Path:
    """The folder of what can be rebuilt: models, measured profiles. `KVWEAVE_HOME` moves it; else
    it is in the user's cache folder. It may not exist yet."""
    override = os.environ.get("KVWEAVE_HOME")
    if override:
        return Path(override).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("kvweave", appauthor=False)


def kb_root() -> Path:
    """The folder of knowledge bases that a server makes where no other is named: `kbs` in
    `KVWEAVE_HOME` if that is set, else in the user's data folder, since what was uploaded cannot be
    rebuilt. It may not exist yet."""
    if os.environ.get("KVWEAVE_HOME"):
        return home() / "kbs"
    from platformdirs import user_data_path

    return user_data_path("kvweave", appauthor=False) / "kbs"


def chat_history_file() -> Path:
    """What was typed in `kvweave chat`. It may not exist yet."""
    return kb_root().parent / "chat_history"


def config_folder() -> Path:
    """The folder of the user's own `kvweave.toml`. It may not exist."""
    from platformdirs import user_config_path

    return user_config_path("kvweave", appauthor=False)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """The content of a file, or the names in a folder, are on the disk itself when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
