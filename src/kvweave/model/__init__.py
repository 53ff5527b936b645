"""Models: from a name to a folder on disk, and from a folder to a decoder."""
