"""The command ``ckptguard-daemon``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click

from ckptguard.errors import BusyError, CkptguardError, NotFoundError, SettingsError
from ckptguard.storage.failures import machine_trouble
from ckptguard.values.ids import escape
from ckptguard.version import __version__
from ckptguard_daemon.log import start_logging
from ckptguard_daemon.plan import Again, Plan, read_plan

_EPILOG = """\b
Exit codes:
  0  stopped as asked; with --once: all good
  1  failed; with --once: could not tell
  2  wrong usage or settings
  3  with --once: something is bad
  4  with --once: something is incomplete, pending or suspect
  10 with --once: no such run
  11 another daemon has the socket
"""
_EXAMPLES = {
    "service": "ckptguard-daemon.service",
    "container": "Containerfile",
    "settings": "ckptguard.toml",
    "rules": "ckptguard-rules.yml",
    "grafana": "ckptguard-grafana.json",
}


def _print_example(context: click.Context, _: click.Parameter, name: str | None) -> None:
    if name is not None:
        text = Path(__file__).with_name("deploy").joinpath(_EXAMPLES[name]).read_text(encoding="utf-8")
        program = Path(sys.executable).with_name("ckptguard-daemon")
        if program.is_file():  # systemd knows no PATH of ours, and takes a % for the start of a specifier
            text = text.replace("%h/.local/bin/ckptguard-daemon", f'"{program}"'.replace("%", "%%"))
        click.echo(text, nl=False)
        context.exit()


@click.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("runs", nargs=-1, metavar="[RUN...]")
@click.option(
    "--fleet", metavar="FLEET", help="Find the runs in a folder, at a URL, or by a fleet file, and new ones later."
)
@click.option("--once", is_flag=True, help="Verify what is there, and end: for cron or a job's epilog.")
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
@click.option(
    "--settle", type=float, metavar="SECONDS", help="Take a save for finished when it is unchanged for so long."
)
@click.option("--interval", type=float, metavar="SECONDS", help="Look this often, also without a sign of change.")
@click.option("--metrics", metavar="HOST:PORT", help="Answer Prometheus here, too: GET /metrics.")
@click.option("--metrics-token", metavar="FILE", help="Tell the metrics only to those who know this file's secret.")
@click.option("--metrics-file", metavar="PATH", help="Keep the metrics in this file, for a node's textfile collector.")
@click.option("--records", metavar="URL", help="Keep the records here, not in RUN/_ckptguard.")
@click.option(
    "--example",
    type=click.Choice(list(_EXAMPLES)),
    metavar="WHAT",
    is_eager=True,
    expose_value=False,
    callback=_print_example,
    help=f"Print an example to edit, and end: {', '.join(list(_EXAMPLES)[:-1])} or {list(_EXAMPLES)[-1]}.",
)
@click.version_option(__version__, package_name="ckptguard", message="%(prog)s %(version)s")
def command(runs: tuple[str, ...], **options: Any) -> None:
    """Watch training runs: verify every new save, keep copies of the good ones, and tell you of bad ones.

    RUN is the folder or URL into which a training saves. It need not exist yet.
    """

    def read() -> Plan:
        flags = {"settle": options["settle"], "scan_interval": options["interval"], "records": options["records"]}
        return read_plan(runs, options["fleet"], options["config"], os.environ, flags)

    try:
        plan = read()
        _start_logging(options["log_file"], options["log_format"])
    except CkptguardError as error:
        _end(error)
    # Imported after the settings were checked, so that a mistake in them is reported at once.
    from ckptguard_daemon.publish import MetricsOptions
    from ckptguard_daemon.service import run_once, serve

    metrics = MetricsOptions(
        address=options["metrics"], token_file=options["metrics_token"], file=options["metrics_file"]
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    hang_up = threading.Event()
    if plan.fleet is not None:  # otherwise the terminal's end is the daemon's
        signal.signal(signal.SIGHUP, lambda *_: hang_up.set())

    gc.freeze()  # imported modules stay; the idle daemon need not scan them again
    try:
        if options["once"]:
            code = run_once(plan, stop, metrics=metrics)
            if stop.is_set():
                code = 130
        else:
            parent, path = options["parent"], options["socket_path"]
            wanted = (lambda: True) if parent is None else (lambda: os.getppid() == parent)
            again = Again(asked=hang_up, read=read)
            code = serve(plan, os.environ, stop, socket_path=path, still_wanted=wanted, again=again, metrics=metrics)
    except CkptguardError as error:
        _end(error)
    except Exception as error:
        told = machine_trouble(error)
        if told is None:
            raise
        _end(told)
    sys.stderr.flush()
    # Not sys.exit: a thread that hangs in a dead network file system must not keep the daemon from stopping.
    os._exit(code)


def _start_logging(log_file: str | None, form: str) -> None:
    try:
        start_logging(log_file, form)
    except OSError as error:
        raise SettingsError(f"cannot write the log {log_file}: {error.strerror}") from error


def _end(error: CkptguardError) -> Any:
    click.echo(f"error: {escape(error.message)}", err=True)
    if error.hint:
        click.echo(f"hint: {escape(error.hint)}", err=True)
    codes: tuple[tuple[type[CkptguardError], int], ...] = ((SettingsError, 2), (NotFoundError, 10), (BusyError, 11))
    sys.exit(next((code for kind, code in codes if isinstance(error, kind)), 1))


def main() -> None:
    """The entry point."""
    command(prog_name="ckptguard-daemon")


if __name__ == "__main__":
    main()
