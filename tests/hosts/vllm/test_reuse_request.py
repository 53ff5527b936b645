"""What a request may ask of the connector, and what is refused with a reason."""

from typing import Any

import pytest

from kvweave.errors import KVWeaveError
from kvweave.hosts.vllm.reuse_request import Defaults, Part, ReuseRequest, parse_reuse_request


def parse(**given: Any) -> ReuseRequest | None:
    return parse_reuse_request({"kvweave": given}, 100, Defaults("weave", 0.3, 0.02), 24)


def test_a_request_without_spans_asks_for_nothing() -> None:
    assert (
        parse_reuse_request({"do_remote_prefill": True}, 100, Defaults("weave", None, 0.02), 24)
        is None
    )


def test_defaults_are_the_connectors_and_the_first_chunk_ends_the_preamble() -> None:
    assert parse(chunks=[[10, 20], [20, 40]]) == ReuseRequest(
        10, ((10, 20), (20, 40)), "weave", 0.3
    )


def test_another_strategy_brings_its_own_ratio() -> None:
    wish = parse(chunks=[[10, 20]], reuse="prophetkv")
    assert wish is not None
    assert wish.ratio == 0.2
    epic = parse(chunks=[[10, 20]], reuse="epic")
    assert epic is not None
    assert epic.ratio == 0.15


def test_auto_comes_with_the_bound_of_the_request_or_the_connectors() -> None:
    defaults = Defaults("auto", None, 0.02)

    def parse_auto(**given: Any) -> tuple[str, float, float | None]:
        params = {"kvweave": {"chunks": [[10, 20]], **given}}
        wish = parse_reuse_request(params, 100, defaults, 24)
        assert wish is not None
        return wish.reuse, wish.ratio, wish.bound

    assert parse_auto() == ("auto", 0.0, 0.02)
    assert parse_auto(bound=0.005) == ("auto", 0.0, 0.005)
    assert parse_auto(ratio=0.4) == ("weave", 0.4, None), "as in kvweave's own server"
    assert parse_auto(reuse="epic") == ("epic", 0.15, None)
    wish = parse(chunks=[[10, 20]], reuse="auto")
    assert wish is not None
    assert (wish.reuse, wish.bound) == ("auto", 0.02), "also where the connector has a strategy"


def test_what_lies_between_chunks_is_a_gap() -> None:
    wish = parse(chunks=[[10, 20], [25, 40]], preamble=4)
    assert wish is not None
    assert wish.parts() == [
        Part(4, 10, False),
        Part(10, 20, True),
        Part(20, 25, False),
        Part(25, 40, True),
    ]
    assert wish.question_start == 40
    assert not any(wish.stands_in_front(part) for part in wish.parts())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "list of"),
        ({"chunks": []}, "list of"),
        ({"chunks": "all"}, "list of"),
        ({"chunks": [[1]]}, "pair"),
        ({"chunks": [[5, 5]]}, "empty"),
        ({"chunks": [[5, 9], [8, 12]]}, "behind 9"),
        ({"chunks": [[-1, 9]]}, "no place"),
        ({"chunks": [[True, 9]]}, "no place"),
        ({"chunks": [[1, 100]]}, "question"),
        ({"chunks": [[1, 9]], "preamble": 2}, "reaches into"),
        ({"chunks": [[1, 9]], "reuse": "magic"}, "unknown"),
        ({"chunks": [[1, 9]], "reuse": "qcfuse:sink"}, "more beside chunk KV than vLLM makes"),
        ({"chunks": [[1, 9]], "reuse": "cachecraft-like"}, "more beside chunk KV than vLLM makes"),
        ({"chunks": [[1, 9]], "ratio": 1.5}, "no share"),
        ({"chunks": [[1, 9]], "ratio": "much"}, "number"),
        ({"chunks": [[1, 9]], "reuse": "reuse", "ratio": 0.5}, "takes no ratio"),
        ({"chunks": [[1, 9]], "reuse": "auto", "ratio": 0.5}, "chooses the ratio itself"),
        ({"chunks": [[1, 9]], "reuse": "auto", "bound": -1}, "nats per token"),
        ({"chunks": [[1, 9]], "reuse": "auto", "bound": "none"}, "nats per token"),
        ({"chunks": [[1, 9]], "asked": [3, 5]}, "behind the chunks"),
        ({"chunks": [[1, 9]], "tenant": 7}, "tenant"),
        ({"chunks": [[1, 9]], "missing": "never"}, "later, encode"),
        ({"chunks": [[1, 9]], "spans": []}, "known: chunks"),
        ({"chunks": [[i, i + 1] for i in range(5000)]}, "fewer"),
    ],
)
def test_what_cannot_be_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KVWeaveError, match=words):
        parse_reuse_request({"kvweave": given}, 100, Defaults("weave", None, 0.02), 24)


def test_something_else_than_an_object_is_named() -> None:
    with pytest.raises(KVWeaveError, match="object"):
        parse_reuse_request({"kvweave": [1, 2]}, 100, Defaults("weave", None, 0.02), 24)
