"""``ckptguard show``: one checkpoint, file by file, with its verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say, trouble
from ckptguard.cli.progress import bytes_below, working

if TYPE_CHECKING:
    from ckptguard.inspect.show import Shown


@click.command("show", cls=Command, codes=(ExitCode.BAD, ExitCode.NOT_FOUND), short_help="Describe one checkpoint.")
@click.argument("ckpt", type=Place())
@click.option("--tensors", is_flag=True, help="List every tensor: type, shape, bytes, largest magnitude.")
@shared_options
def command(ckpt: str, tensors: bool, shared: Shared) -> None:
    """Describe CKPT: its files, digests and tensors, and every verdict on it. Recorded digests are not compared.

    With --tensors every tensor has its line, with its largest magnitude and how much that is of what fp16 can hold
    (65504). These come from the records; a checkpoint that was never verified is read for them.
    """
    from ckptguard.inspect.show import show

    settings = shared.settings()
    with working("reading", bytes_below(ckpt)) as work:
        shown = show(ckpt, settings, magnitudes=tensors, work=work)
    for name in shown.left_out:
        trouble(f"warning: {name} is no regular file and was not read")
    for problem in shown.problems:
        trouble(f"warning: {problem}")
    if shared.as_json:
        emit("show", shown)
    elif tensors:
        from ckptguard.cli.render_tensor_tree import print_tree

        print_tree(shown)
    else:
        print_shown(shown)
    if shown.problems:
        raise click.exceptions.Exit(ExitCode.BAD)


def print_shown(shown: Shown) -> None:
    """What is known of the checkpoint, its files, then what was found in it."""
    from ckptguard.cli.render import facts, finding_line, size, table

    manifest, verdict = shown.manifest, shown.verdict
    facts(
        [
            ("checkpoint", shown.target),
            ("id", shown.id),
            ("series", manifest.series),
            ("layout", manifest.layout),
            ("step", manifest.step),
            ("sealed", f"{manifest.sealed_at}, digests by the {manifest.digest_origin}" if shown.sealed else "no"),
            ("verdict", verdict and f"{verdict.outcome.value}, {verdict.checked_at}, by ckptguard {verdict.version}"),
            ("history", ", ".join(f"{line.number} {line.outcome.value}" for line in shown.history)),
            ("resumable", verdict and ", ".join(verdict.facts.resumable)),
            ("metrics", ", ".join(f"{name} {value:g}" for name, value in manifest.given_metrics().items())),
            ("size", size(manifest.bytes)),
        ]
    )
    say("")
    rows = [
        (f.path.removeprefix(f"{manifest.path}/"), size(f.size), f.format, len(f.tensors), f.md5)
        for f in manifest.files
    ]
    table(("file", "size", "format", "tensors", "md5"), rows)
    for finding in verdict.findings if verdict else ():
        say(finding_line(finding, manifest.path))
