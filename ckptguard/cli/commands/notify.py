"""``ckptguard notify``: who is notified of incidents, and whether it arrives."""

from __future__ import annotations

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import table
from ckptguard.terminal.output import emit, say
from ckptguard.values.exit_codes import ExitCode


@command("notify", "Show who is notified, and try it.", (ExitCode.NOT_FOUND,))
@click.argument("run", type=PathOrUrl(), required=False)
@click.option("--test", is_flag=True, help="Send a test message to each address now.")
def notify(run: str | None, test: bool, shared: Shared) -> None:
    """Show which addresses are notified of incidents and bad checkpoints.

    With --test each gets a message now, which names RUN if you give one, and you see whether it was delivered. The
    addresses are the settings `notify`, `webhook` and `on_incident`. Their secrets are not shown.
    """
    from ckptguard.errors import SettingsError
    from ckptguard.reporting.channels import channels_of, require_apprise, try_out
    from ckptguard.reporting.events import trial_event
    from ckptguard.runs.target import open_named_run

    settings = shared.settings([] if run is None else [run])
    require_apprise(settings)
    channels = channels_of(settings)
    if not channels:
        raise SettingsError(
            "nobody is notified of anything: notify, webhook and on_incident are not set",
            hint='set notify = ["slack://TokenA/TokenB/TokenC"] in ckptguard.toml, or CKPTGUARD_NOTIFY',
        )
    event = trial_event(None if run is None else open_named_run(run, settings).run)
    tried = [try_out(channel, event if test else None) for channel in channels]
    if shared.as_json:
        emit("notify", channels=tried)
    else:
        words = {True: "delivered", False: "failed", None: "not tried"}
        table(("setting", "to", "test", ""), [(t.setting, t.to, words[t.delivered], t.reason) for t in tried])
        if not test:
            say("`ckptguard notify --test` sends each of them a message")
    if any(one.delivered is False for one in tried):
        raise click.exceptions.Exit(ExitCode.FAILED)
