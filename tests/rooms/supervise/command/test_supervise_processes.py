"""Supervise: signals, exit codes, and every process that the command leaves behind."""

import errno
import os
import pty
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from supervised_training import PATIENCE, newest, starts, until

from ckptguard.reporting.notify import Hooks
from ckptguard.scan.process.worker_process import WorkerLimits, WorkerProcess
from ckptguard.supervise.process_tree import descendants, send_signal
from ckptguard.supervise.wait_for_command import means_it
from ckptguard.values.settings import Settings


def noted(run, name):
    """Wait until the command has noted something."""
    until(lambda: os.path.exists(f"{run}.{name}"), name)


def test_descendants_in_sessions_of_their_own_are_gone_before_the_next_start(supervise, run):
    """What was left by a sick command, in another session and deaf to SIGTERM, no longer runs beside the next one."""
    done = supervise(
        """
if start(run) == 1:
    leave_behind(run)
    train(run, 2)
    save(run, 3, nan=True)
    signal.pause()
sys.exit(7 if is_there(int(Path(f"{run}.left").read_text())) else 0)
""",
        "--stop-seconds",
        "0.2",
    )
    assert (done.code, starts(run)) == (0, ["0", "2"]), done.stderr


def test_what_a_command_that_died_leaves_behind_is_gone_too(supervise, run):
    """Workers of a launcher that was killed must not write beside those of the next one."""
    done = supervise(
        """
if start(run) == 1:
    leave_behind(run)
    train(run, 2)
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7 if is_there(int(Path(f"{run}.left").read_text())) else 0)
""",
        "--stop-seconds",
        "0.2",
    )
    assert (done.code, starts(run)) == (0, ["0", "2"]), done.stderr


def test_what_a_command_that_ended_well_leaves_behind_is_not_ours(supervise, run):
    """It may have started a service on purpose."""
    done = supervise("leave_behind(run)\n")
    again = supervise("pass")
    left = int(run.with_name("run.left").read_text())
    os.kill(left, signal.SIGKILL)  # ProcessLookupError if it were gone
    assert (done.code, again.code) == (0, 0)


def test_what_was_started_before_us_is_not_ours(supervising, run):
    """An entrypoint starts a sidecar and then becomes supervise by exec: the sidecar is our child, and lives on."""
    supervised = supervising("sys.exit(3)")
    note = run.parent / "sidecar"
    supervised.command = ["sh", "-c", f'sleep 600 & echo $! >"{note}"; exec "$@"', "sh", *supervised.command]
    assert supervised.start(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).wait(PATIENCE) == 3
    sidecar = int(note.read_text())
    assert Path(f"/proc/{sidecar}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    os.kill(sidecar, signal.SIGKILL)


def test_a_command_that_ignores_sigterm_is_killed(supervise, run):
    """Politely first, then firmly."""
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif start(run) == 1:\n    train(run, 2)\n"
    text += "    save(run, 3, nan=True)\n    while True: signal.pause()\n"
    done = supervise(text, "--stop-seconds", "0.2")
    assert (done.code, starts(run)) == (0, ["0", "2"]), done.stderr


def test_a_command_is_asked_before_it_is_killed(supervise, run):
    """It gets SIGTERM and the time to answer it."""
    text = "signal.signal(signal.SIGTERM, lambda *_: (note(run, 'asked'), sys.exit(0)))\n"
    done = supervise(text + "if start(run) == 1:\n    train(run, 2)\n    save(run, 3, nan=True)\n    signal.pause()\n")
    assert done.code == 0
    assert run.with_name("run.asked").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_us_is_passed_on_and_ends_it(supervising, run, number):
    """The command ends in its own way, its exit code is ours, and it is not started again."""
    text = f"start(run)\nsignal.signal({number}, lambda *_: sys.exit(42))\nnote(run, 'ready')\nsignal.pause()\n"
    one = supervising(text)
    process = one.start()
    noted(run, "ready")
    process.send_signal(number)
    assert (one.finish().code, starts(run)) == (42, ["0"])


def test_a_command_that_a_signal_of_ours_killed_has_the_code_of_shells(supervising, run):
    """128 + n."""
    one = supervising("start(run)\nsave(run, 1)\nnote(run, 'ready')\nsignal.pause()\n")
    process = one.start()
    noted(run, "ready")
    process.send_signal(signal.SIGTERM)
    assert (one.finish().code, starts(run)) == (143, ["0"])


def test_the_second_signal_is_firm(supervising, run):
    """A command that does not listen, and what is below it, is killed."""
    one = supervising(
        "leave_behind(run)\n"
        "signal.signal(signal.SIGTERM, lambda *_: note(run, 'told'))\nnote(run, 'ready')\nwhile True: signal.pause()\n"
    )
    process = one.start()
    noted(run, "ready")
    process.send_signal(signal.SIGTERM)
    noted(run, "told")
    until(lambda: process.send_signal(signal.SIGTERM) or process.poll() is not None, "the end")
    assert one.finish().code == 137
    left = int(run.with_name("run.left").read_text())
    until(lambda: not os.path.exists(f"/proc/{left}"), "the end of what was below it")


def test_other_signals_reach_the_command_and_end_nothing(supervising, run):
    """Schedulers tell trainers by SIGUSR1 to save."""
    text = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\nnote(run, 'ready')\n"
        "signal.sigwait([signal.SIGUSR1])\nsave(run, 1)\n"
    )
    one = supervising(text)
    process = one.start()
    noted(run, "ready")
    process.send_signal(signal.SIGUSR1)
    assert one.finish().code == 0
    assert newest(run) == 1


