"""``ckptguard prune``: remove what the policy does not keep, to a trash with a time of grace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_lines, table
from ckptguard.terminal.output import emit, escape, is_quiet, say_errors, trouble, warn, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.retention.prune import Pruned

CODES = (ExitCode.NOT_FOUND, ExitCode.BUSY)


@command("prune", "Remove checkpoints that the policy does not keep.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--keep-last", metavar="N", type=click.IntRange(1, 10**9), help="Keep the newest N.")
@click.option("--keep-every", metavar="K", type=click.IntRange(1, 10**12), help="Keep the first of every K steps.")
@click.option("--keep-within", metavar="SPAN", help="Keep those saved within SPAN (2d, 12h) before the newest.")
@click.option(
    "--keep-best", metavar="RULE", multiple=True, help="Keep the best by a saved metric: loss:min, acc:max:3."
)
@click.option(
    "--failed", is_flag=True, help="Remove bad, incomplete and suspect ones too, once enough newer ones are good."
)
@click.option(
    "--thin-after",
    metavar="N",
    type=click.IntRange(1, 10**9),
    help="Keep only the weights of what is older than the newest N good ones.",
)
@click.option(
    "--keep-bytes",
    metavar="SIZE",
    help="Let the run occupy at most SIZE (2TB, 500GiB): thin first, then remove what is worth least.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def prune(run: str, failed: bool, dry_run: bool, shared: Shared, **rules: object) -> None:
    """Keep the good checkpoints of RUN that any rule asks for, and move the others to the trash. Without a rule nothing
    is removed.

    Rules count verified good checkpoints only, in each series. The newest good ones (keep_good), pinned ones and those
    in use always stay. So do all that are older than one without a verdict.

    --thin-after moves to the trash what only a resume needs: optimizer, scheduler and scaler. Weights, config,
    tokenizer and metrics stay, and are good.

    --keep-bytes counts what the run occupies on the disk, its trash too. Thinning comes first, then what the fewest
    rules keep, the oldest first. What always stays, stays. The plan says in words if that is too much.

    `ckptguard restore RUN --step N` finds what is in the trash until trash_grace is over.
    """
    from ckptguard.decisions.retention import unknown_metrics
    from ckptguard.retention.prune import prune
    from ckptguard.runs.target import open_named_run
    from ckptguard.values.retention_policy import parse_span

    settings = shared.settings([run], prune_failed=failed or None, **rules)
    view = open_named_run(run, settings)
    policy = settings.retention()
    grace = parse_span(settings.trash_grace)
    if policy.thin_after is None and policy.keep_bytes is None:
        done = prune(view, policy, grace=grace, dry_run=dry_run)
    else:
        from ckptguard.scan import scanner_of
        from ckptguard.upkeep.budget import prune_and_thin

        with working("reading", scanner=scanner_of(settings)) as work:
            done = prune_and_thin(view, policy, grace=grace, dry_run=dry_run, work=work)
    if shared.as_json:
        emit("prune", done, target=view.run.url)
    elif dry_run or not is_quiet():
        _show(done)
    for metric in unknown_metrics([d.checkpoint for d in done.decisions], policy):
        warn(f'no good checkpoint has the metric "{escape(metric)}": it keeps none')
    say_errors(done.could_not_tell)
    raise click.exceptions.Exit(ExitCode.FAILED if done.could_not_tell else ExitCode.GOOD)


def _show(done: Pruned) -> None:
    from ckptguard.documents.done_lines import prune_lines, prune_table

    if done.policy.asks_nothing:
        trouble("no rule was given: nothing is removed")
    if done.decisions:
        table(*prune_table(done))
    say_lines(prune_lines(done))
