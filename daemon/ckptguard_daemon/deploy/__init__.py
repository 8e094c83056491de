"""The files of this folder, which ``--example`` prints."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import click

_DEPLOY = Path(__file__).parent
EXAMPLES = {
    "service": "ckptguard-daemon.service",
    "template": "ckptguard-daemon@.service",
    "container": "Containerfile",
    "settings": "ckptguard.toml",
    "rules": "ckptguard-rules.yml",
    "grafana": "ckptguard-grafana.json",
    "nginx": "nginx.conf",
    "caddy": "Caddyfile",
    "slurm-epilog": "slurm/epilog.sh",
    "slurm-prolog": "slurm/prolog.sh",
    "slurm-job": "slurm/job.sh",
    "kubernetes": "kubernetes",
}


def print_example(context: click.Context, _: click.Parameter, name: str | None) -> None:
    """Print an example and end; one that is a folder is written into the current folder."""
    if name is None:
        return
    place = _DEPLOY / EXAMPLES[name]
    if place.is_dir():
        _write_folder(place)
    else:
        click.echo(_with_programs(_whole(place)), nl=False)
    context.exit()


def _write_folder(source: Path) -> None:
    try:
        shutil.copytree(source, source.name)
    except FileExistsError:
        raise click.ClickException(f"the folder {source.name} exists: move it away first") from None
    except OSError as error:
        raise click.ClickException(f"the folder {source.name} cannot be written: {error.strerror or error}") from None
    for path in sorted(p for p in Path(source.name).rglob("*") if p.is_file()):
        click.echo(path)


def _whole(place: Path) -> str:
    """Return the text of an example, with what several have in common."""
    text = place.read_text(encoding="utf-8")
    return re.sub(r"(?m)^#include (\S+)\n", lambda line: (place.parent / line[1]).read_text(encoding="utf-8"), text)


def _with_programs(text: str) -> str:
    """Name our programs by the places that they have here: neither systemd nor Slurm has a PATH of yours."""
    folder = os.path.dirname(sys.executable)
    program = os.path.join(folder, "ckptguard-daemon")
    if not os.path.isfile(program):
        return text
    quoted = f'"{program}"'.replace("%", "%%")  # systemd takes a % for the start of a specifier
    text = re.sub(r"(?m)^ExecStart=\S+", lambda _: f"ExecStart={quoted}", text)
    return re.sub(r"(?m)^BIN=\S+", lambda _: f"BIN={shlex.quote(folder)}", text)
