"""What lies in a run: the bytes of its checkpoints in place, and what verifying them says."""

from ckptguard.runs.listing import list_checkpoints
from ckptguard.verify.checkpoint import verify_checkpoint
from support.runs import QUICK


def files_of(run):
    """The bytes of all checkpoints in place, by path."""
    found = {}
    for checkpoint in list_checkpoints(run):
        for key in checkpoint.files:
            with run.storage.open(key) as reader:
                found[key] = reader.read(0, reader.entry.size)
    return found


def verify_all(run):
    """What verifying everything in place says, by path."""
    return {c.path: verify_checkpoint(run, c, QUICK).outcome for c in list_checkpoints(run)}
