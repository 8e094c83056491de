"""Verified runs with kept copies, and what a scrub and a repair leave there."""

from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from support.records_on_disk import files_of
from support.runs import QUICK, write_sharded
from support.views import look

SECOND = "sharded-200/model-00002-of-00003.safetensors"
THIRD = "sharded-200/model-00003-of-00003.safetensors"
ID_200 = CheckpointId("sharded-#", 200, 1)
KEPT = "_ckptguard/kept/sharded-#/000000000200.1/"


def guarded(root, *, keep="copy", writer=write_sharded, steps=(100, 200)):
    """A run of verified checkpoints with kept copies."""
    for step in steps:
        writer(root, step, seed=step)
    run = open_run(str(root))
    reconcile(look(run, QUICK.changed(keep=keep)), PassNotes())
    return run


def told(done):
    """What was read, and what was found."""
    return [(str(one.id), one.place, one.outcome.value) for one in done.places]


def contents(root, folder="sharded-200"):
    """The bytes of every file below a folder."""
    return {f"{folder}/{name}": data for name, data in files_of(root, folder).items()}


def kept(root, folder="sharded-200"):
    """The same in the kept copy."""
    return {name: data for name, data in files_of(root, KEPT).items() if name.startswith(f"{folder}/")}


def in_quarantine(root):
    """The bytes of what was moved aside."""
    return [p.read_bytes() for p in (root / "_ckptguard/quarantine").rglob("*") if p.is_file()]


def leftovers(root):
    """What was staged and not removed."""
    return list(root.rglob("*tmp-repair*"))


def outcomes(run, id=ID_200):
    """The outcomes in the ledger of one generation, in order."""
    names = [n for n in load_history(run).names["sharded-#"] if n.startswith(f"{id.record_name}.")]
    return [name.split(".")[3] for name in sorted(names)]
