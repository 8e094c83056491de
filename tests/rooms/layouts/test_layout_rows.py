"""Each training system's names: layout, series, step, what belongs together, and what is missing."""

import pytest

from ckptguard.errors import SettingsError
from ckptguard.formats.structure import Leaf, Structure, TensorPlace
from ckptguard.layouts import LAYOUTS, find_checkpoints, tops
from ckptguard.layouts.roles import assign_roles
from ckptguard.storage.protocol import Entry
from ckptguard.values.patterns import Pattern


def listing(*keys):
    """Entries of regular files."""
    return [Entry(key=key, kind="file", size=1) for key in sorted(keys)]


def under(folder, *names):
    """Keys of files in a folder."""
    return [f"{folder}/{name}" for name in names]


def found(*keys, patterns=()):
    """The checkpoints of a listing by path."""
    return {c.path: c for c in find_checkpoints(listing(*keys), patterns)}


def summary(*keys, patterns=()):
    """{path: (layout, series, step, number of files)} of the checkpoints in a listing."""
    return {p: (c.layout, c.series, c.step, len(c.files)) for p, c in found(*keys, patterns=patterns).items()}


def fatal(checkpoint, structures=None):
    """(file relative to the checkpoint, message) of the fatal gaps."""
    gaps = LAYOUTS[checkpoint.layout].gaps(checkpoint, structures or {})
    return [(g.file and checkpoint.inside(g.file), g.message) for g in gaps if g.fatal]


def numbers(**leaves):
    """A structure that states some numbers."""
    return Structure(format="torch_zip", leaves=tuple(Leaf(k.replace("__", "."), v) for k, v in leaves.items()))


HF = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin")
ZERO = ("mp_rank_00_model_states.pt", *(f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1)))
STATED = numbers(dp_world_size=2, mp_world_size=1, ds_config__zero_optimization__stage=2)


def test_trainer_with_deepspeed_inside():
    """global_stepN is a piece of checkpoint-N; all ranks' files and a latest that leads somewhere are needed."""
    keys = under("checkpoint-6", *HF[2:], "latest", "rng_state_0.pth", "rng_state_1.pth")
    keys += under("checkpoint-6/global_step6", *ZERO)
    assert summary(*keys) == {"checkpoint-6": ("hf-trainer", "checkpoint-#", 6, 10)}
    whole = found(*keys)["checkpoint-6"]
    told = {
        "checkpoint-6/global_step6/mp_rank_00_model_states.pt": STATED,
        "checkpoint-6/latest": Structure(format="pointer", metadata={"points_to": "global_step6"}),
    }
    assert fatal(whole, told) == []
    lost = found(*(k for k in keys if "rank_1_mp" not in k))["checkpoint-6"]
    assert [name for name, _ in fatal(lost, told)] == [f"global_step6/{ZERO[2]}"]
    astray = {**told, "checkpoint-6/latest": Structure(format="pointer", metadata={"points_to": "global_step4"})}
    assert [name for name, _ in fatal(whole, astray)] == ["latest"]


