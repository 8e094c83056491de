"""Supervise: a command whose saves turn sick, or that dies, goes on from the known-good checkpoint."""

import json
import sys

import pytest
from supervised_training import newest, starts

from ckptguard.records.incidents import list_incidents, open_incident
from ckptguard.records.run import open_run

SICK_ONCE = """
if start(run) == 1:
    train(run, 3)
    save(run, 4, nan=True)
    signal.pause()
train(run, 6)
"""


def only_incident(run):
    """The one incident of a run."""
    [incident] = list_incidents(open_run(str(run)))
    return incident


def test_a_command_whose_save_is_sick_goes_on_from_the_known_good_one(supervise, run):
    """A script that resumes from the highest number finds the good one, and ends well, and the record says it."""
    done = supervise(SICK_ONCE)
    assert done.code == 0, done.stderr
    assert starts(run) == ["0", "3"]
    assert newest(run) == 6
    assert [p.name for p in run.glob("_ckptguard/quarantine/*/*/*net-*")] == ["held.net-4.safetensors.held"]
    incident = only_incident(run)
    assert (incident.step, incident.cause, incident.state, incident.source) == (4, "numeric", "closed", "supervise")
    assert incident.known_good == "3.1"
    assert "quarantined net-4.safetensors" in incident.actions[-1]
    assert "net-4.safetensors is sick: model.w" in done.stderr


def test_without_supervision_the_same_command_goes_on_from_the_poisoned_one(plainly, run):
    """The case is genuine: started again by hand, the script resumes from the save with NaN in it."""
    plainly("if start(run) == 1:\n    save(run, 3)\n    save(run, 4, nan=True)\n")
    plainly("start(run)")
    assert starts(run) == ["0", "4 sick"]


def test_a_gradient_norm_in_the_log_is_enough(supervise, run):
    """What Hugging Face's Trainer saves after an update that was left out is finite and new: only its log tells."""
    done = supervise(
        """
def checkpoint(step, sick_since=99):
    log = [{"step": s, "grad_norm": float("nan") if s >= sick_since else 1.0} for s in range(1, step + 1)]
    place = run / f"tmp-{step}"
    place.mkdir(parents=True)
    save(place, step).rename(place / "model.safetensors")
    (place / "config.json").write_text("{}")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": log}))
    place.rename(run / f"checkpoint-{step}")

if start(run) == 1:
    for step in (2, 4):
        checkpoint(step)
        await_verdict(run, step)
    checkpoint(6, sick_since=4)
    signal.pause()
note(run, "_".join(sorted(p.name for p in run.glob("checkpoint-*"))))
"""
    )
    assert (done.code, len(starts(run))) == (0, 2), done.stderr
    assert run.with_name("run.checkpoint-2").exists()
    assert "a gradient norm of nan since step 4" in only_incident(run).reason


