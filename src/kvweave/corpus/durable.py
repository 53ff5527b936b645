"""Folders and names that outlive a power cut.

A file's content is on the disk after an fsync of the file, its name after one of the folder it is
in. So is the absence of a name: what was removed may be back until its folder was synced.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """The content of a file, or the names in a folder, are on the disk itself when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """mkdir -p. A folder that a power cut takes has lost what was acknowledged in it."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)
