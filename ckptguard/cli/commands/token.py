"""``ckptguard token``: let somebody reach the daemon by HTTP."""

from __future__ import annotations

import click

from ckptguard.cli.command import SPAN, Shared, command
from ckptguard.terminal.output import emit, say

_LONGEST = 100 * 365 * 86400.0


@command("token", "Make a token for the dashboard.", common="json")
@click.argument("name")
@click.option("--file", "path", metavar="FILE", required=True, help="Add it to this file, the daemon's --tokens.")
@click.option(
    "--role",
    type=click.Choice(["reader", "guard", "operator"]),
    default="reader",
    show_default=True,
    help="reader looks, guard reports incidents too, operator changes runs.",
)
@click.option(
    "--run",
    "runs",
    metavar="PATTERN",
    multiple=True,
    help="Only runs with such a name, URL or label: team-a/*, team=vision.",
)
@click.option("--expires", type=SPAN, help="Expires after SPAN: 30d, 12h.")
def token(name: str, path: str, role: str, runs: tuple[str, ...], expires: float | None, shared: Shared) -> None:
    """Make a token with which NAME can log in to the dashboard, or send requests.

    FILE gets a line with the token's digest. The token itself is printed now and stored nowhere. Remove the line to
    lock NAME out; the daemon notices within a second.
    """
    import time

    from ckptguard.runs.token_file import add_token
    from ckptguard.values.access import Token, check_name, parse_patterns, role_named

    until = None if expires is None else time.time() + min(expires, _LONGEST)
    patterns = parse_patterns(list(runs)) if runs else None
    wanted = Token(name=check_name(name), role=role_named(role), digest="", runs=patterns, expires=until)
    token, secret = add_token(path, wanted)
    if shared.as_json:
        emit(
            "token",
            name=token.name,
            role=role,
            file=path,
            patterns=token.runs,
            expires=token.expires_text,
            token=secret,
        )
        return
    say(secret)
