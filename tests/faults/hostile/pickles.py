"""Armed pickles. Each would touch its canary (or tries to), by one of the many ways to run code while loading.

`FIRES` names those of which a test shows, with Python's own unpickler, that they really do.
"""

from __future__ import annotations

import marshal
import pickle
import re
from pathlib import Path

from faults.hostile.assembly import Raw, call, named, stack_named, stream
from faults.hostile.pickle_routes import ROUTES, Armed, Builder, system


def armed_pickles(canary: Path) -> dict[str, Armed]:
    """name -> pickle; each has a canary of its own, `canary` with the name behind it."""
    made = {}
    for name, build in {**_NAMES, **ROUTES}.items():
        made[name] = build(canary_of(canary, name))
    return made


def canary_of(canary: Path, name: str) -> str:
    """The file that one of them would make."""
    return f"{canary}-" + re.sub(r"[^A-Za-z0-9._]", "_", name)


FIRES = (
    "os.system",
    "posix.system",
    "os.popen",
    "subprocess.run",
    "subprocess.getoutput",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "io.open",
    "_io.FileIO",
    "os.open",
    "pathlib.Path.touch",
    "pathlib.Path.write_text",
    "timeit.timeit",
    "runpy._run_code",
    "code.InteractiveInterpreter",
    "cProfile.run",
    "profile.run",
    "bdb.Bdb.run",
    "pydoc.pipepager",
    "logging.config._resolve",
    "pickle.loads",
    "_pickle.loads",
    "uuid._get_command_stdout",
    "asyncio.run",
    "pkgutil.resolve_name",
    "functools.partial",
    "route: INST",
    "route: OBJ",
    "route: NEWOBJ_EX",
    "route: STACK_GLOBAL",
    "route: memoised name",
    "route: getattr of __import__",
    "route: key of a dict",
    "route: item of a set",
    "route: inside a tuple that is thrown away",
    "route: behind a mark that is dropped",
    "route: BUILD with __setstate__",
    "route: append to an object",
    "route: before the damage",
    "route: over the end of a frame",
    "route: protocol 0",
    "route: protocol 5 with frames",
    "route: dotted name",
    "route: default factory",
)


def _python(canary: str) -> str:
    return f"open({canary!r}, 'w').close()"


def _runs(module: str, name: str, *args: object) -> Builder:
    """REDUCE of a global; "SHELL", "CODE" and "CANARY" among the arguments are filled in."""

    def build(canary: str) -> Armed:
        filled = [_filled(a, canary) for a in args]
        return Armed(stream(call(stack_named(module, name), *filled), 4), f"{module}.{name}")

    return build


def _filled(thing: object, canary: str) -> object:
    words = {"SHELL": f"touch '{canary}'", "CODE": _python(canary), "CANARY": canary}
    if isinstance(thing, str):
        return words.get(thing, thing)
    if isinstance(thing, list):
        return [_filled(t, canary) for t in thing]
    if isinstance(thing, tuple):
        return tuple(_filled(t, canary) for t in thing)
    return thing