def test_a_key_of_the_terminal_reaches_the_command_once(supervising, run):
    """Ctrl-C goes to all processes in the foreground: passed on as well, it would be a second, firmer one."""
    one = supervising(
        """
count = []
signal.signal(signal.SIGINT, lambda *_: (count.append(1), note(run, "told")))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(40 + len(count)))
note(run, "ready")
while True: signal.pause()
"""
    )
    ours, theirs = pty.openpty()
    try:
        process = one.start(stdin=theirs, stdout=theirs, preexec_fn=lambda: _take_terminal(theirs))
        noted(run, "ready")
        os.write(ours, b"\x03")
        noted(run, "told")
        process.send_signal(signal.SIGUSR1)  # is looked at after SIGINT, and passed on after it
        assert process.wait(100) == 41
    finally:
        os.close(ours)
        os.close(theirs)


def test_signals_that_were_ignored_stay_ignored(supervising, run):
    """Under nohup neither we nor the command end with the terminal."""
    one = supervising("note(run, 'ready')\nuntil(Path(f'{run}.go').exists, 'go')\nsys.exit(9 if newest(run) else 0)\n")
    process = one.start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    noted(run, "ready")
    os.killpg(process.pid, signal.SIGHUP)
    run.with_name("run.go").touch()
    assert one.finish().code == 0


