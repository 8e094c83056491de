"""Which names in pickles run code, which are harmless, and which only a project's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.format_files import torch_bytes

from ckptguard.checks.pickle_safety import is_allowed, is_executor, is_trusted
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target

EXECUTORS = """
os.system posix.popen nt.system os.path.os.system subprocess.Popen pty.spawn sys.modules importlib.import_module
builtins.eval builtins.exec builtins.getattr builtins.__import__ __builtin__.file __builtin__.execfile
runpy.run_path ctypes.CDLL shutil.rmtree socket.socket pickle.loads dill.loads cloudpickle.cloudpickle._make_function
code.InteractiveInterpreter code.InteractiveInterpreter.runcode code.interact profile.run profile.Profile.runctx
cProfile.run trace.Trace.run timeit.timeit bdb.Bdb.run pdb.run doctest.debug_script pydoc.pipepager
test.support.script_helper.assert_python_ok unittest.mock._importer io.open _io.FileIO tempfile.mktemp
operator.methodcaller operator.attrgetter _operator.methodcaller types.FunctionType types.CodeType inspect.stack
gc.get_objects weakref.finalize signal.signal imp.load_source site.addsitedir venv.create commands.getoutput
urllib.request.urlopen urllib.urlopen http.client.HTTPSConnection requests.get requests.api.get
asyncio.unix_events._UnixSubprocessTransport._start multiprocessing.util.spawnv_passfds uuid._get_command_stdout
logging.config.dictConfig joblib.load numpy.load numpy.f2py.crackfortran.myeval numpy.testing._private.utils.runstring
pandas.read_pickle torch.load torch.hub.load torch.jit.load torch.jit.unsupported_tensor_ops.execWrapper
torch.storage._load_from_bytes torch.fx.graph_module.reduce_graph_module torch._dynamo.guards.GuardBuilder.get
torch._inductor.codecache.compile_file torch.utils.collect_env.run torch.utils.bottleneck.__main__.run_cprofile
torch.utils.data.datapipes.utils.decoder.basichandlers torch.package.PackageImporter torch.ops.load_library
idlelib.pyshell.ModifiedInterpreter.runcode lib2to3.pgen2.grammar.Grammar.loads distutils.file_util.write_file
typing.get_type_hints typing.ForwardRef._evaluate
"""

HARMLESS = """
types.SimpleNamespace argparse.Namespace typing.Any builtins.range collections.OrderedDict
deepspeed.runtime.zero.config.ZeroStageEnum deepspeed.runtime.fp16.loss_scaler.LossScaler
deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler deepspeed.utils.tensor_fragment.fragment_address
torch.distributed.checkpoint.metadata.Metadata torch.distributed.checkpoint.metadata.TensorStorageMetadata
torch.distributed.checkpoint.filesystem._StorageInfo torch.distributed.tensor.DTensor
lightning.fabric.utilities.data.AttributeDict lightning_fabric.utilities.data.AttributeDict
pytorch_lightning.utilities.parsing.AttributeDict omegaconf.dictconfig.DictConfig omegaconf.nodes.AnyNode
megatron.core.enums.ModelType megatron.core.transformer.enums.AttnBackend torch.cuda.FloatStorage torch.FloatTensor
torch.jit._pickle.build_intlist
torchao.quantization.Int8Tensor torchao.quantization.granularity.PerRow
torchao.quantization.quant_primitives.MappingType
"""

OF_PROJECTS = """
code.models.Net code.Config test.Config test.data.Vocab profile.Settings trace.Record commands.Args site.Site
io.BytesIO operator.itemgetter inspect.Signature types.MappingProxyType http.HTTPStatus urllib.parse.ParseResult
torch.utils.data.sampler.RandomSampler torch.utils.data.dataset.Subset signal.Signals timeit.Result imp.Policy
requests.structures.CaseInsensitiveDict mylib.Config
"""


@pytest.mark.parametrize("name", EXECUTORS.split())
def test_known_executors(name: str) -> None:
    """None of these is ever allowed."""
    assert is_executor(name)
    assert not is_allowed(name)


@pytest.mark.parametrize("name", HARMLESS.split())
def test_what_training_systems_write(name: str) -> None:
    """Also in a stray file."""
    assert is_allowed(name)


@pytest.mark.parametrize("name", OF_PROJECTS.split())
def test_a_module_is_not_bad_for_its_name(name: str) -> None:
    """Neither harmless for everybody nor an executor: unknown in a stray file, as before or new in a run."""
    assert not is_executor(name)
    assert not is_allowed(name)


@pytest.mark.parametrize("name", EXECUTORS.split())
def test_a_pattern_trusts_nothing_that_runs_code(name: str) -> None:
    """Only its very name does. Names beside it in the same package are trusted."""
    package = name.rpartition(".")[0]
    assert not is_trusted(name, ("*", f"{package}.*"))
    assert is_trusted(name, ("os", name))
    assert is_trusted("my.layers.Block", ("my.*",))
    assert not is_trusted("mine.layers.Block", ("my.*", "my.layers.Block"))


def test_a_model_saved_as_a_whole_is_one_line(tmp_path: Path) -> None:
    """All names in one error, and a pattern for their package is all that it takes."""
    parts = [torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.BatchNorm1d(2), torch.nn.Dropout(), torch.nn.LayerNorm(2)]
    path = tmp_path / "whole.pt"
    path.write_bytes(torch_bytes(torch.nn.Sequential(*parts)))
    for trusted, outcome, errors in (((), Outcome.BAD, 1), (("torch.nn.*",), Outcome.GOOD, 0)):
        settings = Settings(settle=0.0, trust_globals=trusted)
        [checked] = verify_target(str(path), settings, Selection(record=False)).checkpoints
        told = [f for f in checked.findings if f.check == "pickle-safety"]
        assert (checked.outcome, len(told)) == (outcome, errors)
        for part in parts if told else ():
            name = f"{type(part).__module__}.{type(part).__name__}"
            assert name in (told[0].found or "") or is_allowed(name)