_TOUCH = ["touch", "CANARY"]
_CALLS: tuple[tuple[object, ...], ...] = (
    ("os", "system", "SHELL"),
    ("posix", "system", "SHELL"),
    ("nt", "system", "SHELL"),
    ("os", "popen", "SHELL"),
    ("os", "execvp", "touch", ["touch", "CANARY"]),
    ("os", "spawnlp", 1, "touch", "touch", "CANARY"),
    ("os", "posix_spawn", "/usr/bin/touch", ["touch", "CANARY"], {}),
    ("os", "remove", "CANARY"),
    ("os", "rename", "CANARY", "CANARY"),
    ("os", "open", "CANARY", 0o102),
    ("os", "putenv", "X", "CANARY"),
    ("subprocess", "run", _TOUCH),
    ("subprocess", "call", _TOUCH),
    ("subprocess", "check_output", _TOUCH),
    ("subprocess", "getoutput", "SHELL"),
    ("_posixsubprocess", "fork_exec", _TOUCH),
    ("pty", "spawn", _TOUCH),
    ("commands", "getoutput", "SHELL"),
    ("popen2", "popen2", "SHELL"),
    ("builtins", "eval", "CODE"),
    ("builtins", "exec", "CODE"),
    ("builtins", "compile", "CODE", "x", "exec"),
    ("builtins", "open", "CANARY", "w"),
    ("builtins", "__import__", "antigravity"),
    ("builtins", "getattr", "x", "__class__"),
    ("builtins", "breakpoint"),
    ("__builtin__", "eval", "CODE"),
    ("__builtin__", "execfile", "CANARY"),
    ("__builtin__", "apply", "x", ()),
    ("io", "open", "CANARY", "w"),
    ("_io", "FileIO", "CANARY", "w"),
    ("pathlib", "Path.touch", Raw(b"")),
    ("shutil", "copyfile", "/etc/passwd", "CANARY"),
    ("shutil", "rmtree", "CANARY"),
    ("tempfile", "NamedTemporaryFile"),
    ("importlib", "import_module", "antigravity"),
    ("importlib.util", "spec_from_file_location", "x", "CANARY"),
    ("pkgutil", "get_loader", "antigravity"),
    ("zipimport", "zipimporter", "CANARY"),
    ("site", "addpackage", "CANARY", "x.pth", None),
    ("runpy", "run_path", "CANARY"),
    ("runpy", "_run_code", Raw(call(named("builtins", "compile"), "pass", "x", "exec").opcodes), {}),
    ("timeit", "timeit", "CODE", "pass", Raw(named("time", "time").opcodes), 1),
    ("cProfile", "run", "CODE"),
    ("profile", "run", "CODE"),
    ("pdb", "run", "CODE"),
    ("trace", "Trace.run", "CODE"),
    ("doctest", "debug_script", "CODE"),
    ("pydoc", "pipepager", "", "SHELL"),
    ("logging.config", "_resolve", "antigravity"),
    ("unittest.mock", "_importer", "antigravity"),
    ("idlelib.pyshell", "ModifiedInterpreter.runcode", "x", "CODE"),
    ("idlelib.run", "Executive.runcode", "x", "CODE"),
    ("idlelib.autocomplete", "AutoComplete.get_entity", "x", "CODE"),
    ("lib2to3.pgen2.pgen", "ParserGenerator.make_label", "x", "CODE"),
    ("lib2to3.pgen2.grammar", "Grammar.loads", "x", b"N."),
    ("distutils.spawn", "spawn", _TOUCH),
    ("distutils.file_util", "write_file", "CANARY", ["x"]),
    ("setuptools", "setup"),
    ("pip", "main", ["download", "x"]),
    ("pip._internal", "main", ["download", "x"]),
    ("ensurepip", "_run_pip", ["list"]),
    ("venv", "main", ["CANARY"]),
    ("ctypes", "CDLL", "CANARY"),
    ("_ctypes", "dlopen", "CANARY", 0),
    ("ctypes.util", "find_library", "c"),
    ("multiprocessing.util", "spawnv_passfds", b"/usr/bin/touch", _TOUCH, ()),
    ("concurrent.futures", "ProcessPoolExecutor"),
    ("threading", "Timer", 0, Raw(named("os", "getpid").opcodes)),
    ("_thread", "start_new_thread", Raw(named("os", "getpid").opcodes), ()),
    ("signal", "raise_signal", 15),
    ("atexit", "register", Raw(named("os", "getpid").opcodes)),
    ("asyncio", "run", None),
    ("webbrowser", "open", "http://127.0.0.1:9/"),
    ("urllib.request", "urlopen", "http://127.0.0.1:9/"),
    ("urllib.request", "urlretrieve", "file:///etc/passwd", "CANARY"),
    ("http.client", "HTTPSConnection", "127.0.0.1"),
    ("socket", "create_connection", ("127.0.0.1", 9)),
    ("_socket", "socket"),
    ("smtplib", "SMTP", "127.0.0.1", 9),
    ("ftplib", "FTP", "127.0.0.1"),
    ("telnetlib", "Telnet", "127.0.0.1", 9),
    ("imaplib", "IMAP4_stream", "SHELL"),
    ("xmlrpc.client", "ServerProxy", "http://127.0.0.1:9/"),
    ("sqlite3", "connect", "CANARY"),
    ("requests", "get", "http://127.0.0.1:9/"),
    ("uuid", "_get_command_stdout", "touch", "CANARY"),
    ("_osx_support", "_read_output", "SHELL"),
    ("_aix_support", "_read_cmd_output", "SHELL"),
    ("_pyrepl.pager", "pipe_pager", "", "SHELL"),
    ("types", "FunctionType", None, {}),
    ("types", "CodeType"),
    ("marshal", "loads", marshal.dumps(compile("1", "x", "eval"))),
    ("pickle", "loads", pickle.dumps(1)),
    ("_pickle", "loads", pickle.dumps(1)),
    ("pickle", "Unpickler"),
    ("dill", "loads", b"N."),
    ("dill._dill", "_create_function", None),
    ("cloudpickle.cloudpickle", "_make_function", None),
    ("joblib", "load", "CANARY"),
    ("operator", "attrgetter", "system"),
    ("operator", "methodcaller", "system", "SHELL"),
    ("functools", "partial", Raw(named("os", "system").opcodes), "SHELL"),
    ("functools", "reduce", Raw(named("os", "system").opcodes), ["SHELL"]),
    ("itertools", "starmap", Raw(named("os", "system").opcodes), [("SHELL",)]),
    ("builtins", "map", Raw(named("os", "system").opcodes), ["SHELL"]),
    ("copyreg", "add_extension", "os", "system", 1),
    ("copyreg", "__newobj__", Raw(named("os", "system").opcodes)),
    ("linecache", "getlines", "/etc/passwd"),
    ("fileinput", "input", "/etc/passwd"),
    ("numpy", "load", "CANARY", None, True),
    ("numpy", "fromfile", "/etc/passwd"),
    ("numpy", "memmap", "CANARY", "uint8", "w+", 0, (1,)),
    ("numpy.f2py", "compile", "CODE"),
    ("numpy.f2py.crackfortran", "getlincoef", "CODE", {}),
    ("numpy.f2py.crackfortran", "_eval_length", "CODE", {}),
    ("numpy.testing._private.utils", "runstring", "CODE", {}),
    ("numpy.distutils.exec_command", "exec_command", "SHELL"),
    ("torch", "load", "CANARY"),
    ("torch.serialization", "load", "CANARY"),
    ("torch.storage", "_load_from_bytes", b"N."),
    ("torch.hub", "load", "x/y", "z"),
    ("torch.jit", "load", "CANARY"),
    ("torch.jit.unsupported_tensor_ops", "execWrapper", "CODE", {}, {}),
    ("torch.package", "PackageImporter", "CANARY"),
    ("torch.utils.collect_env", "run", "SHELL"),
    ("torch.utils.bottleneck.__main__", "run_cprofile", "CODE", {}),
    ("torch.utils._config_module", "ConfigModule.load_config", "x", b"N."),
    ("torch.utils.cpp_extension", "load", "x", "CANARY"),
    ("torch.utils.data.datapipes.utils.decoder", "basichandlers", "pkl", b"N."),
    ("torch.fx.graph_module", "_forward_from_src", "CODE", {}),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression", "x", "CODE", ()),
    ("torch._dynamo.guards", "GuardBuilder.get", "x", "CODE"),
    ("torch._inductor.codecache", "compile_file", "CANARY", "CANARY", "CODE"),
    ("torch.distributed.elastic.multiprocessing", "start_processes", "x"),
    ("torch.distributed.rpc", "init_rpc", "x"),
    ("torch", "FloatStorage.from_file", "CANARY", True, 1),
    ("torch._utils", "_rebuild_tensor.__globals__"),
    ("torch", "_C._jit_set_profiling_mode", True),
    ("transformers", "pipeline", "x"),
    ("transformers.dynamic_module_utils", "get_class_from_dynamic_module", "x.y", "z"),
    ("huggingface_hub", "snapshot_download", "x/y"),
    ("sympy", "sympify", "CODE"),
    ("IPython", "start_ipython"),
    ("ckptguard.cli", "main"),
    ("no.such.module", "anything"),
    ("__main__", "payload"),
    ("", ""),
    ("..", "system"),
    ("os\u202e", "metsys"),
    ("os\n", "system"),
)  # fmt: skip
_NAMES = {f"{c[0]}.{c[1]}": _runs(str(c[0]), str(c[1]), *c[2:]) for c in _CALLS}