def test_a_command_that_is_stopped_and_says_that_all_is_well_is_started_again(supervise, run):
    """Exit code 0 in answer to our SIGTERM means nothing: many trainers catch whatever ends them."""
    done = supervise("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + SICK_ONCE)
    assert (done.code, starts(run)) == (0, ["0", "3"])


def test_a_command_that_ends_with_0_over_a_sick_save_is_not_called_good(supervise, run):
    """It is not started again, but its saves are put right, and the exit code says so."""
    done = supervise("start(run)\ntrain(run, 3)\nsave(run, 4, nan=True)\n")
    assert (done.code, starts(run)) == (3, ["0"])
    assert newest(run) == 3
    assert only_incident(run).state == "closed"


def test_a_command_that_ends_with_0_is_not_started_again(supervise, run):
    """Exit code 0 with good saves is the end, and nothing was recorded against it."""
    done = supervise("start(run)\nsave(run, 1)\nsave(run, 2)\n")
    assert (done.code, starts(run)) == (0, ["0"])
    assert list_incidents(open_run(str(run))) == []
    assert "good" in "".join(p.name for p in run.glob("_ckptguard/ledger/*/*"))


def test_a_command_that_was_killed_goes_on_without_what_it_left_half_written(supervise, run):
    """After SIGKILL in the middle of a save, the torn file is out of the way of the next start."""
    done = supervise(
        """
if start(run) == 1:
    train(run, 2)
    (run / "net-3.safetensors").write_bytes((run / "net-2.safetensors").read_bytes()[:-40])
    os.kill(os.getpid(), signal.SIGKILL)
train(run, 4)
"""
    )
    assert done.code == 0, done.stderr
    assert starts(run) == ["0", "2"]
    assert "was killed by signal 9" in done.stderr
    incident = only_incident(run)
    assert (incident.cause, incident.evidence, incident.known_good) == ("crash", {"exit_status": 137}, "2.1")


def test_what_a_first_save_that_was_torn_leaves_is_out_of_the_way_too(supervise, run):
    """Nothing good is there to go back to, but the half file must not stop the next start."""
    done = supervise(
        """
if start(run) == 1:
    save(run, 1)
    half = (run / "net-1.safetensors").read_bytes()[:-40]
    (run / "net-1.safetensors").write_bytes(half)
    os.kill(os.getpid(), signal.SIGKILL)
train(run, 2)
"""
    )
    assert (done.code, starts(run)) == (0, ["0", "0"]), done.stderr


def test_the_budget_is_spent(supervise, run):
    """A command that turns sick every time is started again so often and no more; the records and the code say so."""
    done = supervise("start(run)\ntrain(run, 2)\nsave(run, 3, nan=True)\nsignal.pause()\n", "--max-rollbacks", "1")
    assert (done.code, starts(run)) == (12, ["0", "2"])
    assert "budget of 1 rollbacks is spent" in done.stderr
    last = list_incidents(open_run(str(run)))[-1]
    assert last.state == "closed"
    assert "budget" in last.actions[-1]


def test_sickness_that_comes_again_goes_back_one_further(supervise, run):
    """The checkpoint that led to NaN twice is perhaps not as good as it looks."""
    done = supervise(
        """
if start(run) <= 2:
    train(run, 3)
    save(run, 4, nan=True)
    signal.pause()
train(run, 5)
"""
    )
    assert (done.code, starts(run)) == (0, ["0", "3", "2"]), done.stderr


def test_without_anything_good_the_command_is_stopped_and_the_code_says_why(supervise, run):
    """A first save with NaN leaves nothing to go back to."""
    done = supervise("start(run)\nsave(run, 1, nan=True)\nsignal.pause()\n")
    assert (done.code, starts(run)) == (13, ["0"])
    assert only_incident(run).state == "closed"


def test_a_run_that_is_sick_already_is_put_right_before_the_command_starts(supervise, run):
    """What the records know to be sick is never resumed from."""
    supervise("start(run)\ntrain(run, 2)\nsave(run, 3, nan=True)\n", "--max-rollbacks", "0")
    assert newest(run) == 3
    done = supervise("start(run)\ntrain(run, 3)\n")
    assert (done.code, starts(run)) == (0, ["0", "2"]), done.stderr


def test_damage_of_an_old_checkpoint_stops_nothing(supervise, run):
    """It is told of, and the command runs on."""
    done = supervise(
        """
start(run)
train(run, 3)
path = run / "net-1.safetensors"
data = bytearray(path.read_bytes())
data[-3] ^= 64
path.write_bytes(data)
await_verdict(run, 1, "bad")
train(run, 5)
"""
    )
    assert (done.code, starts(run)) == (0, ["0"]), done.stderr
    assert "net-1.safetensors is bad" in done.stderr
    assert newest(run) == 5


def test_damage_of_the_newest_and_another_schema_stop_nothing(supervise, run):
    """Neither is the fault of training."""
    done = supervise(
        """
start(run)
train(run, 2)
path = run / "net-2.safetensors"
path.write_bytes(path.read_bytes().replace(b"model.w", b"model.v"))
await_verdict(run, 2, "bad")
data = bytearray(save(run, 3).read_bytes())
await_verdict(run, 3)
data[-3] ^= 64
(run / "net-3.safetensors").write_bytes(data)
await_verdict(run, 3, "bad")
train(run, 4)
"""
    )
    assert (done.code, starts(run)) == (0, ["0"]), done.stderr


def test_an_incident_that_a_guard_deals_with_is_left_to_it(supervise, run):
    """While a guard inside the command has it in hand, a sick save is no reason to stop anything."""
    done = supervise(
        """
from ckptguard.values.settings import Settings
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.records.incidents import open_incident, update_incident
from ckptguard.runs.run_view import open_view

start(run)
train(run, 2)
view = open_view(str(run), Settings(settle=0.0))
opened = view.run
incident = open_incident(opened, step=3, cause="numeric", reason="NaN", evidence={}, source="guard")
incident = update_incident(opened, incident, state="handling")
save(run, 3, nan=True)
await_verdict(run, 3, "bad")
save(run, 4, nan=True)
await_verdict(run, 4, "bad")  # whoever judged it has passed over 3
view.forget()
roll_back(view, GoBack(reason="guard", check_writing=False))
update_incident(opened, incident, state="closed", action="went back")
train(run, 4)
"""
    )
    assert (done.code, starts(run)) == (0, ["0"]), done.stderr
    assert newest(run) == 4
    assert only_incident(run).source == "guard"


def test_a_guard_that_ended_with_its_incident_open_no_longer_deals_with_it(supervise, run):
    """What a dead guard left open is closed, and the command goes on from the good one."""
    done = supervise(
        """
from ckptguard.records.incidents import open_incident
from ckptguard.records.run import open_run

if start(run) == 1:
    train(run, 2)
    open_incident(open_run(str(run)), step=3, cause="numeric", reason="NaN", evidence={}, source="guard")
    save(run, 3, nan=True)
    sys.exit(1)
train(run, 3)
"""
    )
    assert (done.code, starts(run)) == (0, ["0", "2"]), done.stderr
    assert {i.state for i in list_incidents(open_run(str(run)))} == {"closed"}


def test_an_incident_that_was_left_open_long_ago_keeps_nobody_from_acting(supervise, run):
    """Its guard ended before this command was started."""
    run.mkdir()
    open_incident(open_run(str(run)), step=1, cause="numeric", reason="NaN", evidence={}, source="guard")
    done = supervise(SICK_ONCE)
    assert (done.code, starts(run)) == (0, ["0", "3"]), done.stderr


@pytest.mark.parametrize("trouble", ["(run / '_ckptguard').write_text('')", "(run / '_ckptguard').symlink_to('/')"])
def test_trouble_of_ours_does_not_touch_the_command(supervise, run, trouble):
    """Without usable records nothing can be judged; the command runs on to its own end and keeps its exit code."""
    done = supervise(f"start(run)\nrun.mkdir()\n{trouble}\nsave(run, 1)\nsave(run, 2)\nsys.exit(5)\n")
    assert (done.code, starts(run)) == (5, ["0"])
    assert "_ckptguard" in done.stderr or "records" in done.stderr


def test_stdin_and_stdout_are_the_commands_own(supervise):
    """Nothing of ours is in the output, and the command reads what we are given."""
    done = supervise("print(sys.stdin.read().upper(), end='')", stdin="some text\n")
    assert (done.code, done.stdout, done.stderr) == (0, "SOME TEXT\n", "")


def test_records_that_are_too_new_are_refused_before_the_command_starts(supervise, run):
    """What cannot be supervised is not started as if it were."""
    (run / "_ckptguard").mkdir(parents=True)
    (run / "_ckptguard" / "format.json").write_text(json.dumps({"format": 99}))
    done = supervise("start(run)")
    assert (done.code, starts(run)) == (1, [])
    assert "upgrade ckptguard" in done.stderr


def test_hooks_are_told_of_damage_and_of_sickness_once(supervise, run, tmp_path):
    """The command of the settings hears of what stops nothing, and of what is done about sick saves."""
    told = tmp_path / "told"
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import json, signal, sys\n"
        "event = {**json.load(sys.stdin), 'held': len(signal.pthread_sigmask(signal.SIG_BLOCK, []))}\n"
        f"open({str(told)!r}, 'a').write(json.dumps(event) + chr(10))\n"
    )
    config = tmp_path / "settings.toml"
    config.write_text(f"on_incident = [{json.dumps(sys.executable)}, {json.dumps(str(hook))}]\n")
    text = """
if start(run) == 1:
    train(run, 3)
    data = bytearray((run / "net-1.safetensors").read_bytes())
    data[-3] ^= 64
    (run / "net-1.safetensors").write_bytes(data)
    await_verdict(run, 1, "bad")
    save(run, 4, nan=True)
    signal.pause()
"""
    done = supervise(text, "--config", str(config))
    assert done.code == 0, done.stderr
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(e["event"], e["step"], e["source"]) for e in events] == [
        ("verdict", 1, "supervise"),
        ("verdict", 4, "supervise"),
        ("incident", 4, "supervise"),
    ], done.stderr
    assert {e["held"] for e in events} == {0}
    noted = [p.stem for p in (run / "_ckptguard" / "told").rglob("*.json")]
    assert sorted(noted) == sorted(["before.0001", *(e["id"].partition(".")[2] for e in events)])


