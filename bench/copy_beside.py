"""What do answers gain by copying tokens here, in llama.cpp, in vLLM, each over plain decoding?

    python bench/copy_beside.py --data ../shared/data --out bench/results/copy_beside-cpu.json

Each system has two servers of the same build, one that decodes plainly and one that looks its
drafts up in what stands in the prompt: kvweave by its default, llama.cpp by `ngram-simple`, vLLM by
its n-gram proposer, with as many tokens a draft as ours. Both answer the same prompts, token for
token, over HTTP, one after the other; while one answers the other is frozen. The first answer of a
prompt is not counted: it fills the prefix cache of each. What is compared is tokens per second
behind the first one. llama.cpp runs its 4-bit file, vLLM float32, kvweave its default of 8 bits, so
ratios can be compared and speeds cannot. `make llamacpp vllm` builds the environments; a system
that is not there is left out, and says so.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.results import finish, result_header
from copy_decode import KINDS, Case
from kvweave.model.files.locate import locate
from kvweave.text.prompt import Document, build_prompt
from kvweave.text.tokenizer import Tokenizer
from product_parts.asking import Reply, ask_ids
from product_parts.llamacpp_server import find_llamacpp, start_llamacpp
from product_parts.servers import RunningServer, own_home, start_kvweave, taking_turns
from product_parts.vllm_server import find_vllm, start_vllm

SYSTEMS = ("kvweave", "llamacpp", "vllm")
MOST = 15  # tokens of a draft
MATCH = 3  # tokens that must agree in front of one, of those who have no odds for it
SETTLE_S = 3.0


class Pair(NamedTuple):
    """One answer, without and with copying."""

    plain: Reply
    copying: Reply

    @property
    def over_plain(self) -> float:
        return self.copying.decoded_per_s / self.plain.decoded_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["summary", "quote"])
    parser.add_argument("--answers", type=int, default=6, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    tokenizer = Tokenizer(locate(args.model))
    prompts = {
        kind: [prompt_ids(tokenizer, case) for case in islice(KINDS[kind](args.data), args.answers)]
        for kind in args.kinds
    }
    found: dict[str, Any] = {}
    for system in args.systems:
        with (
            tempfile.TemporaryDirectory(prefix="kvweave-copy-") as folder,
            open_servers(system, args.model, Path(folder)) as servers,
        ):
            if servers:
                kinds = {kind: measure(servers, ids, args) for kind, ids in prompts.items()}
                found[system] = kinds
                print(system, kinds, flush=True)
    show(found)
    config = {"model": args.model, "max_tokens": args.max_tokens, "answers": args.answers}
    finish(
        __doc__,
        {**result_header("copy_beside", "cpu"), "config": config, "systems": found},
        args.out,
    )


def prompt_ids(tokenizer: Tokenizer, case: Case) -> list[int]:
    return build_prompt(
        tokenizer, case.question, [Document(text) for text in case.passages]
    ).token_ids


@contextmanager
def open_servers(system: str, model: str, folder: Path) -> Iterator[list[RunningServer]]:
    """The plain server of a system and the one that copies; none, and a line, if it is not here."""
    running: list[RunningServer] = []
    python, why = None, ""
    if system == "vllm":
        python, why = find_vllm(REPO / ".venv-vllm")
    elif system == "llamacpp":
        python, why = find_llamacpp(REPO / ".venv-llamacpp", model)
    if why:
        print(why, flush=True)
    try:
        for copies in () if why else (False, True):
            place = folder / ("copying" if copies else "plain")
            place.mkdir()
            if system == "kvweave":
                (place / "kb").mkdir()
                more = {} if copies else {"KVWEAVE_ENGINE_COPY_TOKENS": "0"}
                home = own_home(place)
                running.append(start_kvweave("kvweave", model, place / "kb", home, more=more))
                continue
            assert python is not None, "there is no reason against it"
            if system == "vllm":
                running.append(start_vllm(python, model, place, MOST if copies else 0, MATCH))
            else:
                running.append(start_llamacpp(python, model, place, MOST if copies else 0, MATCH))
        yield running
    finally:
        for server in running:
            server.close()


def measure(
    servers: list[RunningServer], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Ask each prompt on both servers, another one first each time."""
    pairs: list[Pair] = []
    for number, ids in enumerate(prompts):
        replies: dict[int, Reply] = {}
        for place in (0, 1) if number % 2 else (1, 0):
            with taking_turns(servers, place, SETTLE_S):
                ask_ids(servers[place].http, ids, 1, {})
                replies[place] = ask_ids(servers[place].http, ids, args.max_tokens, {})
        pairs.append(Pair(replies[0], replies[1]))
    counted = [pair for pair in pairs if pair.plain.answer_tokens > 1]
    return {
        "answers": len(pairs),
        "same_text": sum(pair.plain.text == pair.copying.text for pair in pairs),
        "over_plain": round(statistics.median(pair.over_plain for pair in counted), 3),
        "worst": round(min(pair.over_plain for pair in counted), 3),
        "plain_per_s": round(statistics.median(pair.plain.decoded_per_s for pair in counted), 1),
        "copying_per_s": round(
            statistics.median(pair.copying.decoded_per_s for pair in counted), 1
        ),
    }


def show(found: dict[str, Any]) -> None:
    table = Table(title="tokens a second by copying, over plain decoding of the same system")
    for column in ("system", "kind", "over plain", "worst", "plain a second", "same text"):
        table.add_column(column)
    for system, kinds in found.items():
        for kind, row in kinds.items():
            same = f"{row['same_text']} of {row['answers']}"
            values = (row["over_plain"], row["worst"], row["plain_per_s"])
            table.add_row(system, kind, *map(str, values), same)
    Console().print(table)


if __name__ == "__main__":
    main()
