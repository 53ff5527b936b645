"""What every test may rely on: no hub, and subprocesses that find this checkout's package."""

import os
import ssl
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

SRC = str(Path(__file__).resolve().parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small products on two threads mostly wait for each other, worse when anything else runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Homes of tests are new; what is compiled for this CPU is the same in all of them.
if "KVWEAVE_NATIVE" not in os.environ:
    from kvweave.paths import home

    os.environ["KVWEAVE_NATIVE"] = str(home() / "native")
# How long one example takes says something of the machine, not of what is tested.
with suppress(ImportError):  # a machine that runs the tests of the GPU alone
    from hypothesis import settings

    settings.register_profile("kvweave", deadline=None)
    settings.load_profile("kvweave")
# A server that is given no folder of knowledge bases has one of its own: not the user's here.
_DATA = TemporaryDirectory(prefix="kvweave-tests-")
os.environ["XDG_DATA_HOME"] = _DATA.name


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_quiet() -> Iterator[None]:
    """Chunks that come back are stored as soon as no answer is in the making."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvweave.engine.background.QUIET_S", 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_bundle_of_certificates() -> Iterator[None]:
    """Clients of httpx share what each of them would read anew, for plain HTTP too: all authorities
    of the web, 40 ms of a core. Contexts that are made in any other way are not touched."""
    bundles = {os.environ.get("SSL_CERT_FILE")}
    with suppress(ImportError):  # a machine that runs the tests of the GPU alone
        import certifi

        bundles.add(certifi.where())
    make = ssl.create_default_context
    shared = cache(lambda bundle: make(cafile=bundle))

    def make_or_share(*args: Any, **options: Any) -> ssl.SSLContext:
        if not args and options.keys() == {"cafile"} and options["cafile"] in bundles:
            return shared(options["cafile"])
        return make(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", make_or_share)
        yield


@pytest.fixture(scope="session")
def chat_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template; shared, so only for reading."""
    from worlds.tiny_models import make_chat_model_folder

    return make_chat_model_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server, once for all tests."""
    from worlds.servers import running_redis

    with running_redis(tmp_path_factory.mktemp("redis")) as port:
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3-compatible server with the bucket "chunks", and credentials for it."""
    from worlds.servers import running_s3

    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        import boto3

        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="chunks")
        client.close()
        yield endpoint
