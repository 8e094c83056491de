"""Write what the documents repeat of the code: a page for each command, the exit codes, and what sessions print.

    python tests/docs/refresh.py

A session is a block of the language `console`: lines that begin with "$ " are commands, and what follows is their
output. Every page's sessions are run in a folder of their own, which `sandbox.py` fills.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import textwrap
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import click
import sandbox
from ckptguard_daemon.command import command as daemon_command
from support.markdown import DOCS, ROOT, blocks, pages
from terminal import on_a_terminal, without_colours

from ckptguard.cli import entry
from ckptguard.values.exit_codes import PRECEDENCE, ExitCode

_MARK = "<!-- Written by tests/docs/refresh.py from the code: change it there. -->"


def generated() -> dict[Path, str]:
    """The pages that are made of the code, with their text."""
    folder = DOCS / "reference/commands"
    found = {folder / f"{name}.md": page_of(f"ckptguard {name}", command_of(name)) for name in entry.COMMANDS}
    found[folder / "daemon.md"] = page_of("ckptguard-daemon", daemon_command)
    found[folder / "index.md"] = index()
    found[DOCS / "reference/exit-codes.md"] = exit_codes()
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = "".join(
        f"          - reference/commands/{name}.md\n" for name in ("index", *sorted(entry.COMMANDS), "daemon")
    )
    found[ROOT / "mkdocs.yml"] = re.sub(r"(?<=- Commands:\n)(?: +- reference/commands/.*\n)*", listed, site)
    return found


def command_of(name: str) -> click.Command:
    """A command of the command line, by its name."""
    command = entry.commands.get_command(click.Context(entry.commands), name)
    assert command is not None
    return command


def groups() -> list[tuple[str, tuple[str, ...]]]:
    """The commands by task, as `ckptguard --help` groups them."""
    return list(getattr(entry, "GROUPS", {"Commands": entry.COMMANDS}).items())


def index() -> str:
    """The page that lists all commands."""
    lines = [_MARK, "# Commands", ""]
    lines += ["`ckptguard --help` prints this list, and `ckptguard COMMAND --help` prints a command's page.", ""]
    for title, names in groups():
        lines += [f"## {title}", "", "| command | what it does |", "|---|---|"]
        lines += [f"| [`{name}`]({name}.md) | {summary(command_of(name))} |" for name in names]
        lines.append("")
    lines += ["## The daemon", "", "| command | what it does |", "|---|---|"]
    lines += [f"| [`ckptguard-daemon`](daemon.md) | {summary(daemon_command)} |", ""]
    return "\n".join(lines)


def summary(command: click.Command) -> str:
    """The first sentence of a command's help."""
    return re.split(r"(?<=\.)\s", shown(command.help or ""))[0].replace("|", "\\|")


def shown(text: str) -> str:
    """Plain text as one line of Markdown."""
    return " ".join(text.split()).replace("<", "&lt;")


def page_of(called: str, command: click.Command) -> str:
    """The page of one command: its help, options and exit codes."""
    context = click.Context(command, info_name=called, help_option_names=["-h", "--help"])
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [_MARK, f"# {called}", "", "```text", f"{called} {usage}", "```", "", *paragraphs(command.help or "")]
    options = [p for p in command.get_params(context) if isinstance(p, click.Option) and not p.hidden]
    lines += ["## Options", ""]
    for option in options:
        names, meaning = option.get_help_record(context) or ("", "")
        # Nobody needs to be told that a number is not negative.
        meaning = re.sub(r" +\[x>=[01]\]", "", meaning).replace("[default: ", "[Default: ")
        lines += textwrap.wrap(f"- `{names}`: {meaning}", 96, subsequent_indent="  ", break_on_hyphens=False)
    codes = getattr(command, "codes", None)
    if codes:
        lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
        lines += [f"| {int(code)} | {code.meaning} |" for code in codes]
    elif command.epilog:
        lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
        lines += [f"| {code} | {text} |" for code, text in re.findall(r"^ +(\d+) +(.+)$", command.epilog, re.MULTILINE)]
    name = called.partition(" ")[2]
    if any(option.name == "as_json" for option in options):
        lines += ["", "## The JSON document", "", f"With `--json` it prints [this document](../json.md#{name})."]
    return "\n".join([*lines, ""])


