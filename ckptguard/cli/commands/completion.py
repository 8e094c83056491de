"""``ckptguard completion``: the script that makes a shell complete our commands."""

from __future__ import annotations

import click

from ckptguard.cli.command import command
from ckptguard.terminal.output import say


@command("completion", "Print a shell's completion script.", common="")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes ckptguard's commands in your shell.

    For bash, put this line into ~/.bashrc:

    \b
        eval "$(ckptguard completion bash)"
    """
    from click.shell_completion import get_completion_class

    from ckptguard.cli.entry import commands

    found = get_completion_class(shell)
    assert found is not None
    completion = found(commands, {}, "ckptguard", "_CKPTGUARD_COMPLETE")
    # `source` would start the shell to ask for its version; the template needs none of that.
    say(completion.source_template % completion.source_vars())
