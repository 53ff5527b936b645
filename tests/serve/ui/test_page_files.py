"""What is shipped for the browser: vendored files are the ones on record, text is never made HTML,
and every module that is imported is there."""

import hashlib
import re
from pathlib import Path

import pytest

from kvweave.serve.ui.page import FOLDER, read_assets

VENDOR = FOLDER / "vendor"
OURS = sorted(path for path in (FOLDER / "js").rglob("*.js"))
# ways by which a string becomes markup or code
FORBIDDEN = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "dangerouslySetInnerHTML",
    "document.write",
    "createContextualFragment",
    "srcdoc",
    "DOMParser",
    "eval(",
    "new Function",
)
MOST_BYTES = 300_000  # of all that a first visit may load, compressed


def test_vendored_files_are_those_on_record() -> None:
    record = (VENDOR / "README.md").read_text()
    sums = dict(reversed(line) for line in re.findall(r"^([0-9a-f]{64})  (\S+)$", record, re.M))
    files = {path.name for path in VENDOR.iterdir() if path.is_file()} - {"README.md"}
    assert set(sums) == files
    for name, wanted in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == wanted, name
        row = re.search(rf"^\| `{re.escape(name)}` \|.*\|$", record, re.M)
        assert row, f"{name} has no row with its version and licence"


def test_every_vendored_package_has_its_licence() -> None:
    record = (VENDOR / "README.md").read_text()
    packages = set(re.findall(r"^\| `[^`]+` \| (?:@[\w-]+/)?([\w-]+) \|", record, re.M))
    assert packages == {path.stem for path in (VENDOR / "licences").iterdir()}


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_string_becomes_markup_or_code(path: Path) -> None:
    text = path.read_text()
    assert [word for word in FORBIDDEN if word in text] == []


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_what_a_module_imports_is_there(path: Path) -> None:
    for target in re.findall(r'^(?:import|export|}).*? from "([^"]+)";', path.read_text(), re.M):
        assert target.startswith("."), f"{target}: there is no import map"
        assert (path.parent / target).resolve().is_file(), target


def test_the_page_names_nothing_from_elsewhere() -> None:
    page = (FOLDER / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert named
    for each in named:
        assert (FOLDER / each.removeprefix("ui/")).is_file(), each
    assert "<style" not in page
    assert " style=" not in page
    assert not re.search(r"<script(?![^>]*src=)", page)
    for sheet in (FOLDER / "css").glob("*.css"):
        for url in re.findall(r'url\("?([^")]+)', sheet.read_text()):
            assert (sheet.parent / url).resolve().is_file(), url


def test_all_of_it_is_small() -> None:
    """Even if a visit loaded every file: fonts, scripts and styles."""
    assets = read_assets()
    sizes = {name: len(asset.packed or asset.body) for name, asset in assets.items()}
    loaded = {name: size for name, size in sizes.items() if "licences" not in name}
    assert sum(loaded.values()) < MOST_BYTES, sum(loaded.values())
