"""The wheel as a user installs it: package data inside, both doors open."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import kvweave

REPO = Path(__file__).resolve().parents[2]
MAKEFILE = (REPO / "Makefile").read_text()
# endings of what the package reads at run time
DATA = (
    ".txt",
    ".json",
    ".jsonl",
    ".md",
    ".typed",
    ".html",
    ".css",
    ".js",
    ".svg",
    ".woff2",
    ".png",
    ".c",
    ".h",
)


def packaged_data() -> set[str]:
    src = REPO / "src"
    return {str(p.relative_to(src)) for p in (src / "kvweave").rglob("*") if p.suffix in DATA}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", folder, REPO]
    subprocess.run(command, check=True, timeout=240)
    (made,) = folder.glob("kvweave-*.whl")
    return made


@pytest.mark.slow
@pytest.mark.net
def test_a_wheel_holds_every_file_that_the_package_reads(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = packaged_data()
    assert any(name.endswith("filler.txt") for name in wanted)
    assert any("calibrate/packaged/" in name for name in wanted)
    assert "kvweave/demo/questions.jsonl" in wanted
    assert "kvweave/kernels/native/rows.c" in wanted
    assert "kvweave/serve/ui/static/index.html" in wanted
    assert wanted <= inside
    assert not {name for name in inside if "__pycache__" in name or name.startswith("tests/")}


@pytest.mark.slow
@pytest.mark.net
def test_an_installed_wheel_runs_by_both_names_and_brings_its_demo(
    wheel: Path, tmp_path: Path
) -> None:
    """In an environment of its own, which sees the packages of this one but not its kvweave."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: object) -> str:
        ran = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=bare, cwd=tmp_path
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    run(python, "-m", "pip", "install", "--no-deps", "--quiet", wheel)
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(own) / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    version = f"kvweave, version {kvweave.__version__}\n"
    assert run(python.with_name("kvweave"), "--version") == version
    assert run(python, "-m", "kvweave", "--version") == version
    where = run(python, "-c", "import kvweave; print(kvweave.__file__)")
    assert where.startswith(own), "not the one of the checkout"
    script = "from kvweave.demo import *; print(len(read_questions()), len([*PASSAGES.iterdir()]))"
    assert run(python, "-c", script) == "40 48\n"


def test_the_metadata_names_every_extra_that_a_command_asks_for() -> None:
    from kvweave.cli import EXTRAS

    text = (REPO / "pyproject.toml").read_text()
    for extra in set(EXTRAS.values()):
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra


def packages_of(*extras: str) -> set[str]:
    """What `pip install 'kvweave[…]'` asks for, by name."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    return {re.split(r"[<>=!~\[ ;]", name, maxsplit=1)[0].lower() for name in asked}


def test_what_make_serve_installs_covers_what_the_server_offers() -> None:
    """JSON schemas and required tools, --redis-url, and every format that the page takes."""
    (asked,) = re.findall(r"-e '\.\[([\w,]+)\]'\n\t@touch", MAKEFILE.partition(".dev:")[0])
    installed = packages_of(*asked.split(","))
    assert {"llguidance", "redis"} <= packages_of("serve") <= installed
    formats = {"pypdf", "python-docx", "python-pptx", "openpyxl", "pyyaml", "selectolax"}
    assert formats <= installed


def test_every_way_out_that_names_an_extra_names_one_that_there_is() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert all(extras.values()), "an extra without packages promises something"
    places = [*(REPO / "src").rglob("*.py"), *(REPO / "docs").glob("*.md"), REPO / "README.md"]
    for path in places:
        for named in re.findall(r"kvweave\[([\w,-]+)\]", path.read_text()):
            assert set(named.split(",")) <= extras.keys(), f"{path.name}: kvweave[{named}]"