_NAMES |= {
    "pathlib.Path.touch": lambda c: Armed(
        stream(call(stack_named("pathlib", "Path.touch"), call(named("pathlib", "Path"), c)), 4), "pathlib.Path.touch"
    ),
    "pathlib.Path.write_text": lambda c: Armed(
        stream(call(stack_named("pathlib", "Path.write_text"), call(named("pathlib", "Path"), c), "x"), 4),
        "pathlib.Path.write_text",
    ),
    "runpy._run_code": lambda c: Armed(
        stream(call(named("runpy", "_run_code"), call(named("builtins", "compile"), _python(c), "x", "exec"), {})),
        "runpy._run_code",
    ),
    "code.InteractiveInterpreter": lambda c: Armed(
        stream(
            call(
                stack_named("code", "InteractiveInterpreter.runsource"),
                call(named("code", "InteractiveInterpreter")),
                _python(c),
                "x",
                "exec",
            ),
            4,
        ),
        "code.InteractiveInterpreter.runsource",
    ),
    "bdb.Bdb.run": lambda c: Armed(
        stream(call(stack_named("bdb", "Bdb.run"), call(named("bdb", "Bdb")), _python(c)), 4), "bdb.Bdb.run"
    ),
    "asyncio.run": lambda c: Armed(
        stream(
            call(
                named("asyncio", "run"),
                call(named("asyncio.subprocess", "create_subprocess_exec"), "touch", c),
            )
        ),
        "asyncio.run",
    ),
    "pkgutil.resolve_name": lambda c: Armed(
        stream(call(call(named("pkgutil", "resolve_name"), "os:system"), f"touch '{c}'")), "pkgutil.resolve_name"
    ),
    "logging.config._resolve": lambda c: Armed(
        stream(call(call(named("logging.config", "_resolve"), "os.system"), f"touch '{c}'")), "logging.config._resolve"
    ),
    "pickle.loads": lambda c: Armed(stream(call(named("pickle", "loads"), system(c))), "pickle.loads"),
    "_pickle.loads": lambda c: Armed(stream(call(named("_pickle", "loads"), system(c))), "_pickle.loads"),
    "functools.partial": lambda c: Armed(
        stream(call(call(named("functools", "partial"), named("os", "system"), f"touch '{c}'"))), "functools.partial"
    ),
}
