"""``ckptguard supervise`` that kills itself at a step: ``killed_supervise.py STEP supervise RUN ... -- COMMAND``."""

from __future__ import annotations

import importlib
import os
import signal
import sys

# step -> where, what, and whether it is done before the kill
STEPS = {
    "the incident is open": ("supervise.recovery", "open_incident", True),
    "the quarantine is marked": ("keep.quarantine", "_move_files", False),
    "it is moved": ("keep.quarantine", "mark_moved", False),
    "the copy is staged": ("recover.roll_back", "copy_differs", True),
    "the known-good is in place": ("recover.roll_back", "rewritten", False),
    "the incident is not closed": ("supervise.recovery", "close_incident", False),
    "the command is about to start": ("supervise.command", "SupervisedCommand.start", False),
    "the command has started": ("supervise.command", "SupervisedCommand.start", True),
}


def main() -> None:
    """Run the command line with one function replaced."""
    where, what, done = STEPS[sys.argv.pop(1)]
    place = importlib.import_module(f"ckptguard.{where}")
    *inside, name = what.split(".")
    for part in inside:
        place = getattr(place, part)
    original = getattr(place, name)

    def killed(*arguments, **named):
        if done:
            original(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    setattr(place, name, killed)
    from ckptguard.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
