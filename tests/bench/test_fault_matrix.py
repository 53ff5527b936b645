"""The fault matrix in short: a few faults of each tier of a real server, its proxies, its page.

The whole of it is `python bench/fault_matrix.py`; what it found is docs/reliability.md.
"""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.results import read_results
from fault_matrix import DEVICE_OUT, OUT, PAGE, RESTARTS_OUT
from reliability.fault_proxies import Layers, ValkeyProxy, closing_proxy
from reliability.fault_rules import (
    CORRUPTED,
    ERROR,
    EVICT,
    FULL,
    GONE,
    HANG,
    LOAD_FIRST,
    LOAD_MIDDLE,
    LOOKUP,
    SAVE,
    FaultRule,
    Strikes,
)
from reliability.fault_server import Reply, grown
from reliability.fault_world import Truth
from reliability.faults import run_faults
from reliability.reliability_page import latest, page_of, summary
from reliability.tenants import rank_test
from worlds.servers import running_redis

SHORT = {
    "valkey": {(LOAD_MIDDLE, CORRUPTED), (LOAD_FIRST, HANG), (LOOKUP, ERROR)},
    "disk": {(LOAD_FIRST, CORRUPTED), (SAVE, FULL), (LOAD_MIDDLE, GONE)},
    "host": {(LOAD_FIRST, ERROR)},
    "engine": {("forward", "out of device memory")},
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tier", ["valkey", "s3", "disk", "host", "engine"])
def test_every_fault_of_a_tier_leaves_right_answers(tier: str, tmp_path: Path) -> None:
    """Some minutes each."""
    _all_is_well(run_faults(tmp_path, [tier], reps=1))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute; much longer on a busy machine
def test_a_few_faults_of_each_tier_leave_right_answers(tmp_path: Path) -> None:
    found = run_faults(
        tmp_path, SHORT, reps=1, only=lambda tier, op, kind: (op, kind) in SHORT[tier]
    )
    _all_is_well(found)
    struck = {(row["tier"], row["op"], row["kind"]) for row in found["rows"]}
    assert struck == {(tier, *each) for tier, some in SHORT.items() for each in some}


def _all_is_well(found: dict[str, Any]) -> None:
    assert [row for row in found["rows"] if row["problems"]] == []
    assert (found["lost"], found["failed"]) == ([], [])


# ── the page ─────────────────────────────────────────────────────────────────


def test_the_page_says_what_the_results_say() -> None:
    restarts = [read_results(each) for each in RESTARTS_OUT if each.exists()]
    found = page_of(read_results(OUT), read_results(DEVICE_OUT), restarts)
    assert PAGE.read_text() == found, "python bench/fault_matrix.py --page"


@pytest.mark.parametrize("out", [OUT, DEVICE_OUT], ids=lambda out: out.stem)
def test_the_fields_in_front_sum_up_the_runs(out: Path) -> None:
    results = json.loads(out.read_text())
    for name, value in summary(results["runs"]).items():
        assert results[name] == value


def row(**more: Any) -> dict[str, Any]:
    usual = {"tier": "disk", "op": SAVE, "kind": FULL, "seed": 1, "status": 200, "problems": []}
    return {**usual, "extra_s": 0.5, "recovered_s": 1.0, "counters": {}, **more}


def test_a_sum_counts_what_went_wrong() -> None:
    rows = [row(), row(problems=["wrong answer"]), row(status=-1, problems=["stuck"], extra_s=9.0)]
    run = {"commit": "c", "device": "d", "faults": {"rows": rows, "lost": ["a"]}}
    earlier = {
        "commit": "b",
        "device": "d",
        "faults": {"rows": [], "lost": []},
        "kills": {"kills": 7},
    }
    found = summary([earlier, run])
    assert (found["faults"], found["kills"], found["wrong_answers"]) == (3, 7, 1)
    assert (found["lost_documents"], found["stuck_requests"]) == (1, 1)
    assert found["p99_extra_s"] == {FULL: 9.0}
    assert "| disk | save | full | c, 1 | wrong answer | this |" in page_of({"runs": [run]})


def test_a_fault_that_was_mended_is_told_with_the_commit_that_shows_it() -> None:
    rows = {"b": [row(problems=["no counter tells of it"])], "c": [row()]}
    runs = [{"commit": at, "device": "d", "faults": {"rows": rows[at]}} for at in rows]
    runs[0]["note"] = "nothing was there to be deleted"
    found = summary(runs)
    assert (found["not_as_expected"], found["not_as_expected_now"]) == (1, 0)
    page = page_of({"runs": runs})
    told = "| disk | save | full | b, 1 | no counter tells of it | as it should be, c |"
    assert told in page
    assert "- b: nothing was there to be deleted" in page
    assert summary(runs[:1])["not_as_expected_now"] == 1
    runs[1]["faults"]["rows"].insert(0, row(problems=["stuck"], seed=2))
    assert summary(runs)["not_as_expected_now"] == 1, "another seed of the last run"


def test_kills_of_all_runs_are_added_and_their_failures_are_told() -> None:
    kills = {
        "kills": 60,
        "kills_by_kind": {"ingest": 20, "docs rm": 40},
        "seed": 3,
        "lost_documents": 0,
        "failures": [],
    }
    failure = {"round": 8, "moment": "0.2 s behind change 3", "found": ["note 4 is absent"]}
    failed = {**kills, "lost_documents": 1, "failures": [failure]}
    runs = [
        {"commit": "b", "device": "d", "kills": kills},
        {"commit": "c", "device": "d", "kills": failed},
    ]
    part = latest(runs)["kills"]
    assert (part["kills"], part["kills_by_kind"]) == (120, {"ingest": 40, "docs rm": 80})
    assert (summary(runs)["kills"], summary(runs)["lost_documents"]) == (120, 1)
    page = page_of({"runs": runs})
    assert "Commit b, c. 120 in all." in page
    assert "- round 8, moment 0.2 s behind change 3: note 4 is absent" in page


# ── its parts ────────────────────────────────────────────────────────────────


def test_an_answer_from_changed_bytes_is_neither_of_the_right_ones() -> None:
    full, fused = Reply(200, 0.1, "a b", (-0.5, -1.0)), Reply(200, 0.1, "a b", (-0.7, -1.0))
    truth = Truth(full, fused)
    assert truth.judge(full) == "full"
    assert truth.judge(Reply(200, 0.1, "a b", (-0.701, -1.0))) == "fused"
    assert truth.judge(Reply(200, 0.1, "a b", (-0.6, -1.0))) == "wrong"
    assert truth.judge(Reply(200, 0.1, "a c", (-0.5, -1.0))) == "wrong"


def test_a_rule_strikes_where_and_as_often_as_it_says() -> None:
    strikes = Strikes()
    strikes.set(FaultRule(SAVE, ERROR, times=2))
    assert [strikes.strike(op) is not None for op in (SAVE, EVICT, SAVE, SAVE)] == [
        *(True, False, True, False)
    ]
    assert strikes.clear() == 2
    assert strikes.strike(SAVE) is None


def test_counters_that_grew_are_told_without_names() -> None:
    series = 'kvweave_kv_misses_total{kb="k",reason="corrupt",tenant=""}'
    assert grown({series: 1.0}, {series: 3.0, "kvweave_engine_steps": 9.0}) == {
        'kv_misses_total{reason="corrupt"}': 2.0
    }


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ValkeyProxy]:
    with running_redis(tmp_path) as port, closing_proxy(ValkeyProxy(port)) as found:
        found.layers = Layers(100, 200, 300)
        yield found


