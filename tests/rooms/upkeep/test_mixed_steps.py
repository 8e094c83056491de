"""Runs whose names hold one number, two, or none, side by side."""

from support.runs import QUICK, save_file, state_dict
from support.views import look

from ckptguard.inspect.list_states import survey
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

NAMES = ("checkpoint-7.safetensors", "recovery-0-50.safetensors", "recovery-1-5.safetensors", "last.safetensors")


def test_every_door_takes_a_run_with_steps_of_all_kinds(tmp_path):
    """A pass judges them all, and `verify` and `list` take them."""
    for number, name in enumerate(NAMES):
        save_file(state_dict(number), tmp_path / name)
    done = reconcile(look(str(tmp_path)), PassNotes(), assume_quiet=True)
    assert {c.path: c.outcome for c in done.checked} == dict.fromkeys(NAMES, Outcome.GOOD)
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD
    assert {state.path for state in survey(look(str(tmp_path)))} == set(NAMES)
