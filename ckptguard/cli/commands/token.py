"""``ckptguard token``: let somebody reach the daemon by HTTP."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, json_option
from ckptguard.terminal.output import emit, say

_LONGEST = 100 * 365 * 86400.0


@click.command("token", cls=Command, short_help="Make a token for the dashboard.")
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
@click.option("--expires", metavar="SPAN", help="Expires after SPAN: 30d, 12h.")
@json_option
def token(name: str, path: str, role: str, runs: tuple[str, ...], expires: str | None, as_json: bool) -> None:
    """Make a token with which NAME can log in to the dashboard, or send requests.

    FILE gets a line with the token's digest. The token itself is printed now and stored nowhere. Remove the line to
    lock NAME out; the daemon notices within a second.
    """
    import time

    from ckptguard.runs.token_file import add_token
    from ckptguard.values.access import Token, check_name, parse_patterns, role_named
    from ckptguard.values.retention_policy import parse_span

    until = None if expires is None else time.time() + min(parse_span(expires), _LONGEST)
    patterns = parse_patterns(list(runs)) if runs else None
    wanted = Token(name=check_name(name), role=role_named(role), digest="", runs=patterns, expires=until)
    token, secret = add_token(path, wanted)
    if as_json:
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
