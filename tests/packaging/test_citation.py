"""CITATION.cff says what the package says of itself."""

import tomllib
from pathlib import Path

import yaml

from kvweave import __version__

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = {"cff-version", "message", "title", "authors"}  # by the schema of 1.2.0


def test_the_citation_has_what_its_format_wants_and_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited.keys() >= REQUIRED
    assert cited["cff-version"] == "1.2.0"
    assert all("name" in author or "family-names" in author for author in cited["authors"])
    assert cited["type"] == "software"
    assert cited["version"] == __version__
    assert cited["license"] == project["license"]
