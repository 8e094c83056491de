"""``ckptguard completion``: the script that makes a shell complete our commands."""

from __future__ import annotations

import click

from ckptguard.cli.command import command
from ckptguard.terminal.output import say


@command("completion", "Print a shell's completion script.", common="")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes both commands, also the daemon's, in your shell.

    Put one of these lines into the file of your shell:

    \b
        eval "$(ckptguard completion bash)"    # ~/.bashrc
        eval "$(ckptguard completion zsh)"     # ~/.zshrc, after compinit
        ckptguard completion fish | source     # ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    from ckptguard.cli.entry import commands

    found = get_completion_class(shell)
    assert found is not None
    for program in ("ckptguard", "ckptguard-daemon"):
        if shell == "zsh" and program == "ckptguard-daemon":
            say("[[ $zsh_eval_context[-1] == loadautofunc ]] && return")  # a file in fpath is for the first one alone
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"  # for which click looks in that program
        completion = found(commands, {}, program, variable)
        # `source` would start the shell to ask for its version; the template needs none of that.
        say(completion.source_template % completion.source_vars())
