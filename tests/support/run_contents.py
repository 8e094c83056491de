"""What lies in a run: the bytes of its checkpoints in place, and what verifying them says."""

from ckptguard.verification.checkpoint import verify_checkpoint
from support.views import look


def files_of(run):
    """The bytes of all checkpoints in place, by path."""
    found = {}
    for checkpoint in look(run).checkpoints:
        for key in checkpoint.files:
            with run.storage.open(key) as reader:
                found[key] = reader.read(0, reader.entry.size)
    return found


def verify_all(run):
    """What verifying everything in place says, by path."""
    return {c.path: verify_checkpoint(look(run), c).outcome for c in look(run).checkpoints}
