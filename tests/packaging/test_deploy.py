"""What deploy/ holds is sound: against Kubernetes' own schemas, and against our own options."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from kvweave.cli.gateway import command as gateway_command
from kvweave.cli.serve import command as serve_command
from kvweave.config import known_keys
from kvweave.config_keys import OTHER_VARIABLES

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = "1.31"  # whose schemas the manifests are held to
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[\w.-]*")
OWN = {"kvweave", "kvweave-vllm"}  # images that are built here


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for _, document in manifests() if document["kind"] in kinds]


def pods() -> list[dict[str, Any]]:
    return [w["spec"]["template"]["spec"] for w in of_kind("Deployment", "StatefulSet")]


def test_manifests_keep_the_schemas_of_kubernetes() -> None:
    found = list(manifests())
    assert len(found) > 8
    for name, document in found:
        if document["kind"] == "Kustomization":
            continue
        try:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{name}, {document['kind']}: {error.message} at {error.path}")


def test_a_manifest_with_a_misspelt_field_would_be_noticed() -> None:
    (first, *_) = of_kind("Deployment")
    broken = {**first, "spec": {**first["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_the_kustomization_names_every_file() -> None:
    (top,) = of_kind("Kustomization")
    files = {p.name for p in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(top["resources"]) == files


def test_selectors_find_their_pods_and_services_their_ports() -> None:
    labels = {}
    for workload in of_kind("Deployment", "StatefulSet"):
        template = workload["spec"]["template"]
        assert workload["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        ports = [p["name"] for c in template["spec"]["containers"] for p in c["ports"]]
        labels[template["metadata"]["labels"]["app"]] = ports
    for service in of_kind("Service"):
        app = service["spec"]["selector"]["app"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(labels[app])


def test_the_gateway_knows_every_replica_by_name() -> None:
    (replicas,) = of_kind("StatefulSet")
    name, service = replicas["metadata"]["name"], replicas["spec"]["serviceName"]
    (settings,) = of_kind("ConfigMap")
    upstreams = settings["data"]["KVWEAVE_GATEWAY_UPSTREAMS"].split(",")
    wanted = [f"http://{name}-{n}.{service}:8000" for n in range(replicas["spec"]["replicas"])]
    assert upstreams == wanted


def test_pods_run_as_ordinary_users_with_limits_and_probes() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert "readinessProbe" in container
            name = container["image"].partition(":")[0]
            assert name in OWN or PINNED.fullmatch(container["image"]), container["image"]


def test_engines_and_store_are_reached_by_those_who_need_them_alone() -> None:
    guarded = {p["spec"]["podSelector"]["matchLabels"]["app"] for p in of_kind("NetworkPolicy")}
    assert guarded == {"vllm", "valkey"}


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_hangs_together(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    known = {"name", "services", "volumes"}
    assert {key for key in document if not key.startswith("x-")} == known
    services = document["services"]
    for name, service in services.items():
        image = service["image"]
        assert image in OWN or PINNED.fullmatch(image), image
        assert ("build" in service) is (image in OWN)
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in document["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nobody else without keys"
        build = service.get("build", {})
        if isinstance(build, dict) and "dockerfile" in build:
            assert (DEPLOY.parent / build["dockerfile"]).is_file()
    for flag in (a for a in services["gateway"]["command"] if a.startswith("--upstream=")):
        host = re.fullmatch(r"--upstream=http://([a-z-]+):\d+", flag)
        assert host is not None
        assert host[1] in services


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_containers_are_read_only_and_without_capabilities(path: Path) -> None:
    for name, service in yaml.safe_load(path.read_text())["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if service["image"] == "kvweave-vllm":
            continue  # vLLM compiles into the home of its user
        assert service["read_only"] is True, name
        assert service["tmpfs"] == ["/tmp"], name


def our_commands() -> Iterator[tuple[click.Command, list[str]]]:
    """Every command of ours that a file runs, with its options."""
    for path in COMPOSE:
        for service in yaml.safe_load(path.read_text())["services"].values():
            if service["image"] == "kvweave":
                yield _command(service["command"])
    for pod in pods():
        for container in pod["containers"]:
            if container["image"].startswith("kvweave:"):
                yield _command(container["args"])


def _command(words: list[str]) -> tuple[click.Command, list[str]]:
    return {"gateway": gateway_command, "serve": serve_command}[words[0]], words[1:]


def test_our_own_commands_can_be_typed() -> None:
    found = list(our_commands())
    assert len(found) >= 4
    for command, options in found:
        plain = shlex.split(" ".join(options).replace("${", "").replace("}", ""))
        command.make_context("kvweave", plain, resilient_parsing=False)


def test_variables_are_settings() -> None:
    known = {key.variable for key in known_keys().values()} | {"KVWEAVE_API_KEYS", "MODEL"}
    named = {name for document in of_kind("ConfigMap") for name in document["data"]}
    for path in COMPOSE:
        for service in yaml.safe_load(path.read_text())["services"].values():
            named |= set(service.get("environment", ()))
    assert named <= known


def test_the_connector_is_named_in_json() -> None:
    texts = [path.read_text() for path in (COMPOSE[-1], DEPLOY / "kubernetes" / "vllm.yaml")]
    for text in texts:
        found = re.search(r"--kv-transfer-config=(\{.*\})", text)
        assert found is not None
        assert json.loads(found[1])["kv_connector"] == "KvweaveConnector"


def test_no_secret_is_in_a_file() -> None:
    for path in (p for p in DEPLOY.rglob("*") if p.is_file()):
        assert not re.search(r"sk-\w{8}|redis://[^/\s]*:[^/\s]*@", path.read_text())


def test_the_image_of_vllm_is_pinned_and_ends_as_an_ordinary_user() -> None:
    lines = (DEPLOY / "vllm.Dockerfile").read_text().splitlines()
    (base,) = (line.removeprefix("FROM ") for line in lines if line.startswith("FROM "))
    assert PINNED.fullmatch(base)
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER kvweave"
    copied = [line.split()[1] for line in lines if line.startswith("COPY ")]
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored)


def test_the_unit_of_systemd_can_be_typed() -> None:
    unit = (DEPLOY / "systemd" / "kvweave.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    program, command, *options = shlex.split(line)
    assert (Path(program).name, command) == ("kvweave", "serve")
    serve_command.make_context("kvweave", options, resilient_parsing=False)
    for name in re.findall(r"^Environment=(KVWEAVE_\w+)=", unit, re.MULTILINE):
        assert name in OTHER_VARIABLES | {key.variable for key in known_keys().values()}


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    from kvweave.serve.observe.prometheus import ServerMetrics

    board = json.loads((DEPLOY / "grafana" / "kvweave.json").read_text())
    shown = {t["expr"] for panel in board["panels"] for t in panel["targets"]}
    named = {name for expr in shown for name in re.findall(r"kvweave_\w+", expr)}
    assert len(named) > 10
    page = ServerMetrics().page().decode()
    state = {"kvweave_running", "kvweave_waiting", "kvweave_kb_open", "kvweave_kb_in_use"}
    for name in named - state - {"kvweave_kb_open_most"}:
        base = name.removesuffix("_bucket").removesuffix("_total")
        assert f"# TYPE {base} " in page or f"# TYPE {base}_total " in page, name
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
