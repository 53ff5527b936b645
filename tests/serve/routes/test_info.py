"""GET /v1/info and the sample corpus."""

import json
from pathlib import Path

import httpx

import kvweave
from kvweave.app.answer.question import PLAIN_REUSES
from kvweave.app.dial import REUSES
from kvweave.app.libraries.libraries import Libraries
from kvweave.app.weave import Weave
from kvweave.demo import PASSAGES, SHOWN, read_questions
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.routes.context import PageConfig
from worlds.serving import KbServer, make_libraries, serving, user


def test_the_first_page_hears_all_it_needs_in_one_call(kb_server: KbServer) -> None:
    told = httpx.get(f"{kb_server.url}/v1/info").json()
    assert (told["model"], told["context"]) == ("tiny", kb_server.weave.max_context)
    assert told["version"] == kvweave.__version__
    assert (told["keys"], told["kb_root"], told["conversations"]) == (False, True, False)
    assert (told["kept_answers"], told["tenant"], told["engine"]) == (64, "", True)


def test_each_position_of_the_dial_can_be_asked_for(kb_server: KbServer) -> None:
    upload = f"{kb_server.url}/v1/kb/dialled/documents?wait_for_kv=true"
    note = {"title": "Drain", "text": "To drain a node, cordon it first."}
    assert httpx.post(upload, json=note, timeout=60).status_code == 200
    dial = httpx.get(f"{kb_server.url}/v1/info").json()["dial"]
    assert [position["name"] for position in dial] == ["exact", "auto", "fast", "fastest"]
    for position in dial:
        reuse = position["reuse"]
        name = reuse if isinstance(reuse, str) else reuse["strategy"]
        assert name in REUSES
        assert position["needs_chunks"] == (name not in PLAIN_REUSES)
        assert len(position["words"]) > 20
        body = {"messages": user("drain?"), "reuse": reuse, "kb": "dialled", "max_tokens": 2}
        chat = f"{kb_server.url}/v1/chat/completions"
        assert httpx.post(chat, json=body, timeout=60).status_code == 200, position
        plain = httpx.post(chat, json={**body, "kb": None}, timeout=60)
        assert (plain.status_code == 400) == position["needs_chunks"]


def test_a_server_with_keys_says_so_and_whose_key_it_is(weave: Weave, tmp_path: Path) -> None:
    page = PageConfig(5, tmp_path)
    with serving(weave, keys=parse_keys(["sk-acme-1:acme"]), page=page) as url:
        assert httpx.get(f"{url}/v1/info").status_code == 401
        headers = {"Authorization": "Bearer sk-acme-1"}
        told = httpx.get(f"{url}/v1/info", headers=headers).json()
        assert (told["keys"], told["tenant"], told["kept_answers"]) == (True, "acme", 5)
        assert (told["conversations"], told["kb_root"]) == (True, False)


def test_the_sample_is_taken_in_once_and_its_questions_find_their_passages(
    weave: Weave, tmp_path: Path
) -> None:
    libraries = make_libraries(weave, tmp_path)
    with serving(weave, libraries=libraries) as url:
        before = httpx.get(f"{url}/v1/demo", timeout=60).json()
        assert (before["loaded"], before["name"]) == (False, "demo")
        headers = {"Accept": "text/event-stream"}
        with httpx.stream("POST", f"{url}/v1/demo", headers=headers, timeout=300) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
        assert lines[-1] == "data: [DONE]"
        assert {e["object"] for e in events[:-1]} <= {"ingest.progress"}
        assert (events[-1]["object"], events[-1]["added"]) == ("ingest", 48)
        after = httpx.get(f"{url}/v1/demo", timeout=60).json()
        assert (after["loaded"], after["documents"]) == (True, len(list(PASSAGES.glob("*.md"))))
        assert after["questions"] == [read_questions()[i].question for i in SHOWN]
        again = httpx.post(f"{url}/v1/demo", timeout=300).json()
        assert (again["report"]["added"], again["report"]["unchanged"]) == (0, 48)
        assert again["questions"] == after["questions"]
    libraries.close()


def test_without_a_root_the_sample_cannot_be_taken_in(weave: Weave) -> None:
    with serving(weave, libraries=Libraries(weave)) as url:
        reply = httpx.post(f"{url}/v1/demo")
        assert reply.status_code == 404
        assert "--kb-root" in reply.json()["error"]["message"]
        assert httpx.get(f"{url}/v1/demo").json()["loaded"] is False
