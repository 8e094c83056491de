"""``ckptguard show``: one checkpoint, file by file, with its verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say

if TYPE_CHECKING:
    from ckptguard.operations.show import Shown


@click.command("show", cls=Command, codes=(ExitCode.NOT_FOUND,), short_help="Describe one checkpoint.")
@click.argument("ckpt", type=Place())
@json_option
@settings_options
def command(ckpt: str, as_json: bool, config: str | None, records: str | None) -> None:
    """Describe CKPT: its files, digests and tensors, and every verdict on it. Recorded digests are not compared."""
    from ckptguard.cli.documents import show_document
    from ckptguard.operations.show import show

    shown = show(ckpt, settings_from(config, records))
    if as_json:
        emit(show_document(shown))
    else:
        print_shown(shown)


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
            ("size", size(manifest.bytes)),
        ]
    )
    say("")
    rows = [(f.path, size(f.size), f.format, len(f.tensors), f.md5) for f in manifest.files]
    table(("file", "size", "format", "tensors", "md5"), rows)
    for finding in verdict.findings if verdict else ():
        say(finding_line(finding))