def test_trainer_with_fsdp_or_an_adapter_inside():
    """Sharded folders, and a folder for each further adapter, are pieces."""
    sharded = under("checkpoint-6", "trainer_state.json", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata")
    assert summary(*sharded) == {"checkpoint-6": ("hf-trainer", "checkpoint-#", 6, 3)}
    names = ("trainer_state.json", "lora-8/adapter_config.json", "lora-8/adapter_model.safetensors")
    assert summary(*under("checkpoint-6", *names)) == {"checkpoint-6": ("hf-trainer", "checkpoint-#", 6, 3)}
    assert fatal(found(*under("checkpoint-6", *names))["checkpoint-6"]) == []
    bare = found(*under("checkpoint-6", names[0], names[2]))["checkpoint-6"]
    assert [name for name, _ in fatal(bare)] == ["lora-8/adapter_config.json"]


def test_a_fresh_checkpoint_is_known_by_its_siblings():
    """What a half-written folder cannot show yet, the others of its series do."""
    keys = [*under("checkpoint-2", *HF), *under("checkpoint-4", "config.json"), *under("step_3", "config.json")]
    assert summary(*keys)["checkpoint-4"] == ("hf-trainer", "checkpoint-#", 4, 1)
    assert "step_3" not in summary(*keys)
    names = [name for name, _ in fatal(found(*keys)["checkpoint-4"])]
    assert names == [None, "trainer_state.json"]


@pytest.mark.parametrize("folder", ["checkpoint-6", "checkpoints/checkpoint_3", "my_state"])
def test_accelerate(folder):
    """Known by its random states; without them it is not finished."""
    keys = under(folder, "model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    assert [c.layout for c in found(*keys).values()] == ["accelerate"]
    assert fatal(found(*keys)[folder]) == []
    early = found(*keys[:-1])[folder]
    assert [message for _, message in fatal(early)] == ["there are no random_states; Accelerate writes them last"]


def test_accelerate_with_deepspeed_inside_and_lost_ranks():
    """DeepSpeed's files lie in pytorch_model/; fewer random states than ranks are a warning, not an error."""
    keys = under("checkpoint-6", "latest", "random_states_0.pkl", *(f"pytorch_model/{name}" for name in ZERO))
    checkpoint = found(*keys)["checkpoint-6"]
    assert (checkpoint.layout, len(checkpoint.files)) == ("accelerate", 5)
    told = {"checkpoint-6/pytorch_model/mp_rank_00_model_states.pt": STATED}
    assert fatal(checkpoint, told) == []
    gaps = [g.message for g in LAYOUTS["accelerate"].gaps(checkpoint, told)]
    assert gaps == ["only 1 of 2 ranks have their random_states"]


@pytest.mark.parametrize(
    ("folder", "names", "optimizer"),
    [
        ("c-1", ("model.safetensors", "scheduler.bin", "random_states_0.pkl", "optimizer.bin"), "optimizer.bin"),
        ("checkpoint-1", ("model.safetensors", "scheduler.pt", "trainer_state.json", "optimizer.pt"), "optimizer.pt"),
    ],
)
def test_a_scheduler_without_its_optimizer(folder, names, optimizer):
    """Both are saved together: one alone is what a lost file leaves, under another name too."""
    assert fatal(found(*under(folder, *names))[folder]) == []
    aside = [optimizer + ".old" if n == optimizer else n for n in names]
    assert [name for name, _ in fatal(found(*under(folder, *aside))[folder])] == [optimizer]


def test_accelerate_custom_objects_are_counted():
    """load_state wants as many custom_checkpoint files as were registered."""
    keys = under("c-1", "model.safetensors", "random_states_0.pkl", "custom_checkpoint_1.pkl")
    assert [m for _, m in fatal(found(*keys)["c-1"])] == ["only 1 of 2 custom_checkpoint files are there"]


def test_raw_deepspeed_tags():
    """A tag folder is a checkpoint; latest beside it is none, and ZeRO-3 wants model states of every rank."""
    keys = [*under("global_step6", *ZERO), "latest", "zero_to_fp32.py"]
    assert summary(*keys) == {"global_step6": ("deepspeed", "global_step#", 6, 3)}
    third = [f"zero_pp_rank_{r}_mp_rank_00_{kind}_states.pt" for r in (0, 1) for kind in ("model", "optim")]
    told = {f"t/{third[0]}": STATED}
    assert fatal(found(*under("t", *third))["t"], told) == []
    assert [n for n, _ in fatal(found(*under("t", *third[:2]))["t"], told)] == [third[2], third[3]]
    assert [m for _, m in fatal(found(*under("t", ZERO[1]))["t"])] == ["there are no model states"]


def test_deepspeed_without_a_stated_world_size_is_a_warning():
    """Nobody can say then whether all ranks are there."""
    checkpoint = found(*under("global_step6", *ZERO))["global_step6"]
    gaps = LAYOUTS["deepspeed"].gaps(checkpoint, {"global_step6/mp_rank_00_model_states.pt": numbers(global_steps=6)})
    assert [(g.fatal, "world size" in g.message) for g in gaps] == [(False, True)]


@pytest.mark.parametrize("folder", ["step_6", "step-6", "outputs/checkpoint/step-60"])
def test_dcp_and_torchtitan(folder):
    """.metadata comes last: without it the folder is not finished."""
    keys = under(folder, ".metadata", "__0_0.distcp", "__1_0.distcp")
    assert [c.layout for c in found(*keys).values()] == ["dcp"]
    assert [n for n, _ in fatal(found(*keys[1:])[folder])] == [".metadata"]


def test_lightning_files_and_folders():
    """Top-k files and last.ckpt are checkpoints of their own; a sharded one is a folder."""
    assert summary("v0/epoch=0-step=2.ckpt", "v0/epoch=3-val_loss=0.35.ckpt", "v0/last.ckpt") == {
        "v0/epoch=0-step=2.ckpt": ("lightning", "v0/epoch=#-step=#.ckpt", 2, 1),
        "v0/epoch=3-val_loss=0.35.ckpt": ("lightning", "v0/epoch=#-val_loss=#.#.ckpt", 3, 1),
        "v0/last.ckpt": ("lightning", "v0/last.ckpt", None, 1),
    }
    sharded = found(*under("epoch=0-step=2.ckpt", ".metadata", "__0_0.distcp", "meta.pt"))["epoch=0-step=2.ckpt"]
    assert (sharded.layout, sharded.step) == ("lightning", 2)
    engine = found(*under("epoch=0-step=2.ckpt", *(f"checkpoint/{name}" for name in ZERO)))
    assert [c.layout for c in engine.values()] == ["lightning"]


def test_megatron_ranks():
    """As many rank folders as the arguments in any of them tell of."""
    keys = [f"iter_0000500/mp_rank_0{r}/model_optim_rng.pt" for r in (0, 1)]
    assert summary(*keys, "latest_checkpointed_iteration.txt") == {"iter_0000500": ("megatron", "iter_#", 500, 2)}
    told = {keys[0]: numbers(args__tensor_model_parallel_size=2, args__pipeline_model_parallel_size=1)}
    assert fatal(found(*keys)["iter_0000500"], told) == []
    assert [name for name, _ in fatal(found(keys[0])["iter_0000500"], told)] == ["mp_rank_01/model_optim_rng.pt"]


def test_wenet_pairs():
    """The .yaml belongs to the .pt beside it, and is written last; averages and links are no pairs."""
    keys = ("train.yaml", "init.pt", "init.yaml", "epoch_0.pt", "epoch_0.yaml", "epoch_1.pt", "avg_2.pt")
    assert summary(*keys) == {
        "avg_2.pt": ("file", "avg_#.pt", 2, 1),
        "epoch_0.pt": ("wenet", "epoch_#.pt", 0, 2),
        "epoch_1.pt": ("wenet", "epoch_#.pt", 1, 1),
        "init.pt": ("wenet", "init.pt", None, 2),
    }
    assert [name for name, _ in fatal(found(*keys)["epoch_1.pt"])] == ["epoch_1.yaml"]
    folder = found("train.yaml", "epoch_0.pt/pytorch_model.bin", "epoch_0.yaml")["epoch_0.pt"]
    assert (folder.layout, folder.files) == ("wenet", ("epoch_0.pt/pytorch_model.bin", "epoch_0.yaml"))
    assert tops(folder.path, folder.files) == ["epoch_0.pt", "epoch_0.yaml"]


def test_hallo_mixes_two_kinds():
    """Accelerate's folders and each module's files are series of their own."""
    keys = under("checkpoints/checkpoint-500", "latest", "random_states_0.pkl", f"pytorch_model/{ZERO[0]}")
    keys += ["modules/denoising_unet-500.pth", "modules/imageproj-500.pth", "config.yaml"]
    assert {p: c.layout for p, c in found(*keys).items()} == {
        "checkpoints/checkpoint-500": "accelerate",
        "modules/denoising_unet-500.pth": "file",
        "modules/imageproj-500.pth": "file",
    }


def test_nanovlm_nests_runs_in_checkpoints():
    """A resumed run saves inside the checkpoint it came from; an unfinished step is known by its siblings."""
    keys = [*under("step_500", "config.json", "model.safetensors"), *under("step_1000", "config.json")]
    keys += under("step_500/run_0615/step_20", "config.json", "model.safetensors")
    assert {p: len(c.files) for p, c in found(*keys).items()} == {
        "step_500": 2,
        "step_1000": 1,
        "step_500/run_0615/step_20": 2,
    }
    assert fatal(found(*keys)["step_1000"]) != []


def test_patterns_of_the_user():
    """They name what is a checkpoint, where its step stands, and what is none."""
    keys = ("w/it9k500.weights", "w/notes.txt", "old/checkpoint-1/model.safetensors", "run7_b2/model.pt")
    patterns = (
        Pattern(path="w/it*.weights", step=r"k(\d+)\."),
        Pattern(path="old", ignore=True),
        Pattern(path="run*", step=r"^run(\d+)"),
    )
    assert summary(*keys, patterns=patterns) == {
        "w/it9k500.weights": ("file", "w/it#k#.weights", 500, 1),
        "run7_b2": ("folder", "run#_b#", 7, 1),
    }
    for wrong in ({"path": "", "step": None}, {"path": "a", "step": "("}, {"path": "a", "step": "no group"}):
        with pytest.raises(SettingsError):
            Pattern(**wrong)


def test_roles_in_wrapped_and_numbered_containers():
    """torch's tutorials wrap everything in "app"; Megatron numbers its models."""
    places = [
        TensorPlace(name, "float32", (2, 2), None)
        for name in ("app.model.w", "app.optim.state.w.exp_avg", "model0.w", "opt_param_scheduler.lr")
    ]
    roles = assign_roles("__0_0.distcp", places, containers=("app", "model0", "opt_param_scheduler"))
    assert roles == ["model", "optimizer", "model", "scheduler"]