def test_a_proxy_tells_a_command_from_another_and_changes_what_it_shall(proxy: ValkeyProxy) -> None:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    value = bytes(range(256)) * 4
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=proxy.port, socket_timeout=2, retry=once) as client:
        client.set("a", value)
        assert client.getrange("a", 0, 1023) == value
        proxy.strikes.set(FaultRule(LOAD_MIDDLE, CORRUPTED))
        assert client.getrange("a", 100, 150) == value[100:151], "a first layer"
        seen = bytes(client.getrange("a", 300, 400))
        assert sum(a != b for a, b in zip(seen, value[300:401], strict=True)) == 1
        assert proxy.strikes.clear() == 1
        proxy.strikes.set(FaultRule(SAVE, FULL))
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("b", b"x")
        proxy.strikes.clear()
        proxy.strikes.set(FaultRule(LOOKUP, HANG))
        with pytest.raises(redis.exceptions.TimeoutError):
            client.strlen("a")
        proxy.strikes.clear()
        proxy.strikes.set(FaultRule(LOOKUP, GONE))
        proxy.cut_all()
        with pytest.raises(redis.exceptions.ConnectionError):
            client.strlen("a")
        assert proxy.strikes.clear() >= 1
        assert client.strlen("a") == 1024


def test_the_proxys_port_is_its_own(proxy: ValkeyProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert connection.recv(16) == b"+PONG\r\n"


def test_times_that_differ_are_told_apart_and_others_are_not() -> None:
    one = [1.0 + n / 100 for n in range(30)]
    assert rank_test(one, [value + 0.001 for value in one]) > 0.5
    assert rank_test(one, [value + 0.5 for value in one]) < 0.001
