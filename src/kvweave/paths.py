"""Where kvweave keeps what it may rebuild: models, measured profiles.

One folder under the user's cache folder. `KVWEAVE_HOME` moves it; nothing else reads the
environment for paths.
"""

import os
from pathlib import Path


def home() -> Path:
    """The cache folder. It may not exist yet; whoever writes there creates it."""
    override = os.environ.get("KVWEAVE_HOME")
    if override:
        return Path(override).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("kvweave", appauthor=False)
