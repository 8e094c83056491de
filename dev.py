"""Set everything up, then run the demo or the tests. Needs Python 3.11 or newer with pip, nothing else.

    python dev.py demo    set up, then the demo on real training
    python dev.py test    set up, then ruff, mypy and the tests; further arguments go to pytest
    python dev.py docs    build the site of docs/ into site/; with --refresh write what it repeats of the code first
    python dev.py setup   set up only
    python dev.py matrix  try old and new versions of torch and others, each in an environment of its own (an hour)
    python dev.py sizes   how many lines the packages have; long files, full folders, functions of many parameters

The environment is .venv beside this file. A torch that the calling Python can import is used as it is; otherwise the
requirement in CKPTGUARD_TORCH is installed (default torch==2.13.0).
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this is the one file that an older Python gets to see
    sys.exit(f"ckptguard needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable})")

import ast
import contextlib
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

TORCH = os.environ.get("CKPTGUARD_TORCH", "torch==2.13.0")
ROOT = Path(__file__).resolve().parent
HOME = ROOT / ".venv"
SITE = HOME / "site"  # what builds the documents' site: an environment of its own
STAMP = HOME / "ckptguard-stamp"
BIN = HOME / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
INSTALL = (
    "install",
    "--quiet",
    "--quiet",
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar",
    "off",
    "--no-compile",
)
# What a launcher sets would make torch believe that it is one rank of many; the others would mislead the venv's Python.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MISLEADING = (*LAUNCHER, "PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
# Servers and tools that tests start: what pip does not have. Programs, and the Debian packages that hold them.
PROGRAMS = {
    "chromium": ("chromium",),
    "sshd": ("openssh-server",),
    "promtool": ("prometheus",),
    "radosgw": ("ceph-mon", "ceph-osd", "radosgw"),
    "nginx": ("nginx-light",),
    "caddy": ("caddy",),
    "strace": ("strace",),
    "bwrap": ("bubblewrap",),
    "slurmctld": ("slurmctld", "slurmd", "slurm-client"),
    "systemd-analyze": ("systemd",),
}
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
AZURITE = HOME / "azurite"
PATIENCE = 600  # seconds for one installer other than pip: npm tries for ever where it cannot reach its index
AZURITE_VERSION = "3.37.0"
# A file's tests stay together, for they share what takes long to make.
SIDE_BY_SIDE = ("--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--durations", "50")
# Tests write, sync and delete tens of thousands of small files: three times as fast in memory as on a disk.
MEMORY, MEMORY_NEEDED = Path("/dev/shm"), 4 << 30
CHECKS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))


def environment() -> dict[str, str]:
    """Our environment without what misleads; the venv's scripts first, those beside an inherited torch last."""
    kept = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    folders = (str(BIN), kept.get("PATH", os.defpath), str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    azurite = {"CKPTGUARD_AZURITE": str(AZURITE)} if AZURITE.is_dir() else {}
    return {**azurite, **kept, "PATH": os.pathsep.join(folders), "VIRTUAL_ENV": str(HOME)}


def say(text: str) -> None:
    """One line about what is being done."""
    print(f"[dev] {text}", flush=True)


def run(*command: object) -> int:
    """Run a command in the repository and return its exit code."""
    argv = [str(part) for part in command]
    argv[0] = shutil.which(argv[0], path=environment()["PATH"]) or argv[0]
    try:
        return subprocess.run(argv, cwd=ROOT, env=environment(), check=False).returncode
    except FileNotFoundError:
        say(f"{command[0]} is not there")
        return 127


def asked(python: object, code: str) -> str | None:
    """The last line that a Python prints for some code; None if it fails."""
    argv = [str(python), "-c", code]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    lines = done.stdout.split("\n")
    return lines[-2] if done.returncode == 0 and len(lines) > 1 else None


def torch_folder(python: object) -> str | None:
    """The folder from which a Python imports torch; None if it cannot."""
    return asked(python, "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))")


def create(theirs: str | None) -> None:
    """Make a fresh .venv that sees `theirs`, the folder of an importable torch, if there is one."""
    if HOME.is_symlink():  # what it leads to is another checkout's, and would be emptied
        sys.exit(f"[dev] {HOME} is a link, and would be emptied where it leads: remove the link, or use its Python")
    say(f"creating {HOME.name} with Python {sys.version.split()[0]}")
    in_venv = sys.prefix != sys.base_prefix
    shared = theirs is not None and not in_venv
    venv.EnvBuilder(clear=True, symlinks=os.name != "nt", system_site_packages=shared).create(HOME)
    if theirs is not None and in_venv:
        # The packages of a venv are no system's: the new venv sees them through a path file.
        site = asked(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))")
        Path(str(site), "inherited-torch.pth").write_text(theirs + "\n", encoding="utf-8")


