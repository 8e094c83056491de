"""Coverage-guided fuzzing of one reader, by hand: ``python tests/fuzz/run_fuzzer.py pickle -max_total_time=600``.

Needs the extra ``fuzz`` (atheris). Further arguments go to libFuzzer. Inputs that the fuzzer finds interesting are kept
in a folder below the temporary one; what breaks a target is written beside them as ``crash-*``, ``timeout-*`` or
``oom-*``: mend it, then keep a small input in ``seeds/<target>/``, which the tests replay.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

with atheris.instrument_imports(include=["ckptguard"]):
    from fuzz.starting_points import starting_points
    from fuzz.targets import TARGETS


def main() -> None:
    """Fuzz the target that the first argument names."""
    what, *arguments = sys.argv[1:] or [""]
    if what not in TARGETS:
        sys.exit(f"name one of: {', '.join(TARGETS)}")
    corpus = Path(tempfile.gettempdir()) / "ckptguard-fuzz" / what
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(starting_points(what)):
        (corpus / f"start-{number}").write_bytes(data)
    seeds = HERE / "seeds" / what
    folders = [str(folder) for folder in (corpus, seeds) if folder.is_dir()]
    found = corpus.parent / f"{what}-found"
    found.mkdir(exist_ok=True)
    limits = ["-timeout=10", "-rss_limit_mb=1024", f"-artifact_prefix={found}/"]
    words = HERE / "words" / what
    if words.is_file():
        limits.append(f"-dict={words}")
    atheris.Setup([sys.argv[0], *limits, *arguments, *folders], TARGETS[what])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
