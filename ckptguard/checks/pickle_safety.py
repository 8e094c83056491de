"""Check whether loading this checkpoint's pickles could run foreign code.

Nothing is loaded here: only the names that the pickles mention are compared. Block lists are never complete: picklescan
missed 11 of 71 armed pickles. So a stray file is compared with an allow-list.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial

from ckptguard.checks.evidence import Evidence
from ckptguard.scan.result import ScannedFile
from ckptguard.values.verdict import Finding, Severity

# These patterns are compiled when the first name is looked up, because most checkpoints name nothing.
# torch's own weights-only list, numpy reconstruction, plain containers, and the enums, settings and records that
# training systems write. All of these only hold values.
_ALLOWED = (
    r"torch\.(?:cuda\.)?\w+Storage|torch\.(?:cuda\.)?(?:sparse\.)?\w+Tensor"
    r"|torch\.(?:Size|device|dtype|Tensor|strided|layout|Generator)"
    r"|torch\.(?:bool|u?int\d+|float\d+\w*|bfloat16|complex\d+|q\w+|bits\w+|double|half|float|long|short|cfloat|cdouble)"
    r"|torch\.storage\.\w+Storage|torch\.(?:per_(?:tensor|channel)_\w+|preserve_format|contiguous_format|channels_last\w*)"
    r"|torch\._utils\._rebuild_(?:tensor(?:_v2|_v3)?|parameter(?:_with_state)?|sparse_tensor|qtensor"
    r"|meta_tensor_no_storage|nested_tensor|wrapper_subclass|device_tensor_from_(?:cpu_tensor|numpy))"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.serialization\._get_layout"
    r"|torch\.nn\.parameter\.(?:Parameter|Buffer|UninitializedParameter)"
    # TorchScript's own classes: their code is in the archive, and no Python module can have such a name.
    r"|torch\.jit\._pickle\.(?:build_\w+list|restore_type_tag)|__torch__(?:\.\w+)+|transformer_engine\.common\.recipe\.\w+"
    r"|torch\.distributed\.checkpoint\.metadata\.(?:Metadata|MetadataIndex|StorageMeta|TensorStorageMetadata"
    r"|BytesStorageMetadata|ChunkStorageMetadata|TensorProperties|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._Storage(?:Info|Prefix)"
    r"|torch\.distributed\.checkpoint\.planner\.(?:WriteItem|WriteItemType|TensorWriteData|BytesIOWriteData|SavePlan)"
    r"|torch\.distributed\.checkpoint\.hf_storage\._HFStorageInfo"
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.(?:TensorProperties|MEM_FORMAT_ENCODING)|torch\.distributed\._shard\.metadata\.ShardMetadata"
    r"|torch\.distributed\.(?:_tensor|tensor)(?:\.\w+)?\.(?:DTensor|DTensorSpec|TensorMeta|Shard|_StridedShard|Replicate|Partial|_?DeviceMesh)"
    r"|torch\.distributed\.device_mesh\.DeviceMesh|torch\.distributed\.remote_device\._remote_device"
    r"|collections\.(?:OrderedDict|Counter|defaultdict|deque)|types\.SimpleNamespace|typing\.(?:Any|Union|Optional|List|Dict|Tuple)|argparse\.Namespace"
    r"|(?:builtins|__builtin__)\.(?:dict|list|set|frozenset|tuple|int|long|float|complex|bytes|bytearray|str|unicode|bool|slice|range|object|NoneType)"
    r"|numpy\.(?:ndarray|dtype)|numpy\._?core\.multiarray\.(?:_reconstruct|scalar)|numpy\._?core\.numeric\._frombuffer"
    r"|numpy\.dtypes\.\w+|_codecs\.encode|copyreg\._reconstructor|copy_reg\._reconstructor|datetime\.(?:datetime|timedelta|date)"
    # What stable-baselines3 keeps in its ``data``: spaces, schedules, and which classes it was built of.
    r"|gym(?:nasium)?\.spaces\.\w+\.\w+|torch\.nn\.modules\.activation\.\w+"
    r"|(?:stable_baselines3|sb3_contrib)\.(?:\w+\.)+(?:\w*(?:Policy|Buffer|Schedule)|TrainFreq|TrainFrequencyUnit)"
    r"|numpy\.random\._pickle\.__(?:generator|bit_generator|randomstate)_ctor|numpy\.random\._\w+\.(?:PCG64|MT19937)"
    r"|numpy\.random\.bit_generator\.(?:SeedSequence|__pyx_unpickle_SeedSequence)"
    r"|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path|uuid\.UUID"
    r"|transformers\.training_args\.(?:TrainingArguments|OptimizerNames|ParallelMode)"
    r"|transformers\.trainer_utils\.(?:IntervalStrategy|SchedulerType|HubStrategy|SaveStrategy|EvaluationStrategy|FSDPOption)"
    r"|transformers\.trainer_pt_utils\.AcceleratorConfig"
    r"|accelerate\.(?:state\.(?:PartialState|AcceleratorState)|utils\.dataclasses\.(?:DistributedType|DynamoBackend|SageMakerDistributedType))"
    # Trainer's arguments make these of a dict or a JSON file, so they reach no further than the arguments do.
    r"|accelerate\.utils\.(?:dataclasses\.DeepSpeedPlugin|deepspeed\.HfDeepSpeedConfig)"
    r"|transformers\.integrations\.deepspeed\.Hf(?:Trainer)?DeepSpeedConfig"
    r"|deepspeed\.runtime\.zero\.config\.ZeroStageEnum|deepspeed\.runtime\.fp16\.loss_scaler\.(?:Dynamic)?LossScaler"
    r"|deepspeed\.utils\.tensor_fragment\.fragment_address"
    r"|torchao\.(?:\w+\.)*(?:\w+Tensor|\w+Kwargs|Per(?:Row|Tensor|Group|Axis|Token|Block)|MappingType|ZeroPointDomain)"
    r"|megatron\.core\.(?:transformer\.)?enums\.\w+"
    r"|(?:lightning(?:\.fabric|_fabric)|(?:pytorch_lightning|lightning\.pytorch))\.utilities\.(?:data|parsing)\.AttributeDict"
    r"|omegaconf\.(?:dictconfig\.DictConfig|listconfig\.ListConfig|base\.(?:Metadata|ContainerMetadata)|nodes\.\w+Node)"
)

# Modules of which nothing belongs in a checkpoint, at any depth.
_EXECUTING_MODULES = (
    r"(?:os|posix|nt|ntpath|posixpath|subprocess|_posixsubprocess|pty|sys|importlib|runpy|pkgutil|zipimport|shutil"
    r"|ctypes|_ctypes|socket|_socket|codeop|marshal|pickle|_pickle|cPickle|pickletools|shelve|dill|cloudpickle|pip|ensurepip"
    r"|webbrowser|asyncio|multiprocessing|concurrent|threading|_thread|atexit|pdb|bdb|cProfile|doctest|unittest|tempfile"
    r"|urllib2|ftplib|smtplib|telnetlib|linecache|popen2|pydoc|py_compile|compileall|rlcompleter|logging\.config"
    r"|aiohttp|httpx|torch\.hub|torch\.jit|torch\.utils\.(?:cpp_extension|bottleneck|collect_env|data\.datapipes)|torch\.fx"
    r"|torch\._dynamo|torch\._inductor|torch\.ops|torch\._ops|torch\.classes|torch\._classes|torch\.testing\._internal"
    r"|torch\.utils\.(?:model_zoo|show_pickle|_config_module)|torch\.distributed\.rpc|torch\.package|torch\.distributed\.elastic|numpy\.f2py|numpy\.testing"
    r"|numpy\._?distutils|sympy|IPython|idlelib|lib2to3|distutils|setuptools)(?:\..*)?"
)

# Modules that also hold harmless things, or whose names a project may use itself (code, test, profile). Listed are
# the functions and classes that run code, reach other objects, or open files and connections.
_EXECUTORS = (
    r"(?:(?:builtins|__builtin__)\.(?:eval|exec|compile|open|file|getattr|setattr|delattr|globals|locals|vars|input"
    r"|raw_input|breakpoint|help|__import__|__build_class__|apply|execfile|reload|map|filter)"
    r"|code\.(?:InteractiveInterpreter|InteractiveConsole|interact|compile_command)"
    r"|test\.(?:support|libregrtest|regrtest|script_helper|autotest)"
    r"|profile\.(?:run|runctx|Profile|main)|trace\.(?:Trace|main)|timeit\.(?:timeit|repeat|Timer|main)"
    r"|_?io\.(?:open|open_code|FileIO|text_encoding)"
    r"|_?operator\.(?:attrgetter|methodcaller|call)"
    r"|types\.(?:FunctionType|LambdaType|CodeType|MethodType|ModuleType|new_class|coroutine)"
    r"|inspect\.(?:_?main|stack|currentframe|trace|getmodule|getattr_static|getsource|getouterframes|getinnerframes)"
    r"|gc\.(?:get_objects|get_referrers|get_referents)|weakref\.(?:finalize|WeakMethod)"
    r"|signal\.(?:signal|alarm|setitimer|siginterrupt|raise_signal|pthread_kill|pidfd_send_signal|set_wakeup_fd)"
    r"|imp\.(?:load_\w+|init_\w+|create_dynamic|find_module|reload|_load\w*)"
    r"|site\.(?:main|add\w+|exec\w+|venv)|venv\.(?:create|main|EnvBuilder)|commands\.(?:getoutput|getstatusoutput|getstatus)"
    r"|urllib\.(?!parse\.\w+$).*|http\.(?:client|server|cookiejar|cookies)"
    r"|requests\.(?!structures\.\w+$).*|joblib\.(?!numpy_pickle\.NumpyArrayWrapper$).*"
    r"|torch\.load|torch\.serialization\.load|torch\.storage\._load_from_bytes|numpy\.(?:load|fromfile|memmap|save|lib\.npyio)"
    r"|pandas\.(?:read_\w+|eval|io\..*)|(?:codecs|gzip|bz2|lzma|tarfile)\.open|zipfile\.ZipFile|sqlite3\.connect"
    r"|typing\.(?:get_type_hints|ForwardRef)|uuid\._\w+|platform\.(?:popen|_syscmd_\w+)|_(?:osx|aix)_support)(?:\..*)?"
)

NAMES_BETWEEN = ", "  # in the finding about names outside the allow-list

# In an archive of files: stable-baselines3 writes the functions that training was given (a schedule of learning rates)
# by cloudpickle, which its loader runs.
_OF_CLOUDPICKLE = re.compile(r"cloudpickle\.cloudpickle\._(?:make|builtin|function|class|get_or_create|cell)\w*")


def check_pickle_safety(evidence: Evidence) -> Iterator[Finding]:
    """Known executors are errors. So are globals outside the allow-list in a stray file.

    In a run these are a warning, if the series never named them before. Each file has one such finding, which names all
    of them.
    """
    reference = (evidence.reference or evidence.sealed) if evidence.in_run else None
    named_before = {name for f in reference.files for name in f.globals} if reference is not None else None
    for file in evidence.scan.files:
        finding = partial(Finding, "pickle-safety", file=file.entry.key)
        unlisted: list[str] = []
        for name in unknown_names([file], evidence.trust_globals):
            of_writer = evidence.in_run and file.structure.members and _OF_CLOUDPICKLE.fullmatch(name)
            expected = of_writer if named_before is None else name in named_before
            if is_executor(name) and not of_writer:
                yield finding(Severity.ERROR, f"loading it would call {name}", found=name)
            elif not expected:
                unlisted.append(name)
        if not unlisted:
            continue
        several, more = len(unlisted) > 1, len(unlisted) - 1
        if named_before is not None:
            more_names = f" and {more} more names" if several else ""
            what = f"it names {unlisted[0]}{more_names}, which no earlier checkpoint of this series did"
        else:
            more_names = f" and {more} more names that are" if several else ", which is"
            what = f"loading it would use {unlisted[0]}{more_names} not on the allow-list"
        severity = Severity.WARNING if evidence.in_run else Severity.ERROR
        yield finding(severity, what, found=NAMES_BETWEEN.join(unlisted), count=len(unlisted))


def unknown_names(files: Iterable[ScannedFile], trusted: Collection[str]) -> Iterator[str]:
    """Yield the globals in pickles of these files that are neither on the allow-list nor trusted by the user."""
    names = dict.fromkeys(name for file in files for name in file.structure.globals)
    return (name for name in names if not (is_allowed(name) or is_trusted(name, trusted)))


def is_trusted(name: str, trusted: Collection[str]) -> bool:
    """True if a user trusts a dotted global, by its name or by a pattern (``torch.nn.*``). No pattern reaches a known
    way to run code."""
    return name in trusted or (any(fnmatchcase(name, one) for one in trusted) and not is_executor(name))


def is_allowed(name: str) -> bool:
    """True if a dotted global is on the allow-list."""
    return re.fullmatch(_ALLOWED, name) is not None


def is_executor(name: str) -> bool:
    """True if a dotted global is a known way to run code."""
    return re.fullmatch(_EXECUTORS, name) is not None or re.fullmatch(_EXECUTING_MODULES, name) is not None