def install(what: str, *requirements: str, python: Path = PYTHON) -> None:
    """Install into .venv, or for another Python, with the calling Python's pip, or stop with a sentence."""
    say(f"installing {what}")
    code = run(sys.executable, "-m", "pip", "--python", python, *INSTALL, *requirements)
    if code:
        sys.exit(f"[dev] could not install {what}: pip (22.3 or newer is needed) ended with {code}")


def set_up(*extras: str, beside: Callable[[], object] = lambda: None) -> None:
    """Make .venv hold torch, the package and what the demo needs, and further extras; at once done if it does.
    `beside` is called when there is a .venv, before pip is."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "dev.py"):
        digest.update((ROOT / name).read_bytes())
    # A new Python or torch wants a new venv, new requirements only another pip run.
    which = f"{sys.version} {sys.executable} {TORCH} {ROOT}".replace("\n", " ")
    wanted = [which, digest.hexdigest()]
    found = STAMP.read_text(encoding="utf-8").splitlines() if STAMP.is_file() and PYTHON.exists() else []
    if found[:2] == wanted and set(extras) <= set(found[2:]):
        beside()
        return
    if found[:1] != wanted[:1]:
        create(torch_folder(sys.executable))
    beside()
    STAMP.write_text(which + "\n", encoding="utf-8")
    theirs = torch_folder(PYTHON)
    if theirs:
        say(f"using the torch in {theirs}")
    else:
        install(TORCH, TORCH)
    install("ckptguard and what its tests need", "--editable", f".[{','.join(('test', *extras))}]")
    STAMP.write_text("\n".join((*wanted, *extras)) + "\n", encoding="utf-8")


def set_up_for_tests() -> None:
    """The frameworks, and the servers: apt and npm work while pip does."""
    begun: list[Future[None]] = []
    with ThreadPoolExecutor(1) as another:
        set_up("docs", "servers", "writers", beside=lambda: begun.append(another.submit(install_servers)))
    for one in begun:
        one.result()


def install_servers() -> None:
    """Install the servers that pip does not have, where that is ours to do: as root, or in CI. The tests of a server
    that is not there are skipped (in CI they fail)."""
    packages = [p for program, found in PROGRAMS.items() if not shutil.which(program, path=SYSTEM_PATH) for p in found]
    as_root = [] if os.name != "nt" and os.geteuid() == 0 else ["sudo", "-n"]
    if packages and shutil.which("apt-get") and (not as_root or os.environ.get("CI")):
        say(f"installing {', '.join(packages)}")
        quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
        options = ["-y", "--no-install-recommends", "install"]
        quietly(*as_root, *quiet, "update")
        quietly(*as_root, *quiet, *options, *packages)
    if shutil.which("npm") and not (AZURITE / "node_modules" / "azurite").is_dir():
        say("installing azurite")
        AZURITE.mkdir(parents=True, exist_ok=True)
        options = ["--no-audit", "--no-fund", "--silent", "--prefix", str(AZURITE)]
        quietly("npm", "install", *options, f"azurite@{AZURITE_VERSION}")


def quietly(*command: str) -> None:
    """Run a command and show what it printed only if it fails, which it may, or does not end."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        say(f"{' '.join(command)} was given up after {PATIENCE} s")
        return
    if done.returncode:
        say(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-500:]}")


