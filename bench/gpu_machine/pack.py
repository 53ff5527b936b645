"""Packs what a server needs for a machine without a network, in pieces that its transfers take.

    python bench/gpu_machine/pack.py --to carry --at PLACE

PLACE is a folder on that machine, outside the tree. What is packed:

    base                   wheels for Python 3.12 on x86-64 Linux, and the embedder's, as one tar
    qwen2.5-coder-0.5b     the file that `kvweave models pull` would fetch; others by --models
    vllm                   with --vllm: the newest vLLM for the PyTorch of that machine, lean: what
                           text on a Hopper GPU imports (vllm.txt), for `bench/vllm_gpu.py`

Each is cut into pieces, a folder each. CALLS.md, beside them, lists one call per piece: the folder
to carry along and the command that puts it away. The tree brings `unpack.py` itself. The call that
brings the last piece of something joins, checks and unfolds it. What a machine with PyTorch and
transformers has anyway is not packed.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from kvweave.model.files.embedded import EMBEDDED
from kvweave.model.files.sources import Workplace, fetch_first
from kvweave.paths import sha256_of

REPO = Path(__file__).resolve().parents[2]
PIECE_BYTES = 55_000_000  # beside the tree, below 64 MiB
EMBEDDER = "minilm"
_BLOCK = 1 << 20
# come with PyTorch and transformers, or are of no use without a network
_THERE = {
    *("boto3", "botocore", "colorama", "filelock", "fsspec", "hf-xet", "httpcore2", "httpx2"),
    *("httpx2-jsfetch", "huggingface-hub", "jinja2", "jmespath", "markupsafe", "mpmath"),
    *("networkx", "numpy", "s3transfer", "safetensors", "sympy", "tokenizers", "tqdm"),
    "truststore",
}
_FOR_BENCHES = ("httpx", "httpcore", "certifi", "psutil")
_FOR_TESTS = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "hypothesis", "sortedcontainers")
_PIN_LINE = re.compile(r"^[^\s#]+==[^\s#]+", re.MULTILINE)
# of vLLM's wheel: FlashAttention 2 (a Hopper GPU has 3), experts, other GPUs, the server in Rust.
# All of these are imported with a fallback, or where something else asks for them.
_LEFT_OUT = (
    *("*_vllm_fa2_C*", "*_moe_C*", "*_flashmla*", "*_qutlass_C*", "*/vllm-rs", "*_rust_*"),
    *("vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "*/tml_fa4/*", "*.jpg"),
    *("vllm/vllm_flash_attn/cute/*", "*/static/*"),
)
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=Path, default=Path("carry"), help="folder that git ignores")
    parser.add_argument("--at", required=True, help="folder on the other machine")
    parser.add_argument("--models", nargs="*", default=["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
    parser.add_argument("--vllm", action="store_true", help="pack vLLM too")
    parser.add_argument("--files", type=Path, help="folder that keeps what was fetched before")
    args = parser.parse_args()
    kept = args.files or args.to / "fetched"
    wholes = [("base", _base(kept))]
    if args.vllm:
        wholes.append(("vllm", _vllm(kept)))
    wholes += [(name, _model_file(name, kept)) for name in args.models]
    lines = ["# Calls, one after the other", ""]
    for name, file in wholes:
        for folder in cut(file, name, args.to):
            place = folder.relative_to(args.to.parent) if args.to.is_absolute() else folder
            command = f"python3 bench/gpu_machine/unpack.py --at {args.at} {place}"
            size = sum(each.stat().st_size for each in folder.iterdir()) / 1e6
            lines.append(f"- `{command}` with carry `{place}` ({size:.1f} MB)")
    lines += ["", "Once, when all pieces that are wanted are there:", ""]
    lines.append(f"- `python3 bench/gpu_machine/unpack.py --at {args.at} --check`")
    lines += ["", "In front of every command that uses it:", ""]
    lines.append(f"- `. {args.at}/env`")
    (args.to / "CALLS.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def cut(file: Path, name: str, to: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Path]:
    """Folders of the pieces of a file, each with a note of what it is a piece of."""
    count = -(-file.stat().st_size // piece_bytes)
    whole = sha256_of(file)
    with file.open("rb") as source:
        for number in range(1, count + 1):
            folder = to / f"{name}-{number:02}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            piece, left = folder / "piece", piece_bytes
            with piece.open("wb") as sink:
                while left and (block := source.read(min(left, _BLOCK))):
                    sink.write(block)
                    left -= len(block)
            note = {"name": name, "number": number, "of": count, "whole": whole}
            note["sha256"] = sha256_of(piece)
            (folder / "note.json").write_text(json.dumps(note), encoding="utf-8")
            yield folder


def _base(kept: Path) -> Path:
    wheels = kept / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    _download(_wanted(), wheels)
    embedder = wheels / f"{EMBEDDER}.whole"
    shutil.copyfile(_model_file(EMBEDDER, kept), embedder)
    return _tar(kept / "base.tar", sorted(wheels.iterdir()))


def _vllm(kept: Path) -> Path:
    """vLLM without what a dense model on a Hopper GPU never loads, and what it imports."""
    wheels = kept / "vllm"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    _download(_PIN_LINE.findall((Path(__file__).parent / "vllm.txt").read_text()), wheels)
    (whole,) = wheels.glob("vllm-*.whl")
    lean_wheel(whole, whole.with_suffix(".lean"), _LEFT_OUT)
    whole.with_suffix(".lean").replace(whole)
    return _tar(kept / "vllm.tar", sorted(wheels.iterdir()))


def lean_wheel(wheel: Path, to: Path, left_out: Sequence[str]) -> None:
    """Write a wheel again without the files that match one of some patterns."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as sink:
        for member in source.infolist():
            if not any(fnmatch(member.filename, pattern) for pattern in left_out):
                sink.writestr(member, source.read(member))


def _wanted() -> list[str]:
    """Pins of the image, without what is there, and of what benches and tests import."""
    locked = dict(_PIN.findall((REPO / "requirements.lock").read_text()))
    pinned = dict(_PIN.findall((REPO / "constraints.txt").read_text()))
    names = {name: version for name, version in locked.items() if name not in _THERE}
    names |= {name: pinned[name] for name in (*_FOR_BENCHES, *_FOR_TESTS)}
    return [f"{name}=={version}" for name, version in sorted(names.items())]


def _download(pins: Sequence[str], to: Path) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (39, 34, 31, 28, 26, 24, 17)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(to), "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    command += [f"--platform={name}" for name in (*platforms, "manylinux2014_x86_64", "any")]
    subprocess.run([*command, *pins], check=True)


def _model_file(name: str, kept: Path) -> Path:
    model = EMBEDDED[name]
    scratch = kept / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    folder = kept / model.folder_name
    folder.mkdir(parents=True, exist_ok=True)
    at = Workplace(folder, scratch, lambda step: None)
    return fetch_first(model.sources, model.sha256, name, at)


def _tar(file: Path, members: Sequence[Path]) -> Path:
    with tarfile.open(file, "w") as archive:
        for member in members:
            archive.add(member, member.name)
    return file


if __name__ == "__main__":
    main()