def test_the_command_starts_with_the_signals_that_we_were_started_with(process, root):
    """Nothing that we hold back or ignore for ourselves is held back or ignored in it."""
    done = process("supervise", root, "--", "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    held, ignored = (int(line.split()[1], 16) for line in done.stdout.splitlines())
    assert held == 0
    assert ignored & ~(3 << 31) == 0  # the C library ignores two of its own in whatever it starts


def test_wrong_usage_is_not_tried_again(supervise, run):
    """Exit code 2, or a failure at once, with nothing saved: the same command would fail again."""
    for code in (2, 1):
        done = supervise(f"start(run)\nsys.exit({code})\n")
        assert done.code == code
        assert "not started again" in done.stderr
    assert starts(run) == ["0", "0"]


def test_a_command_that_cannot_be_found_or_run(process, root, tmp_path):
    """The codes are those of shells, and the usage of supervise itself is checked."""
    done = process("supervise", root, "--", "no-such-command-anywhere")
    assert (done.returncode, "no-such-command-anywhere cannot be started: No such file" in done.stderr) == (127, True)
    (tmp_path / "plain").write_text("text")
    assert process("supervise", root, "--", tmp_path / "plain").returncode == 126
    assert process("supervise", root).returncode == 2
    assert process("supervise", root, "--stop-seconds", "nan", "--", "true").returncode == 2
    assert process("supervise", tmp_path / "plain", "--", "true").returncode == 10
    assert process("supervise", root, "--max-rollbacks", "-1", "--", "true").returncode == 2


@pytest.mark.parametrize("argv", [["true"], ["sh", "-c", "true"], ["train", "--config", "its-own.yaml"]])
def test_options_of_the_command_are_never_ours(invoke, root, argv):
    """Without -- nobody could tell whose --config is meant."""
    done = invoke("supervise", root, *argv)
    assert (done.exit_code, "write -- before COMMAND" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("told", "now", "from_terminal", "firm"),
    [
        ([], 5.0, False, False),
        ([5.0], 5.001, False, False),
        ([5.0], 6.5, False, True),
        ([5.0, 5.9], 6.5, False, True),
        ([], 5.0, True, False),
        ([5.0], 5.4, True, True),
        ([5.0], 65.0, True, False),
        ([5.0, 65.0], 65.3, True, True),
    ],
)
def test_who_means_it(told, now, from_terminal, firm):
    """`timeout` sends its signal twice at once, which is one; Ctrl-C again in a debugger, much later, is no end."""
    assert means_it(told, now, from_terminal) is firm


def test_two_deaths_without_a_save_are_the_end(supervise, run):
    """A command that only dies is started a second time, and no third."""
    done = supervise("start(run)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert (done.code, starts(run)) == (137, ["0", "0"])
    assert "for the second time without a new good save" in done.stderr
    assert not run.exists()


def test_deaths_with_saves_between_them_go_on_within_the_budget(supervise, run):
    """Each start that got further deserves the next."""
    text = "start(run)\ntrain(run, newest(run) + 1)\nif newest(run) < 4:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    done = supervise(text)
    assert (done.code, starts(run)) == (0, ["0", "1", "2", "3"]), done.stderr
    done = supervise(text.replace("< 4", "< 9"), "--max-rollbacks", "2")
    assert (done.code, starts(run)[4:]) == (12, ["4", "5", "6"]), done.stderr


def test_a_signal_while_nothing_runs_ends_us_too(supervising, run):
    """Asked to end while the sick command takes its time to stop, we do not start it again."""
    text = "start(run)\nsignal.signal(signal.SIGTERM, lambda *_: note(run, 'asked'))\n"
    text += "signal.signal(signal.SIGINT, lambda *_: sys.exit(3))\ntrain(run, 2)\nsave(run, 3, nan=True)\n"
    one = supervising(text + "while True: signal.pause()\n")
    process = one.start()
    noted(run, "asked")
    process.send_signal(signal.SIGINT)
    assert (one.finish().code, starts(run)) == (3, ["0"])


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_signal_goes_to_that_very_process(monkeypatch, has_descriptors):
    """Also where the system has no descriptors of processes; never to another process that has its number now."""
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", _no_descriptors)
    with subprocess.Popen(["sleep", "1000"]) as child:
        [found] = [p for p in descendants(os.getpid()) if p.pid == child.pid]
        assert child.pid not in [p.pid for p in descendants(os.getpid(), leave=lambda: [child.pid])]
        send_signal(found._replace(started=found.started + 1), signal.SIGKILL)
        send_signal(found, signal.SIGTERM)
        assert child.wait(100) == -signal.SIGTERM
    send_signal(found, signal.SIGTERM)  # it is gone: nothing happens


@pytest.mark.parametrize("what", ["hook", "scanning process"])
def test_what_is_being_started_is_known_to_be_ours(monkeypatch, what):
    """Else what stops the command would now and then take a hook with it, which nobody tells of anything then."""
    forked, go, done = threading.Event(), threading.Event(), threading.Event()
    real = subprocess.Popen

    def slow(*args, **kwargs):
        process = real(*args, **kwargs)
        forked.set()
        assert go.wait(PATIENCE)
        return process

    def start_and_stay(worker):
        worker.start()
        assert done.wait(PATIENCE)  # the system ends a scanning process with the thread that started it

    monkeypatch.setattr(subprocess, "Popen", slow)
    if what == "hook":
        hooks = Hooks(Settings(on_incident=("sleep", "1000")), lambda *_, **__: None)
        start, pids = (lambda: hooks.tell(None, {})), (lambda: hooks.pids)
    else:
        worker = WorkerProcess(WorkerLimits(memory=2**32, seconds=60.0))
        start, pids = threading.Thread(target=start_and_stay, args=(worker,)).start, (lambda: [worker.pid])
    start()
    assert forked.wait(PATIENCE)
    seen = []
    asking = threading.Thread(target=lambda: seen.append(pids()))
    asking.start()
    asking.join(0.05)  # long enough to come back too soon
    go.set()
    asking.join(PATIENCE)
    started = [p.pid for p in descendants(os.getpid())]
    done.set()
    assert len(seen[0]) == 1
    assert seen[0][0] in started
    hooks.close(timeout=0.0) if what == "hook" else worker.end()


@pytest.mark.writers
def test_torchruns_workers_are_gone_before_the_next_start(supervise, run):
    """They have sessions of their own; one does not listen, and the next time one is killed beside a sick save."""
    pytest.importorskip("torch")
    script = Path(__file__).with_name("train_ranks.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(run)]
    done = supervise(f"os.execv(sys.executable, [sys.executable, *{launcher!r}])", "--stop-seconds", "1")
    assert (done.code, starts(run)) == (0, ["0", "2", "3"]), done.stderr
    assert run.with_name("done").read_text() == "[]"
    pids = [line.split() for line in run.with_name("pids").read_text().splitlines()]
    assert len(pids) == 6
    assert all(pid == session for pid, session in pids)


def _no_descriptors(pid):
    raise OSError(errno.ENOSYS, "not implemented")


def _take_terminal(terminal):
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)  # preexec_fn runs after setsid
