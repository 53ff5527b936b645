"""What is installed to serve is listed with its licence, for machines and for people."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]
ALLOWED = re.compile(  # what may be combined with ours and passed on
    r"(MIT|MIT-0|MIT-CMU|Apache-2\.0|BSD-[23]-Clause|0BSD|ISC|PSF-2\.0|MPL-2\.0|Zlib|BSL-1\.0|CC0-1\.0|"
    r"CNRI-Python|Unlicense)( WITH LLVM-exception)?"
)


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", REPO / ".ci" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_names_what_is_needed_to_serve(tmp_path: Path) -> None:
    out = tmp_path / "sbom.json"
    subprocess.run([sys.executable, REPO / ".ci" / "sbom.py", "--out", out], check=True)
    bill = json.loads(out.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert bill["metadata"]["component"]["name"] == "kvweave"
    found = {each["name"]: each for each in bill["components"]}
    assert {"torch", "fastapi", "uvicorn", "faiss-cpu", "tokenizers", "numpy"} <= found.keys()
    assert "pytest" not in found, "what tests need is not installed to serve"
    for each in found.values():
        assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"
        assert each["licenses"]


def test_every_licence_is_one_that_may_be_passed_on(sbom: ModuleType) -> None:
    for package in sbom.needed():
        licence = sbom.licence_of(package)
        for part in re.split(r" AND | OR ", licence.strip("()")):
            name = package.metadata["Name"]
            assert ALLOWED.fullmatch(part.strip("() ")), f"{name}: {licence}"


def test_the_page_lists_every_package(sbom: ModuleType) -> None:
    """Versions follow constraints.txt by hand; a package that is missing is a red test."""
    page = (REPO / "docs" / "licences.md").read_text()
    rows = {row.split("|")[1].strip() for row in page.splitlines() if row.startswith("| ")}
    names = {sbom.canonical(package.metadata["Name"]) for package in sbom.needed()}
    build_tools = {"pip", "setuptools", "wheel"}
    # what another machine's torch brings: CUDA libraries and Triton
    missing = {n for n in names - rows - {"kvweave"} - build_tools if not n.startswith("nvidia")}
    assert missing - {"triton"} == set()
