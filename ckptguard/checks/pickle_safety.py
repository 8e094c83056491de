"""Would loading this checkpoint's pickles run somebody's code?

Nothing is ever loaded here: only the names that the pickles mention are compared. Block lists cannot be closed
(FACTS: picklescan missed 11 of 71 armed pickles), so a stray file is held against an allow-list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.verdict import Finding, Severity

# torch's own weights-only list, numpy reconstruction, plain containers, and the enums and settings that Hugging
# Face's Trainer writes into training_args.bin.
_ALLOWED = re.compile(
    r"torch\.(?:\w+Storage|Size|device|dtype|Tensor|strided|layout|Generator)"
    r"|torch\.(?:bool|u?int\d+|float\d+\w*|bfloat16|complex\d+|q\w+|double|half|float|long|short|cfloat|cdouble)"
    r"|torch\.storage\.\w+Storage|torch\.(?:per_(?:tensor|channel)_\w+|preserve_format|contiguous_format|channels_last\w*)"
    r"|torch\._utils\._rebuild_(?:tensor(?:_v2|_v3)?|parameter(?:_with_state)?|sparse_tensor|qtensor|meta_tensor_no_storage|nested_tensor|wrapper_subclass)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.serialization\._get_layout"
    r"|torch\.nn\.parameter\.(?:Parameter|Buffer|UninitializedParameter)"
    r"|collections\.(?:OrderedDict|Counter|defaultdict|deque)"
    r"|(?:builtins|__builtin__)\.(?:dict|list|set|frozenset|tuple|int|float|complex|bytes|bytearray|str|bool|slice|object)"
    r"|numpy\.(?:ndarray|dtype)|numpy\._?core\.multiarray\.(?:_reconstruct|scalar)|numpy\._?core\.numeric\._frombuffer"
    r"|numpy\.dtypes\.\w+|_codecs\.encode|copyreg\._reconstructor|copy_reg\._reconstructor|datetime\.(?:datetime|timedelta|date)"
    r"|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path|uuid\.UUID"
    r"|transformers\.training_args\.(?:TrainingArguments|OptimizerNames|ParallelMode)"
    r"|transformers\.trainer_utils\.(?:IntervalStrategy|SchedulerType|HubStrategy|SaveStrategy|EvaluationStrategy|FSDPOption)"
    r"|transformers\.trainer_pt_utils\.AcceleratorConfig"
    r"|accelerate\.(?:state\.(?:PartialState|AcceleratorState)|utils\.dataclasses\.(?:DistributedType|DynamoBackend|SageMakerDistributedType))"
)

_EXECUTORS = re.compile(
    r"(?:os|posix|nt|ntpath|posixpath|subprocess|_posixsubprocess|pty|sys|importlib|runpy|pkgutil|zipimport|shutil|ctypes|_ctypes|socket|_socket"
    r"|code|codeop|marshal|pickle|_pickle|pickletools|shelve|dill|cloudpickle|joblib|pip|ensurepip|venv|webbrowser|asyncio|multiprocessing"
    r"|concurrent|threading|_thread|signal|atexit|pdb|bdb|cProfile|profile|trace|timeit|doctest|unittest|test|tempfile|urllib|http|ftplib|smtplib"
    r"|telnetlib|requests|aiohttp|httpx|io|_io|builtins\.__import__|operator|_operator|types|inspect|gc|weakref|linecache|imp|site|commands"
    r"|popen2|torch\.hub|torch\.jit|torch\.utils\.(?:cpp_extension|bottleneck|collect_env|data)|torch\.fx|torch\._dynamo|torch\._inductor"
    r"|torch\.package|torch\.load|torch\.serialization\.load|torch\.storage\._load_from_bytes|torch\.distributed\.elastic|numpy\.f2py"
    r"|numpy\.testing|numpy\._?distutils|numpy\.(?:load|fromfile|memmap|save)|sympy|IPython|idlelib|lib2to3|distutils|setuptools"
    r"|(?:builtins|__builtin__)\.(?:eval|exec|compile|open|getattr|setattr|delattr|globals|locals|vars|input|breakpoint|help|__import__|apply|execfile|map|filter))(?:\..*)?"
)


def check_pickle_safety(evidence: Evidence) -> Iterator[Finding]:
    """In a run: known executors are errors, a global that the series never named before is a warning.
    A stray file: any global outside the allow-list is an error."""
    for file in evidence.scan.files:
        for name in file.structure.globals:
            if name in evidence.trust_globals or is_allowed(name):
                continue
            if is_executor(name):
                yield _finding(Severity.ERROR, f"loading it would call {name}", file.entry.key, name)
            elif not evidence.in_run:
                hint = f"loading it would use {name}, which is not on the allow-list (--trust-global {name})"
                yield _finding(Severity.ERROR, hint, file.entry.key, name)
            elif evidence.known_globals is not None and name not in evidence.known_globals:
                yield _finding(
                    Severity.WARNING, f"it names {name}, which this series never did before", file.entry.key, name
                )


def is_allowed(name: str) -> bool:
    """Whether a dotted global is on the allow-list."""
    return _ALLOWED.fullmatch(name) is not None


def is_executor(name: str) -> bool:
    """Whether a dotted global is a known way to run code."""
    return _EXECUTORS.fullmatch(name) is not None


def _finding(severity: Severity, message: str, file: str, name: str) -> Finding:
    return Finding(check="pickle-safety", severity=severity, message=message, file=file, found=name)
