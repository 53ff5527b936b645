"""`kvweave plan`: what `ask --reuse auto` would do, and what each alternative would cost."""

import json
from pathlib import Path

import click

from kvweave.cli.knowledge_bases import check_knowledge_base
from kvweave.cli.loading import model_options, open_weave
from kvweave.cli.plan_view import options_table, plan_document, spans_table
from kvweave.cli.planning import planning_options
from kvweave.errors import RequestError


@click.command("plan")
@click.argument("question")
@click.option(
    "--kb",
    "kb_folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    required=True,
    help="The knowledge base that would be asked (kvweave ingest makes one).",
)
@click.option("--chunks", "k", type=click.IntRange(1, 100), default=5, help="How many to take (5).")
@planning_options
@model_options
@click.option("--system", help="Instructions in place of kvweave's own.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(
    question: str,
    kb_folder: Path,
    k: int,
    bound: float,
    order: str,
    model: str,
    device: str,
    dtype: str,
    quant: str,
    system: str | None,
    as_json: bool,
) -> None:
    """Show how QUESTION would be answered with --reuse auto, without answering it."""
    if not question.strip():
        raise RequestError("the question is empty; ask something")
    check_knowledge_base(kb_folder)
    settings = {"device": device, "dtype": dtype, "quant": quant}
    with open_weave(kb=kb_folder, model=model, **settings) as weave:
        plan = weave.plan(question, k=k, system=system, bound=bound, order=order)
        if as_json:
            about = {"model": weave.model_name, "question": question, "bound": bound}
            click.echo(json.dumps({**about, "order": order, **plan_document(plan)}, indent=2))
            return
    from rich.console import Console

    console = Console()
    console.print(spans_table(plan))
    console.print(options_table(plan))
