"""`kvweave doctor`: what is here, what is missing, and what to do about it."""

import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from kvweave import __version__, paths
from kvweave.cli import EXTRAS
from kvweave.cli.options import (
    config_option,
    json_option,
    kb_folder_option,
    model_options,
    pass_config,
    store_options,
)
from kvweave.cli.tables import progress_text, size_text, time_text
from kvweave.config import EffectiveConfig, ModelChoice, StoreSettings
from kvweave.errors import ConfigError, CorpusError, KVWeaveError, ModelNotFound, TierError

if TYPE_CHECKING:
    from kvweave.app.library.runtime import ModelRuntime

State = Literal["ok", "warn", "fail"]
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
ROOM_BYTES = 4 << 30  # free on the disk: the default model takes most of it while it is made
SAMPLE = 200  # objects of chunk KV whose headers are read


class Finding(NamedTuple):
    """One line: what was looked at, and what was found."""

    name: str
    state: State
    found: str
    way_out: str = ""  # what to do; empty where nothing has to be done


@click.command("doctor")
@kb_folder_option(
    "Look at this knowledge base, in place of those of --kb-root and of ./kb.", exists=True
)
@config_option("server.kb_root")
@model_options
@store_options
@json_option
@pass_config
@click.pass_context
def command(
    ctx: click.Context, kb_folder: Path | None, as_json: bool, effective: EffectiveConfig
) -> None:
    """Check this installation: packages, device, compiler, model, calibration, stored KV and tiers.

    Loads the model if it is here, and downloads nothing. The exit code is 1 where a line says fail.
    """
    findings = []
    for finding in _look(kb_folder, effective):
        findings.append(finding)
        if not as_json:
            _show(finding)
    num_failed = sum(finding.state == "fail" for finding in findings)
    if as_json:
        told = [finding._asdict() for finding in findings]
        click.echo(json.dumps({"ok": not num_failed, "findings": told}, indent=2))
    if num_failed:
        ctx.exit(1)


def _show(finding: Finding) -> None:
    mark = click.style(f"{finding.state:<5}", fg=COLOURS[finding.state])
    way_out = f"; {finding.way_out}" if finding.way_out else ""
    click.echo(f"{mark} {finding.name:<12} {finding.found}{way_out}")


def _look(kb_folder: Path | None, effective: EffectiveConfig) -> Iterator[Finding]:
    config = effective.config
    yield from _packages()
    yield _home(paths.home())
    yield _device(config.model.device)
    yield _compiler()
    yield from _model(config.model, config.store.codec)
    yield from _tiers(config.store)
    folders = [kb_folder] if kb_folder else _folders(config.server.kb_root or paths.kb_root())
    if not folders:
        way_out = "make one: kvweave ingest PATH --kb DIR, or upload to a server"
        yield Finding("documents", "ok", "no knowledge base yet", way_out)
    for folder in folders:
        yield from _knowledge_base(folder)