def paragraphs(text: str) -> list[str]:
    """A help text as Markdown: what click would not wrap is a block of code."""
    lines: list[str] = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if part.lstrip().startswith("\b") or part.startswith("    "):
            lines += ["```sh", textwrap.dedent(part.replace("\b\n", "")).strip(), "```", ""]
        else:
            lines += [*textwrap.wrap(shown(part), 96, break_on_hyphens=False), ""]
    return lines


def exit_codes() -> str:
    """The page of the exit codes."""
    order = [f"{int(code)} ({code.meaning})" for code in PRECEDENCE]
    rows = [f"| {int(code)} | {code.meaning} |" for code in ExitCode]
    several = textwrap.wrap("If several apply to a verification, the first of these counts:", 96)
    return "\n".join(
        [
            *(
                _MARK,
                "# Exit codes",
                "",
                "Scripts can rely on these numbers. Every command's page says which it can have.",
            ),
            *("", "| code | meaning |", "|---|---|", *rows, "", *several, ""),
            *(f"{place}. {text}" for place, text in enumerate(order, 1)),
            *("", "`ckptguard supervise` ends with the exit code of the training command where it can."),
            *("[Its page](commands/supervise.md) says when it does not.", ""),
        ]
    )


def sessions(text: str, folder: Path) -> str:
    """A page with the output of its sessions as it is now, all of them run in `folder`. What the comment before one
    says that it comes "after:" is run first, and is not shown."""
    done, after = "", 0
    for block in blocks(text):
        if block.language == "console":
            if block.mark.startswith("after: "):
                on_a_terminal(block.mark.removeprefix("after: "), folder)
            done += text[after : block.span[0]] + session(block.text, folder)
            after = block.span[1]
    return done + text[after:]


def session(text: str, folder: Path) -> str:
    """A session with its output as it is now."""
    commands = re.findall(r"^\$ (.*(?:(?<=\\)\n.*)*)$", text, re.MULTILINE)
    return "".join(f"$ {command}\n{without_colours(on_a_terminal(command, folder))}" for command in commands)


def refreshed(page: Path, filled: Path) -> str:
    """A page as it should be. `filled` is a sandbox, of which each page gets a copy."""
    text = page.read_text(encoding="utf-8")
    if not any(block.language == "console" for block in blocks(text)):
        return text
    # The length of its name decides where tables are folded: it is the same for everybody.
    with tempfile.TemporaryDirectory(prefix="docs-", dir="/tmp") as temporary:
        folder = Path(temporary).resolve()
        sandbox.copy(filled, folder)
        if "runs/nan" in text:
            sandbox.in_a_process("train_into_nan", folder / "runs/nan")
        return sessions(text, folder)


def alike(text: str) -> str:
    """A session's text without what differs from one run to the next: numbers, ids, units, and spaces."""
    text = re.sub(r"\b[0-9a-f]{8,}\b|\d+(?:[.,:]\d+)*", "0", text)
    text = re.sub(r"\b(?:[KMGT]i?B|B|ms|s|seconds?|minutes?|hours?|days?)\b|[-─━]{3,}", "", text)
    return " ".join(text.split())


def main() -> None:
    """Write all of it."""
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for stray in set((DOCS / "reference/commands").glob("*.md")) - set(generated()):
        stray.unlink()
    with tempfile.TemporaryDirectory(prefix="ckptguard-docs-") as temporary:
        sandbox.fill(Path(temporary))
        for page in pages():
            text = refreshed(page, Path(temporary))
            if alike(text) != alike(page.read_text(encoding="utf-8")):
                page.write_text(text, encoding="utf-8")
                print(f"refreshed {page}")


if __name__ == "__main__":
    main()