FIXED = """
def save_over(step, nan=False):
    parts = [weights(10 * step + n, nan=nan and n == 2).tobytes() for n in range(4)]
    shape = {"dtype": "F32", "shape": [8, 8]}
    places = {f"model.{n}": {**shape, "data_offsets": [n * 256, n * 256 + 256]} for n in range(4)}
    header = json.dumps(places).encode()
    run.mkdir(exist_ok=True)
    with open(run / "last.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + b"".join(parts))

def verdicts(outcome):
    return len(list(run.glob(f"_ckptguard/ledger/*last.safetensors*/*.{outcome}.json")))

def save_and_wait(step, nan=False):
    before = verdicts("good")
    save_over(step, nan)
    until(lambda: verdicts("good") > before, "a verdict")
"""


def test_a_fixed_name_that_is_saved_over_is_gone_back_in(supervise, run):
    """nanoGPT's one file: the command goes on from it, and it is good again."""
    done = supervise(
        FIXED
        + """
if start(run) == 1:
    for step in (1, 2):
        save_and_wait(step)
    save_over(3, nan=True)
    signal.pause()
good = (run / "last.safetensors").read_bytes()
note(run, "healthy" if b"\\x00\\x00\\xc0\\x7f" not in good else "sick")
save_over(4)
"""
    )
    assert (done.code, len(starts(run))) == (0, 2), done.stderr
    assert run.with_name("run.healthy").exists()
    assert "last.safetensors is sick" in done.stderr


