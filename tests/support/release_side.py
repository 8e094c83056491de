"""A process with one release of ckptguard: it runs commands, trainings and a guard's questions that a test sends it.

It uses nothing but what both releases have, and none of the modules of the tests. Each line of stdin is a JSON array:
the name of a function below, and its arguments. Each answer is a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

KNOWS = os.environ.pop("RELEASE_KNOWS_FORMAT", "")  # a release to come, that reads this format of the records
if KNOWS:
    from ckptguard.values import record_formats

    record_formats.RECORDS = record_formats.RECORDS._replace(reads=int(KNOWS))

import ckptguard  # noqa: E402 - what it reads is set above


def about() -> dict[str, Any]:
    """What was imported: the version, and from where."""
    return {"version": ckptguard.__version__, "file": ckptguard.__file__}


def cli(*words: str) -> dict[str, Any]:
    """A command of the command line."""
    from click.testing import CliRunner

    from ckptguard.cli.entry import commands

    done = CliRunner().invoke(commands, list(words), prog_name="ckptguard")
    return {"code": done.exit_code, "out": done.stdout, "err": done.stderr}


def train(run: str, total: int, sick: list[int], daemon: str) -> dict[str, Any]:
    """A guarded training up to `total` updates, which saves every two. The updates in `sick` give NaN once."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=1)
    done, left = [], set(sick)
    try:
        guard = ckptguard.TrainingGuard(run, model=model, optimizer=optimizer, daemon=daemon)
        for step, batch in guard.steps(loader, total=total, save_every=2):
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            if step in left:
                left.discard(step)
                model.weight.grad.fill_(float("nan"))
            optimizer.step()
            guard.observe(loss=loss, grad_norm=model.weight.grad.norm())
            done.append(step)
        guard.close()
    except ckptguard.CkptguardError as error:
        return {"done": done, "error": type(error).__name__, "message": str(error)}
    return {"done": done, "error": ""}


def ask_daemon(run: str) -> dict[str, Any]:
    """What a guard asks a daemon: is it there, what is known-good, and note this incident."""
    from ckptguard.records.run import open_run
    from ckptguard.training.client import is_alive, let_daemon_verify, report_incident

    one = open_run(run)
    good = let_daemon_verify(one, before_step=None, series="net-#.safetensors", wait_seconds=60.0)
    noted = report_incident(one, step=1, cause="numeric", reason="the loss is NaN", evidence={"loss": float("nan")})
    return {"alive": is_alive(one), "known_good": good and str(good), "incident": noted}


def formats() -> dict[str, int]:
    """The formats that this release writes, as its code has them. Manifests and verdicts are asked of their records."""
    import msgspec

    from ckptguard.records import audit, leases, move_marks, samples
    from ckptguard.records.daemon_record import DaemonRecord
    from ckptguard.records.incidents import Incident
    from ckptguard.records.lineage import Lineage
    from ckptguard.records.who_and_when import Sighting

    kinds = {
        "mark": move_marks.PlaceMark,
        "samples": samples.Samples,
        "action": audit.Action,
        "lease": leases.Lease,
        "daemon": DaemonRecord,
        "incident": Incident,
        "lineage": Lineage,
        "sighting": Sighting,
    }
    return {
        name: next(field.default for field in msgspec.structs.fields(kind) if field.name == "format")
        for name, kind in kinds.items()
    }


def software() -> dict[str, Any]:
    """What a worker of a bulk job says of itself."""
    from ckptguard.bulk.messages import SOFTWARE
    from ckptguard.bulk.worker import identify

    return {**identify(), "software": SOFTWARE}


def accepts(said: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """What a coordinator says of such a worker, and what a worker answers to such a task."""
    from ckptguard.bulk import engine
    from ckptguard.bulk.worker import perform

    if hasattr(engine, "other_software"):
        refused = engine.other_software(said["software"])
    else:  # a release that asked each worker first
        try:
            engine.compare(said)
            refused = ""
        except engine.WorkerError as error:
            refused = str(error)
    return {"refused": refused, "answer": perform(task)}


def main() -> None:
    """Answer one line after the other. What is printed meanwhile goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    functions = {f.__name__: f for f in (about, cli, train, ask_daemon, formats, software, accepts)}
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(functions[name](*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
