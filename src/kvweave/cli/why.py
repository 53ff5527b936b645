"""`kvweave why`: why an answer of a running server reused what it reused, and no more."""

import json
import time

import click

from kvweave.cli.options import json_option
from kvweave.clients.server import KEY_VARIABLE, URL_VARIABLE, Reply, ServerClient
from kvweave.errors import RequestError

HERE = "http://127.0.0.1:8321"


@click.command("why")
@click.argument("answer_id", required=False, metavar="[ID]")
@click.option(
    "--url",
    envvar=URL_VARIABLE,
    default=HERE,
    show_default=True,
    metavar="URL",
    help=f"Of the server that answered. {KEY_VARIABLE} is its key.",
)
@json_option
def command(answer_id: str | None, url: str, as_json: bool) -> None:
    """Show what was reused for an answer, and why no more. ID is that of its chat completion;
    without one it is the last answer. A server keeps the last 64 of each tenant.
    """
    client = ServerClient(url)
    if answer_id is None:
        answer_id = _newest(client)
    answer = client.answer(answer_id)
    if as_json:
        about = {name: answer[name] for name in ("id", "created", "model", "kb", "question")}
        click.echo(json.dumps({**about, "explain": answer["explain"]}, indent=2))
        return
    _show(answer)


def _newest(client: ServerClient) -> str:
    kept = client.answers()
    if not kept:
        raise RequestError(f"{client.url} keeps no answer yet; ask something first")
    return str(kept[0]["id"])


def _show(answer: Reply) -> None:
    from kvweave.cli.tables import make_table, table_console

    explain, console = answer["explain"], table_console()
    asked_of = "" if answer["kb"] is None else f", of {answer['kb']!r}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer["created"]))
    console.print(f"{answer['id']}, {when}, {answer['model']}{asked_of}", style="dim")
    console.print(answer["question"], style="bold", soft_wrap=True)
    console.print(summary(answer), soft_wrap=True)
    if explain["why"]:
        console.print(f"no more is reused: {explain['why']}", soft_wrap=True)
    if explain["order"]:
        console.print(f"order of chunks: {explain['order']}", soft_wrap=True)
    if explain["chunks"]:
        titles = {
            source["span"][0]: source["title"] for source in answer["sources"] if source["span"]
        }
        rows = [
            (
                str(number),
                titles.get(chunk["start"], ""),
                f"{chunk['tokens']:,}",
                chunk["state"],
                f"{chunk['recomputed']:,}" if chunk["recomputed"] else "",
                chunk["tier"] or "",
                chunk["why"] or "",
            )
            for number, chunk in enumerate(explain["chunks"], 1)
        ]
        headings = ("chunk", "title", "tokens", "state", "recomputed", "from", "why")
        right = ("chunk", "tokens", "recomputed")
        console.print()
        console.print(make_table(headings, rows, right=right, names=("title",), prose=("why",)))
    if explain["decision"] is not None:
        _show_decision(explain["decision"])


def summary(answer: Reply) -> str:
    """One line: the way, what became of the tokens, and how long it took."""
    explain = answer["explain"]
    ratio = f" at {explain['ratio']:g}" if explain["ratio"] else ""
    tokens = ", ".join(f"{count:,} {state}" for state, count in explain["tokens"].items() if count)
    full = explain["full_ms"]
    in_full = "" if full is None else f", in full about {full / 1e3:.2f} s"
    first = f"first token after {answer['ttft_ms'] / 1e3:.2f} s{in_full}"
    return f"{explain['strategy']}{ratio}: {tokens} of {answer['prompt_tokens']:,} tokens; {first}"


def _show_decision(decision: Reply) -> None:
    """What else there was, and what it would have cost."""
    from kvweave.cli.tables import make_table, table_console

    rows = [
        (
            f"{'→' if option['name'] == decision['chosen'] else ' '} {option['name']}",
            "" if option["predicted_ms"] is None else f"{option['predicted_ms']:,.0f} ms",
            option["reason"],
        )
        for option in decision["options"]
    ]
    console = table_console()
    console.print()
    console.print(
        make_table(("way", "predicted", "why"), rows, right=("predicted",), prose=("why",))
    )
