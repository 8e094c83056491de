"""What importing costs training, and that the examples do what they say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def python(*arguments):
    """Run Python; its output."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_is_light():
    """After torch, `import ckptguard` loads nothing that is not the standard library's, ours or msgspec's."""
    script = (
        "import sys, torch; before = set(sys.modules); import ckptguard; "
        "new = {n.partition('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(*sorted(new))"
    )
    assert set(python("-c", script).split()) <= {"ckptguard", "msgspec"}


def test_the_guard_needs_no_daemon_parts():
    """The guard itself loads neither the daemon's nor the command line's libraries, nor fsspec."""
    script = (
        "import sys, ckptguard; ckptguard.TrainingGuard; "
        "print(*{'starlette', 'uvicorn', 'click', 'rich', 'fsspec', 'http.client'} & set(sys.modules))"
    )
    assert python("-c", script).split() == []


def test_the_plain_loop_goes_back_and_ends(tmp_path):
    """The example overflows once, leaves that batch out and ends with a finite, lower loss."""
    out = python("examples/plain_loop.py", str(tmp_path / "run"))
    losses = [float(line.rpartition(" ")[2]) for line in out.splitlines() if line.startswith("step ")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert len(list((tmp_path / "run" / "_ckptguard" / "incidents").glob("*.txt"))) == 1


def test_the_plain_loop_is_short():
    """The whole of it is about 40 lines."""
    assert len((ROOT / "examples" / "plain_loop.py").read_text().splitlines()) <= 48


def test_the_name_of_the_guard_is_light():
    """After torch, the name loads few modules: what a guard is made of is loaded when one is made."""
    script = (
        "import sys, torch; before = set(sys.modules); from ckptguard import TrainingGuard; "
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = python("-c", script).split()
    assert len(loaded) <= 40, loaded
    heavy = ("verification", "recover", "upkeep", "reporting", "replicas", "storage", "scan", "checks", "formats")
    assert not [name for name in loaded if name.startswith(tuple(f"ckptguard.{room}" for room in heavy))]


def test_observe_loads_nothing():
    """In the middle of training no module is loaded: neither by an update, nor by a look, nor by the next batch."""
    script = (
        "import sys, tempfile, torch, ckptguard\n"
        "model = torch.nn.Linear(2, 2)\n"
        "policy = ckptguard.RollbackPolicy(check_every=2)\n"
        "guard = ckptguard.TrainingGuard(tempfile.mkdtemp(), model=model, daemon='off', policy=policy)\n"
        "for step, _ in guard.steps([1], total=9, save_every=100):\n"
        "    guard.observe(loss=1.0, grad_norm=1.0)\n"
        "    if step == 1: before = set(sys.modules)\n"
        "    if step == 8: print(*sorted(set(sys.modules) - before))\n"
    )
    assert python("-c", script).split() == []
