"""Where kvweave looks for files of its own on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """The folder of what can be rebuilt: models, measured profiles. `KVWEAVE_HOME` moves it; else
    it is in the user's cache folder. It may not exist yet."""
    override = os.environ.get("KVWEAVE_HOME")
    if override:
        return Path(override).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("kvweave", appauthor=False)


def config_folder() -> Path:
    """The folder of the user's own `kvweave.toml`. It may not exist."""
    from platformdirs import user_config_path

    return user_config_path("kvweave", appauthor=False)
