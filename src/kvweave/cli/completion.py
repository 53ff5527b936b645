"""`kvweave completion`: what a shell needs to complete commands and options."""

import click
from click.shell_completion import get_completion_class

VARIABLE = "_KVWEAVE_COMPLETE"  # what click looks at when a shell asks


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that lets SHELL complete kvweave's commands and options.

    bash: add `eval "$(kvweave completion bash)"` to ~/.bashrc; zsh: the same with zsh in ~/.zshrc;
    fish: kvweave completion fish > ~/.config/fish/completions/kvweave.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows {shell}"
    group = click.get_current_context().find_root().command
    click.echo(kind(group, {}, "kvweave", VARIABLE).source())
