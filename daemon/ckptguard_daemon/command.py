"""The options of ``ckptguard-daemon``, and how it begins and ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from typing import Any

import click

from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.storage.failures import machine_trouble
from ckptguard.terminal.end_in_time import end_in_time
from ckptguard.terminal.output import report_error
from ckptguard.terminal.usage import restated
from ckptguard.values.access import Role, role_named
from ckptguard.values.exit_codes import ExitCode, of_error
from ckptguard.values.retention_policy import parse_span
from ckptguard.version import __version__
from ckptguard_daemon.deploy import EXAMPLES, print_example
from ckptguard_daemon.log import log, start_logging
from ckptguard_daemon.plan import DaemonPlan, ListenOptions, Reload, read_plan

_EPILOG = """\b
Exit codes:
  0  stopped as asked; with --once: all good
  1  failed; with --once: could not tell
  2  wrong usage or settings
  3  with --once: something is bad
  4  with --once: something is incomplete, pending or suspect
  10 with --once: no such run
  11 another daemon has the socket
  130 with --once: interrupted
"""


def _probe(context: click.Context, option: click.Parameter, address: str | None) -> None:
    if address is not None:
        from ckptguard_daemon.liveness import probe

        wrong = probe(address, "/healthz" if option.name == "alive" else "/readyz")
        click.echo(wrong, err=True) if wrong else None
        context.exit(1 if wrong else 0)


class _Command(click.Command):
    """Tells wrong usage in the words of `ckptguard`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise restated(error) from error


@click.command(
    cls=_Command, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.argument("runs", nargs=-1, metavar="[RUN...]")
@click.option(
    "--fleet", metavar="FLEET", help="Find the runs in a folder, at a URL, or by a fleet file, and new ones later."
)
@click.option("--once", is_flag=True, help="Verify what is there, and end: for cron or a job's epilog.")
@click.option("--limit", metavar="SPAN", help="With --once: end after SPAN (10m). What has no verdict stays pending.")
@click.option("--config", metavar="FILE", help="Use this settings file, not ./ckptguard.toml.")
@click.option("--socket", "socket_path", metavar="PATH", help="Listen here, not in the runtime folder.")
@click.option("--parent", type=int, metavar="PID", help="Stop when this parent process is gone.")
@click.option("--log-file", metavar="PATH", help="Append the log to a file instead of stderr.")
@click.option(
    "--log-format",
    type=click.Choice(["auto", "text", "json"]),
    default="auto",
    metavar="FORM",
    help="Log text or json; auto is text on a terminal.",
)
@click.option("--metrics", metavar="HOST:PORT", help="Answer Prometheus here, too: GET /metrics.")
@click.option("--metrics-token", metavar="FILE", help="Tell the metrics only to those who know this file's secret.")
@click.option("--metrics-file", metavar="PATH", help="Keep the metrics in this file, for a node's textfile collector.")
@click.option("--http", metavar="HOST:PORT", help="Serve the dashboard here, too. Port 0 is any free one.")
@click.option("--tls-cert", metavar="FILE", help="With --http: the certificate, needed if other machines can connect.")
@click.option("--tls-key", metavar="FILE", help="With --http: the key of the certificate.")
@click.option("--tokens", metavar="FILE", help="With --http: who may log in; `ckptguard token` adds a line.")
@click.option("--http-url", metavar="URL", help="With --http: the address that browsers see, if a proxy stands before.")
@click.option(
    "--link",
    type=click.Choice([role.word for role in Role]),
    metavar="ROLE",
    callback=lambda context, option, word: None if word is None else role_named(word),
    help="With --http: print a link that logs in once, as reader or operator.",
)
@click.option("--if-unguarded", is_flag=True, help="Only look at a run while another daemon guards it.")
@click.option(
    "--example",
    type=click.Choice(list(EXAMPLES)),
    metavar="WHAT",
    is_eager=True,
    expose_value=False,
    callback=print_example,
    help=f"Print an example to edit, and end: {', '.join(EXAMPLES)} (a folder).",
)
@click.option(
    "--alive",
    metavar="SOCKET",
    is_eager=True,
    expose_value=False,
    callback=_probe,
    help="Ask the daemon there whether it works, and end: for a liveness probe.",
)
@click.option(
    "--ready",
    metavar="SOCKET",
    is_eager=True,
    expose_value=False,
    callback=_probe,
    help="The same: whether it knows its runs, for a readiness probe.",
)
@click.version_option(__version__, package_name="ckptguard", message="%(prog)s %(version)s")
def command(runs: tuple[str, ...], **options: Any) -> None:
    """Watch training runs: verify every new save, keep copies of the good ones, and tell you of bad ones.

    RUN is the folder or URL into which a training saves. It need not exist yet.
    """

    def read() -> DaemonPlan:
        return read_plan(runs, options["fleet"], options["config"], os.environ)

    try:
        limit = None if options["limit"] is None else parse_span(options["limit"])
        if limit is not None and not options["once"]:
            raise SettingsError("--limit is the time limit of --once", hint="name both, or neither")
        _start_logging(options["log_file"], options["log_format"])
        plan = read()
    except CkptguardError as error:
        _end(error)
    # Imported after the settings were checked, so that a mistake in them is reported at once.
    from ckptguard_daemon.liveness import TimeLimit
    from ckptguard_daemon.once import run_once
    from ckptguard_daemon.service import serve

    listen = ListenOptions(**{name: options[name] for name in ListenOptions.__struct_fields__})
    stop, parent = threading.Event(), options["parent"]
    wanted = None if parent is None else lambda: os.getppid() == parent
    code: int = ExitCode.INTERRUPTED if options["once"] else ExitCode.GOOD
    codes: dict[int, int] = {signal.SIGTERM: code, signal.SIGINT: code}
    end_in_time(codes, stop.set, wanted=wanted, say=lambda: log("stop_forced", level="warning"))
    for number in codes:  # only now: before, a signal would be lost
        signal.signal(number, lambda *_: None)

    hang_up = threading.Event()
    lasting = plan.fleet is not None or options["tokens"] is not None
    if lasting and options["link"] is None:  # otherwise the terminal's end is the daemon's
        signal.signal(signal.SIGHUP, lambda *_: hang_up.set())

    gc.freeze()  # imported modules stay; the idle daemon need not scan them again
    try:
        if options["once"]:
            timed = None if limit is None else TimeLimit(limit, stop)
            code = run_once(plan, stop, listen)
            if timed is not None and timed.is_over:
                code = timed.code_of(code)
            elif stop.is_set():
                code = ExitCode.INTERRUPTED
        else:
            reload = Reload(asked=hang_up, read=read)
            code = serve(plan, os.environ, stop, listen, wanted=wanted, reload=reload)
    except CkptguardError as error:
        _end(error)
    except Exception as error:
        reported = machine_trouble(error)
        if reported is None:
            raise
        _end(reported)
    sys.stderr.flush()
    # Not sys.exit: a thread that hangs in a dead network file system must not keep the daemon from stopping.
    os._exit(code)


def _start_logging(log_file: str | None, form: str) -> None:
    try:
        start_logging(log_file, form)
    except OSError as error:
        raise SettingsError(f"cannot write the log {log_file}: {error.strerror}") from error


def _end(error: CkptguardError) -> Any:
    report_error(error)
    sys.exit(of_error(error))