def _packages() -> Iterator[Finding]:
    about = f"{__version__}, Python {platform.python_version()}, torch {_version('torch')}"
    yield Finding("kvweave", "ok", about)
    for extra in sorted(set(EXTRAS.values())):
        missing = [p for p in EXTRAS if EXTRAS[p] == extra and find_spec(p) is None]
        if missing:
            way_out = f"pip install 'kvweave[{extra}]'"
            yield Finding(extra, "warn", f"{', '.join(missing)} not found", way_out)
        else:
            yield Finding(extra, "ok", "all packages of this extra are here")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _home(home: Path) -> Finding:
    """The folder of models and profiles, or the one above that it will be made in."""
    there = next(each for each in (home, *home.parents) if each.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("home", "fail", f"{there} cannot be written", "set KVWEAVE_HOME to a folder")
    free = shutil.disk_usage(there).free
    found = f"{home}, {size_text(free)} free"
    if free < ROOM_BYTES:
        way_out = f"a model needs up to {size_text(ROOM_BYTES)}; free some, or set KVWEAVE_HOME"
        return Finding("home", "warn", found, way_out)
    return Finding("home", "ok", found)


def _device(wanted: str) -> Finding:
    import torch

    if torch.cuda.is_available() and wanted != "cpu":
        try:
            about = torch.cuda.get_device_properties(wanted if ":" in wanted else "cuda")
        except (AssertionError, RuntimeError) as error:  # no such number, or it does not answer
            words = f"{wanted} does not answer: {str(error).splitlines()[0]}"
            return Finding("device", "fail", words, "leave --device out, or name one that is there")
        return Finding("device", "ok", f"{about.name}, {size_text(about.total_memory)}")
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    if wanted.startswith("cuda"):
        way_out = "leave --device out, or install a driver and a torch that fit the GPU"
        return Finding("device", "fail", f"{wanted} is wanted and torch finds no GPU", way_out)
    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("device", "ok", f"CPU ({capability}), {threads}")


def _compiler() -> Finding:
    """Whether kernels for this CPU are compiled, or can be: a server does it once."""
    from kvweave.kernels.native.loading import native_kernels

    library, words = native_kernels()
    return Finding("compiler", "ok" if library is not None else "warn", words)


def _model(choice: ModelChoice, codec: str | None) -> Iterator[Finding]:
    """The model, and what is known of it; none of it where the model is not here."""
    from kvweave.app.library.runtime import RANDOM, ModelRuntime
    from kvweave.model.files.embedded import DEFAULT
    from kvweave.model.files.locate import locate

    name = choice.model or DEFAULT
    if name.startswith(RANDOM):
        yield Finding("model", "warn", f"{name} has random weights, for load tests")
        return
    if name.lower().endswith(".gguf") and Path(name).is_file():
        found = f"{name} is a file; its first use converts it, in minutes"
        yield Finding("model", "ok", found, "then `kvweave doctor` with the folder says more")
        return
    try:
        locate(name, pull=False)
    except ModelNotFound as error:
        yield _missing_model(name, str(error))
        return
    try:
        began_s = time.perf_counter()
        runtime = ModelRuntime.open(replace(choice, model=name))
    except (KVWeaveError, RuntimeError) as error:  # the latter: the device has no room
        words = str(error).splitlines()[0]
        yield Finding("model", "fail", f"{name} cannot be loaded: {words}")
        return
    with closing(runtime):
        took = time_text(time.perf_counter() - began_s)
        found = f"{runtime.name}, {runtime.decoder.weights_detail}; loaded in {took}"
        yield Finding("model", "ok", found)
        yield _calibration(runtime)
        yield _prices(runtime, codec)


def _missing_model(name: str, why: str) -> Finding:
    from kvweave.model.files.embedded import EMBEDDED

    if name in EMBEDDED:
        way_out = f"the first start gets it; or now: kvweave models pull {name}"
        return Finding("model", "warn", f"{name} is not on this machine", way_out)
    return Finding("model", "fail", why)


def _calibration(runtime: "ModelRuntime") -> Finding:
    """Whether there are tables for these very weights in this precision."""
    from kvweave.calibrate.profiles import find_profile

    again = "kvweave calibrate quick --kb DIR; until then only what is exact is reused"
    as_what = runtime.decoder.calibrated_as
    try:
        profile = find_profile(as_what.fingerprint, runtime.tokenizer.fingerprint)
    except ConfigError as error:
        return Finding("calibration", "fail", str(error))
    tables = () if profile is None else profile.calibration
    if not tables:
        return Finding("calibration", "warn", "this model was never calibrated", again)
    fitting = [table for table in tables if table.revision == as_what.revision]
    if not fitting:
        dtypes = ", ".join(sorted({table.dtype for table in tables}))
        held = str(runtime.decoder.dtype).removeprefix("torch.")
        found = f"calibrated as {dtypes} and runs as {held}"
        if runtime.decoder.revision_in_float32 in {table.revision for table in tables}:
            found += ", which a server takes for the same once it has measured the rounding"
        return Finding("calibration", "warn", found, f"--dtype {dtypes.split(',')[0]}, or {again}")
    questions = sum(table.num_questions for table in fitting)
    encodings = ", ".join(sorted({table.encoding for table in fitting}))
    found = f"{len(fitting)} tables, {questions:,} questions, for chunk KV by {encodings}"
    return Finding("calibration", "ok", found)


def _prices(runtime: "ModelRuntime", codec: str | None) -> Finding:
    """Whether the machine was measured with this model."""
    from kvweave.app.auto.machine_profile import find_machine
    from kvweave.app.library.library_kv import CODEC

    machine = find_machine(runtime.decoder, codec or CODEC)
    if machine is None:
        way_out = "a server does it by itself; or now: kvweave measure"
        return Finding("prices", "warn", "this machine was never measured with this model", way_out)
    if machine.is_provisional:
        found = "measured while other programs computed"
        return Finding("prices", "warn", found, "when they rest: kvweave measure --renew")
    heard = machine.heard.exact + machine.heard.fused
    return Finding("prices", "ok", f"measured; {heard:,} answers moved them since")


def _tiers(store: StoreSettings) -> Iterator[Finding]:
    """Each place for chunk KV: the settings of this machine, then what machines share."""
    from kvweave.app.library.store_tiers import check_store, remote_tiers
    from kvweave.kv.tiers import open_tier

    local = dict.fromkeys(("redis_url", "redis_ttl_s", "s3_url", "s3_endpoint", "s3_region"))
    try:
        check_store(replace(store, **local))
        remote = remote_tiers(store)
    except ConfigError as error:
        yield Finding("store", "fail", str(error))
        return
    where = store.disk_folder or "the folder of each knowledge base"
    disk = "no disk" if store.disk_bytes == 0 else where
    shared = "" if remote else ", no tier that machines share"
    yield Finding("store", "ok", f"host memory, {disk}{shared}")
    for cfg in remote:
        place, began_s = cfg.place.split()[0], time.perf_counter()
        try:
            with closing(open_tier(cfg)) as tier:
                tier.check()
        except (ConfigError, TierError) as error:
            way_out = f"start it, or leave store.{cfg.kind}_url out"
            yield Finding(cfg.kind, "fail", f"{place}: {error}", way_out)
            continue
        yield Finding(cfg.kind, "ok", f"{place} answers in {_ms(began_s)}")


def _ms(began_s: float) -> str:
    return f"{(time.perf_counter() - began_s) * 1e3:.0f} ms"


def _folders(root: Path) -> list[Path]:
    """The knowledge bases that a server has, and the one that `kvweave ingest` makes."""
    from kvweave.corpus.settings import FILE

    candidates: Sequence[Path] = (*(sorted(root.glob("*")) if root.is_dir() else ()), Path("kb"))
    return [folder for folder in candidates if (folder / FILE).is_file()]


def _knowledge_base(folder: Path) -> Iterator[Finding]:
    """Catalogue and index open; headers of some stored KV are whole."""
    from kvweave.app.library.kv_progress import progress_on_disk
    from kvweave.corpus.knowledge_base import KnowledgeBase

    name = "documents"
    try:
        with KnowledgeBase.open(folder) as kb:
            totals, progress = kb.totals(), progress_on_disk(kb)
    except CorpusError as error:
        yield Finding(name, "fail", f"{folder}: {error}", f"kvweave kb check --kb {folder}")
        return
    held = f"{totals.num_documents:,} documents, {progress_text(progress)}"
    yield Finding(name, "ok", f"{folder}: {held}")
    damaged, looked_at = _damaged_headers(folder)
    if damaged:
        found = f"{folder}: {damaged} of {looked_at} objects looked at are damaged"
        way_out = f"they are computed again; kvweave cache verify --repair --store {folder}"
        yield Finding("stored KV", "fail", found, way_out)
    elif looked_at:
        yield Finding("stored KV", "ok", f"{folder}: headers of {looked_at} objects are whole")


def _damaged_headers(folder: Path) -> tuple[int, int]:
    """How many objects are damaged, of how many: the first few of each folder of chunk KV."""
    from kvweave.cli.cache import header_of, kv_folders
    from kvweave.errors import TierForeign
    from kvweave.kv.tiers.config import DiskTierConfig
    from kvweave.kv.tiers.disk import DiskTier

    damaged = looked_at = 0
    for place in kv_folders(folder):
        tier = DiskTier(DiskTierConfig(place), sweep=False)
        for each in islice(tier.scan(), SAMPLE):
            looked_at += 1
            try:
                header_of(tier, each.key)
            except TierForeign:  # of another version: taken for a miss, not damaged
                continue
            except TierError:
                damaged += 1
    return damaged, looked_at
