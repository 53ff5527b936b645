"""Puts away what `pack.py` cut into pieces, on a machine with PyTorch and no network.

    python3 bench/gpu_machine/unpack.py --at PLACE carry/base-01
    python3 bench/gpu_machine/unpack.py --at PLACE --check

Below PLACE: `site` (wheels, unfolded), `vllm-site` (vLLM and what it wants, in front of the others
in a shell that reads `vllm-env`), `home` (a KVWEAVE_HOME with the models), `pieces` and `env`,
which a shell reads to use them. The last piece of something joins, checks and unfolds
it; model files go where `kvweave models pull` looks for one that it has fetched. It needs nothing
but the standard library; --check converts the models and imports what a server imports.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

REPO = Path(__file__).resolve().parents[2]
SITES = {"base": "site", "vllm": "vllm-site"}  # what is packed as wheels: where they are unfolded
# what vLLM looks for below the name of the plug-in's distribution, as `pip install` writes it
_PLUGIN = "[vllm.general_plugins]\nkvweave = kvweave.hosts.vllm.plugin:register\n"
_CHECKED = ("fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "pydantic_core", "starlette")
_CHECKED += ("llguidance", "prometheus_client", "python_multipart", "redis", "yaml", "faiss")
_CHECKED += ("openpyxl", "pypdf", "docx", "pptx", "selectolax", "jinja2", "click", "rich")
_CHECKED += ("platformdirs", "xxhash", "filelock", "huggingface_hub", "httpx", "psutil", "pytest")
_CHECKED += ("kvweave.serve", "kvweave.app.weave", "kvweave.cli.serve", "kvweave.corpus.embedder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pieces", type=Path, nargs="*", help="folders that pack.py made")
    parser.add_argument("--at", type=Path, required=True, help="folder outside the tree")
    parser.add_argument("--check", action="store_true", help="convert models, import everything")
    args = parser.parse_args()
    at: Path = args.at
    for folder in args.pieces:
        keep(folder, at)
    _write_env(at)
    if args.check:
        _check(at)


def keep(folder: Path, at: Path) -> None:
    """Move one piece out of the tree; join what is complete."""
    note = json.loads((folder / "note.json").read_text())
    piece = folder / "piece"
    if _sha256(piece) != note["sha256"]:
        raise SystemExit(f"{folder}: other bytes than were packed; carry it again")
    kept = at / "pieces" / note["name"]
    kept.mkdir(parents=True, exist_ok=True)
    shutil.move(piece, kept / f"{note['number']:03}")
    missing = [n for n in range(1, note["of"] + 1) if not (kept / f"{n:03}").is_file()]
    print(f"{note['name']}: piece {note['number']} of {note['of']} kept, missing {missing}")
    if missing:
        return
    whole = at / "pieces" / f"{note['name']}.whole"
    with whole.open("wb") as sink:
        for number in range(1, note["of"] + 1):
            with (kept / f"{number:03}").open("rb") as source:
                shutil.copyfileobj(source, sink, 1 << 22)
    if _sha256(whole) != note["whole"]:
        raise SystemExit(f"{note['name']}: the joined file has other bytes than were packed")
    shutil.rmtree(kept)
    _unfold(note["name"], whole, at)
    print(f"{note['name']}: whole and in place")


def _unfold(name: str, whole: Path, at: Path) -> None:
    if name in SITES:
        with tarfile.open(whole) as archive:
            archive.extractall(at / name, filter="data")
        for wheel in sorted((at / name).glob("*.whl")):
            unfold_wheel(wheel, at / SITES[name])
        for model in (at / name).glob("*.whole"):
            _place_model(model.stem, model, at)
        shutil.rmtree(at / name)
    else:
        _place_model(name, whole, at)


def _place_model(name: str, file: Path, at: Path) -> None:
    """Lay a model's file where a pull finds it fetched."""
    code = "import sys; from kvweave.model.files.embedded import EMBEDDED as e; "
    code += "print(e[sys.argv[1]].folder_name)"
    answer = subprocess.run(
        [sys.executable, "-c", code, name],
        env=_environment(at),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(answer.stderr)
    folder = at / "home" / "models" / ".downloads" / answer.stdout.strip()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.move(file, folder / f"{name}.whole")


def unfold_wheel(wheel: Path, site: Path) -> None:
    """Lay a wheel's files out for import. Scripts are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            head, _, rest = member.partition("/")
            if head.endswith(".data"):
                kind, _, inside = rest.partition("/")
                if kind not in ("purelib", "platlib") or not inside or member.endswith("/"):
                    continue
                target = site / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
            else:
                archive.extract(member, site)


def _environment(at: Path) -> dict[str, str]:
    return os.environ | _variables(at, str(REPO))


def _variables(at: Path, repo: str) -> dict[str, str]:
    return {
        "PYTHONPATH": f"{repo}/src:{at / 'site'}:{at / SITES['vllm']}",
        "KVWEAVE_HOME": str(at / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _write_env(at: Path) -> None:
    at.mkdir(parents=True, exist_ok=True)
    lines = [f"export {name}={value}" for name, value in _variables(at, "$PWD").items()]
    (at / "env").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if (vllm := at / SITES["vllm"]).is_dir():
        plugin = vllm / "kvweave-0.dist-info"
        plugin.mkdir(exist_ok=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kvweave\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text(_PLUGIN)
        # FlashInfer is not packed; nothing can be reported from there
        lines += [f"export PYTHONPATH=$PWD/src:{vllm}:{at / 'site'}"]
        lines += ["export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1"]
        (at / "vllm-env").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _check(at: Path) -> None:
    environment = _environment(at)
    downloads = at / "home" / "models" / ".downloads"
    for whole in sorted(downloads.glob("*/*.whole")):
        command = [sys.executable, "-m", "kvweave", "models", "pull", whole.stem]
        subprocess.run(command, env=environment, check=True)
    if not (at / SITES["base"]).is_dir():
        return
    code = f"import importlib\nfor name in {_CHECKED!r}:\n    importlib.import_module(name)\n"
    code += "print('all of', len(" + repr(_CHECKED) + "), 'imported')"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
