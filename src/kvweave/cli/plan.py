"""`kvweave plan`: what `ask --reuse auto` would do, and what each alternative would cost."""

import json
from pathlib import Path

import click

from kvweave.cli.knowledge_bases import check_knowledge_base, open_weave
from kvweave.cli.options import (
    config_option,
    json_option,
    kb_folder_option,
    model_options,
    pass_config,
    question_options,
    typed_options,
)
from kvweave.cli.plan_view import (
    declined_lines,
    options_table,
    plan_document,
    plan_line,
    spans_table,
)
from kvweave.cli.tables import table_console
from kvweave.config import EffectiveConfig
from kvweave.errors import RequestError


@click.command("plan")
@click.argument("question")
@kb_folder_option(
    "The knowledge base that would be asked (kvweave ingest makes one).",
    exists=True,
    required=True,
)
@question_options("k", "bound", "order")
@model_options
@config_option("model.system")
@json_option
@pass_config
def command(question: str, kb_folder: Path, as_json: bool, effective: EffectiveConfig) -> None:
    """Show how QUESTION would be answered with --reuse auto, without answering it."""
    if not question.strip():
        raise RequestError("the question is empty; ask something")
    check_knowledge_base(kb_folder)
    allowed = effective.config.quality
    typed = typed_options(effective)
    with open_weave(config=effective.config, kb=kb_folder) as weave:
        plan = weave.plan(question, **typed)
        if as_json:
            about = {"model": weave.model_name, "question": question}
            order = typed.get("order") or weave.kb.settings.order or allowed.order
            told = {**about, "bound": allowed.bound, "order": order, **plan_document(plan)}
            click.echo(json.dumps(told, indent=2))
            return
    console = table_console()
    console.print(plan_line(plan), style="bold", soft_wrap=True)
    console.print()
    console.print(spans_table(plan))
    console.print("\nWhat each way would cost", style="bold")
    console.print(options_table(plan))
    if declined := declined_lines(plan):
        console.print("\nWhy others were not looked at", style="bold")
        console.print("\n".join(declined))
