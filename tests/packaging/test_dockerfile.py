"""What a linter would ask of the Dockerfile: an ordinary user, a pinned base, no secrets."""

import re
import tomllib
from pathlib import Path

from kvweave.config import ServerSettings

REPO = Path(__file__).resolve().parents[2]


def instructions(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) in order; lines that go on are joined, comments dropped."""
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = kept.replace("\\\n", " ").splitlines()
    pairs = (line.split(None, 1) for line in lines if line.strip())
    return [(name.upper(), " ".join(rest[0].split()) if rest else "") for name, *rest in pairs]


ALL = instructions((REPO / "Dockerfile").read_text())
LAST_STAGE = ALL[max(i for i, (name, _) in enumerate(ALL) if name == "FROM") :]


def of(name: str, among: list[tuple[str, str]] = ALL) -> list[str]:
    return [arguments for each, arguments in among if each == name]


def test_bases_are_slim_and_pinned_to_a_patch() -> None:
    for base in of("FROM"):
        assert re.match(r"python:\d+\.\d+\.\d+-slim-\w+( AS \w+)?$", base), base


def test_it_runs_as_an_ordinary_user_that_owns_its_volume() -> None:
    (user,) = of("USER", LAST_STAGE)
    assert user not in ("root", "0")
    (made,) = (run for run in of("RUN", LAST_STAGE) if "useradd" in run)
    assert f"useradd --uid 10001 --create-home {user}" in made
    (volume,) = of("VOLUME", LAST_STAGE)
    assert f"install -d -o {user} -g {user} {volume}" in made
    assert any(f"KVWEAVE_HOME={volume}" in env for env in of("ENV", LAST_STAGE))
    order = [name for name, _ in LAST_STAGE]
    assert order.index("USER") < order.index("ENTRYPOINT")


def test_it_says_whether_it_is_alive_on_the_port_it_serves() -> None:
    (check,) = of("HEALTHCHECK", LAST_STAGE)
    port = ServerSettings().port
    assert f"http://127.0.0.1:{port}/healthz" in check
    assert of("EXPOSE", LAST_STAGE) == [str(port)]
    assert of("ENTRYPOINT", LAST_STAGE) == ['["kvweave"]'], "exec form: signals reach the server"


def test_packages_stand_in_layers_before_the_code_and_leave_no_cache() -> None:
    steps = [f"{name} {arguments}" for name, arguments in ALL]
    torch = next(i for i, step in enumerate(steps) if "pip install" in step and "torch" in step)
    hashed = next(i for i, step in enumerate(steps) if "-r requirements.lock" in step)
    code = steps.index("COPY src src")
    assert torch < hashed < code
    assert "-c constraints.txt" in steps[torch]
    assert "--no-deps --require-hashes" in steps[hashed]
    assert "pip install --no-deps . && pip check" in steps[code + 1], "nothing else comes along"
    assert "PIP_NO_CACHE_DIR=1" in " ".join(of("ENV"))


def test_the_lock_has_hashes_and_the_tested_versions_and_names_no_index() -> None:
    lock = (REPO / "requirements.lock").read_text()
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+) ", lock, re.MULTILINE))
    assert {"fastapi", "faiss-cpu", "tokenizers", "uvloop", "boto3", "redis"} <= pinned.keys()
    assert {"llguidance", "pyyaml", "openpyxl", "python-pptx"} <= pinned.keys(), "what is offered"
    assert "transformers" not in pinned, "no extra of the image wants it"
    tested = {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)$", (REPO / "constraints.txt").read_text(), re.MULTILINE
        )
    }
    differ = {n: (v, tested[n]) for n, v in pinned.items() if tested.get(n, v) != v}
    assert differ == {}
    blocks = re.split(r"^(?=[a-z0-9])", lock.partition("\nannotated-doc")[2], flags=re.MULTILINE)
    assert all("--hash=sha256:" in block for block in blocks)
    assert not re.search(r"://|--index|--extra-index|^(torch|triton|nvidia)", lock, re.MULTILINE)


def test_the_lock_covers_what_is_asked_for() -> None:
    """By name: a new dependency without a line in the lock would be missing in the image."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(d for e in ("serve", "rag", "remote") for d in extras[e])]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", d)[0]).lower() for d in asked}  # type: ignore[index]
    lock = (REPO / "requirements.lock").read_text()
    # torch by itself, see the lock; pip is the environment's own
    assert names - {"torch", "pip"} <= set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))


def test_no_secret_and_no_more_than_is_needed_goes_in() -> None:
    for name in ("ENV", "ARG"):
        for arguments in of(name):
            assert not re.search(r"KEY|TOKEN|PASSWORD|SECRET", arguments, re.IGNORECASE)
    assert not of("ADD")
    allowed = {
        line[1:]
        for line in (REPO / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for arguments in of("COPY"):
        if not arguments.startswith("--from"):
            for source in arguments.split()[:-1]:
                assert source.split("/")[0] in allowed, source
                assert (REPO / source).exists(), source