def test_a_command_never_ends_with_0_over_a_sick_fixed_name(supervise, run):
    """Whatever healthy numbered saves lie beside it."""
    done = supervise(FIXED + "start(run)\ntrain(run, 2)\nsave_and_wait(1)\nsave_and_wait(2)\nsave_over(3, nan=True)\n")
    assert (done.code, starts(run)) == (3, ["0"]), done.stderr


def test_training_that_begins_from_scratch_is_stopped(supervise, run):
    """It is told as an incident, and the known-good is in place. What it saved stays if it is what was there before."""
    done = supervise(
        """
if start(run) == 1:
    train(run, 4)
    save(run, 5, nan=True)
    signal.pause()
os.remove(run / "net-1.safetensors")
save(run, 1)
signal.pause()
"""
    )
    assert (done.code, len(starts(run))) == (12, 2), done.stderr
    assert "training began from scratch" in done.stderr
    assert newest(run) == 4
    assert [i.cause for i in list_incidents(open_run(str(run)))] == ["numeric", "anew"]
    assert all(i.state == "closed" for i in list_incidents(open_run(str(run))))
    # The first save has the bytes of the one that was removed, which was good: it stays.
    assert sorted(p.name for p in run.glob("net-*")) == [f"net-{n}.safetensors" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("options", [(), ("--strict",)])
def test_what_nobody_verifies_is_named_at_the_start_and_in_the_last_line(supervise, run, options):
    """A trainer whose saves nobody can read: with --strict that is an exit code, and its own failure comes first."""
    run.mkdir()
    (run / "old.ubj").write_bytes(b"\x89HDF" + bytes(range(256)) * 20)
    script = "(run / 'new.ubj').write_bytes(b'\\x89HDF' + bytes(range(256)) * 20)\n"
    done = supervise(script, *options)
    assert done.code == (4 if options else 0), done.stderr
    lines = done.stderr.splitlines()
    assert "1 file is not understood" in lines[0]
    assert "[[patterns]]" in lines[1]
    assert "2 files are not understood" in lines[-1]
    assert supervise(f"{script}sys.exit(7)\n", *options).code == 7