@contextlib.contextmanager
def in_memory() -> Iterator[tuple[str, ...]]:
    """Options for pytest: the tests' files in memory, where there is room for them. They are deleted in the end."""
    room = os.statvfs(MEMORY) if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    if room is None or room.f_bavail * room.f_frsize < MEMORY_NEEDED or room.f_flag & os.ST_NOEXEC:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="ckptguard-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield ("--basetemp", folder)


def demo(arguments: list[str]) -> int:
    """Set up and run the demo."""
    set_up()
    return run(PYTHON, "examples/demo.py", *arguments)


def test(arguments: list[str]) -> int:
    """Set up, the training frameworks and the servers too, and run every check; pytest's closing line is the last
    where all passed."""
    set_up_for_tests()
    failed = []
    for check in CHECKS:
        say(" ".join(check))
        if run(*check):
            failed.append(" ".join(check))
    say("pytest")
    with in_memory() as options:
        code = run(PYTHON, "-m", "pytest", *SIDE_BY_SIDE, *options, *arguments)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return code or int(bool(failed))


def docs(arguments: list[str]) -> int:
    """Build the documents' site, which ends in an error where a link leads nowhere. It needs its builder alone."""
    if arguments == ["--refresh"]:
        set_up()
        if run(PYTHON, "tests/docs/refresh.py"):
            return 1
    code = run(set_up_for_docs(), "-m", "zensical", "build", "--strict", "--clean")
    if code == 0:
        search_from_disk(ROOT / "site")
        say(f"the site is in {ROOT / 'site' / 'index.html'}")
    return code


def set_up_for_docs() -> Path:
    """Make an environment with the extra `docs` and nothing else, and return its Python."""
    python = SITE / BIN.name / PYTHON.name
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = wanted["project"]["optional-dependencies"]["docs"]
    stamp = SITE / "ckptguard-stamp"
    text = f"{sys.version} {sys.executable} {requirements}"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != text:
        venv.EnvBuilder(clear=True, symlinks=os.name != "nt").create(SITE)
        install("what builds the site", *requirements, python=python)
        stamp.write_text(text, encoding="utf-8")
    return python


def search_from_disk(site: Path) -> None:
    """Let the pages of a site search without a server, and without the script of another machine."""
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        text = page.read_text(encoding="utf-8")
        text = text.replace("https://unpkg.com/iframe-worker/shim", f"{up}assets/search-from-disk.js")
        page.write_text(text, encoding="utf-8")


def sizes() -> int:
    """Print how many lines the packages have, and what is large enough to be looked at. Nothing is a limit."""
    total, large = 0, []
    for folder in (ROOT / "ckptguard", ROOT / "daemon"):
        for path in sorted(folder.rglob("*.py")):
            text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
            lines = len(text.splitlines())
            total += lines
            if lines > 400:
                large.append(f"{name}: {lines} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    if len(taken) > 8:
                        large.append(f"{name}:{node.lineno}: {node.name} takes {len(taken)} parameters")
        folders = [folder, *(p for p in sorted(folder.rglob("*")) if p.is_dir())]
        counts = {p.relative_to(ROOT): len(list(p.glob("*.py"))) for p in folders}
        large += [f"{name}: {count} modules" for name, count in counts.items() if count > 21]
    print(*large, f"{total} lines of Python in the packages", sep="\n")
    return 0


def main(arguments: list[str]) -> int:
    """Do what the first argument says."""
    if Path(sys.prefix) == HOME:
        # Called from inside the venv that we may have to make anew: step outside first.
        os.execv(sys._base_executable, [sys._base_executable, __file__, *arguments])
    verb = arguments[0] if arguments else ""
    if verb == "demo":
        return demo(arguments[1:])
    if verb == "test":
        return test(arguments[1:])
    if verb == "docs":
        return docs(arguments[1:])
    if verb == "matrix":
        return run(sys.executable, "tests/support/matrix.py", *arguments[1:])
    if verb == "sizes":
        return sizes()
    if verb == "setup":
        set_up_for_tests()
        return 0
    print(__doc__)
    return 0 if verb in ("-h", "--help") else 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
