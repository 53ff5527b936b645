"""`kvweave why` against a running server: the last answer, one by its id, and what is not kept."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvweave.app.weave import Weave
from kvweave.cli import cli
from kvweave.clients.server import ServerClient, ServerFailed
from worlds.serving import make_libraries, make_weave, serving, user


@pytest.fixture(scope="module")
def weave(chat_model_folder: Path) -> Weave:
    return make_weave(chat_model_folder)


@pytest.fixture(scope="module")
def client(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("kbs"))
    with serving(weave, libraries=libraries) as url:
        yield ServerClient(url)
    libraries.close()


def why(client: ServerClient, *typed: str) -> Result:
    command = ["why", *typed, "--url", client.url]
    return CliRunner().invoke(cli, command, standalone_mode=False)


def test_an_answer_is_told_by_its_id_and_the_last_one_without(client: ServerClient) -> None:
    nothing = why(client)
    assert "keeps no answer yet" in str(nothing.exception)
    client.upload_text("notes", "Zorbs", "A zorb is 14 cm wide.")
    first = client.chat(user("How wide is a zorb?"), kb="notes", max_tokens=3)
    client.chat(user("Something else?"), max_tokens=3)
    told = why(client, first["id"]).stdout
    assert first["id"] in told
    assert "of 'notes'" in told
    assert "How wide is a zorb?" in told
    assert f"of {first['usage']['prompt_tokens']:,} tokens; first token after" in told
    assert "Zorbs" in told
    assert "Something else?" in why(client).stdout
    document = json.loads(why(client, first["id"], "--json").stdout)
    assert document["id"] == first["id"]
    assert document["explain"]["tokens"]


def test_an_answer_that_is_not_kept_is_one_line(client: ServerClient) -> None:
    missing = why(client, "chatcmpl-none")
    assert isinstance(missing.exception, ServerFailed)
    assert "'chatcmpl-none' is not kept here" in str(missing.exception)
