"""What a listing shows: checkpoints, steps, series, roles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.formats.structure import TensorPlace
from ckptguard.layouts import LAYOUTS, find_checkpoints, folder_as_checkpoint, step_from_name
from ckptguard.layouts.roles import assign_roles
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import series_of


def listing(*keys):
    """Entries of regular files."""
    return [Entry(key=key, kind="file", size=1) for key in sorted(keys)]


def summary(*keys):
    """{path: (layout, series, step, number of files)} of the checkpoints in a listing."""
    return {c.path: (c.layout, c.series, c.step, len(c.files)) for c in find_checkpoints(listing(*keys))}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("step_500", 500),
        ("step-000000500", 500),
        ("epoch=0-step=2.ckpt", 2),
        ("epoch_3.pt", 3),
        ("net-500.pth", 500),
        ("char-0040.pt", 40),
        ("2.pt", 2),
        ("global_step1000", 1000),
        ("iter_0000100", 100),
        ("last.ckpt", None),
        ("model.safetensors", None),
        ("model-00001-of-00002.safetensors", None),
        ("rng_state_3.pth", None),
        ("random_states_0.pkl", None),
        ("model_v2.pt", None),
        ("step-99999999999999999999.pt", None),
    ],
)
def test_step_from_name(name, step):
    """The step that a name states, and none where digits mean something else."""
    assert step_from_name(name) == step


def test_hugging_face_run_with_a_final_model():
    """checkpoint-N folders are one series; model files at the root are the series final, without a step."""
    found = summary(
        "checkpoint-2/model.safetensors",
        "checkpoint-2/trainer_state.json",
        "checkpoint-4/model.safetensors",
        "model.safetensors",
        "config.json",
        "training_args.bin",
        "runs/events.out",
    )
    assert found == {
        "checkpoint-2": ("hf-trainer", "checkpoint-#", 2, 2),
        "checkpoint-4": ("hf-trainer", "checkpoint-#", 4, 1),
        ".": ("folder", "final", None, 3),
    }


def test_flat_files_are_checkpoints_each_and_shards_are_not():
    """Files with steps stand alone; shards and rank files belong to their folder."""
    assert summary("a-1.pt", "a-2.pt", "last.pt") == {
        "a-1.pt": ("file", "a-#.pt", 1, 1),
        "a-2.pt": ("file", "a-#.pt", 2, 1),
        "last.pt": ("file", "last.pt", None, 1),
    }
    shards = ("m/model-00001-of-00002.safetensors", "m/model-00002-of-00002.safetensors", "m/rng_state_0.pth")
    assert summary(*shards) == {"m": ("folder", "m", None, 3)}


def test_files_of_ranks_that_state_a_step_are_one_save():
    """A word, zeros before it or another save says that a number is the step. A number alone may be a size."""
    dino = [f"model_{step:07d}.rank_{rank}.pth" for step in (99, 199) for rank in range(2)]
    assert summary(*dino, "last_checkpoint.rank_0") == {
        "model_0000099.rank_0.pth": ("file", "model_#.rank_#.pth", 99, 2),
        "model_0000199.rank_0.pth": ("file", "model_#.rank_#.pth", 199, 2),
    }
    composer = [f"run/ep{epoch}-ba{epoch * 10}-rank{rank}.pt" for epoch in (1, 2) for rank in range(10)]
    found = {path: (step, files) for path, (_, _, step, files) in summary(*composer).items()}
    assert found == {"run/ep1-ba10-rank0.pt": (10, 10), "run/ep2-ba20-rank0.pt": (20, 10)}
    assert summary("checkpoint_1_500-shard0.pt", "checkpoint_1_500-shard1.pt", "checkpoint_last-shard0.pt") == {
        "checkpoint_1_500-shard0.pt": ("file", "checkpoint_#_#-shard#.pt", (1, 500), 2),
        "checkpoint_last-shard0.pt": ("file", "checkpoint_last-shard#.pt", None, 1),
    }
    sizes = ("unet_512_rank0.pt", "unet_512_rank1.pt")
    assert summary(*sizes) == {".": ("folder", "final", None, 2)}
    both = summary(*sizes, "unet_1024_rank0.pt")
    assert {path: files for path, (_, _, _, files) in both.items()} == {"unet_512_rank0.pt": 2, "unet_1024_rank0.pt": 1}


RANKS = (
    *("G_{}.rank_{}.pth", "unet_{}_rank{}.pt", "net-{:06d}-shard{}.safetensors", "step_{}-{:05d}-of-00003.bin"),
    *("{}_net_E.rank_{}.pth", "x_{}-shard{}.pt", "v2_{}_rank{}.pt"),
)


@given(
    form=st.sampled_from(RANKS),
    folder=st.sampled_from(("", "run/")),
    saves=st.dictionaries(st.integers(2, 99999), st.integers(1, 3), min_size=2, max_size=5),
    data=st.data(),
)
def test_files_of_ranks_read_the_same_when_their_neighbours_are_gone(form, folder, saves, data):
    """The reading on record of a series stays, whatever a rotation or a rollback leaves of it."""
    names = {step: [folder + form.format(step, rank) for rank in range(ranks)] for step, ranks in saves.items()}
    series = series_of(names[next(iter(saves))][0])
    left = data.draw(st.sets(st.sampled_from(sorted(saves)), min_size=1))
    keys = [name for step in left for name in names[step]]
    found = find_checkpoints(listing(*keys), by_rank=[series])
    assert {(c.path, c.series, c.step, c.files) for c in found} == {
        (names[step][0], series, step, tuple(names[step])) for step in left
    }
    together = find_checkpoints(listing(*(name for own in names.values() for name in own)))
    assert {c.path: c.step for c in together} == {own[0]: step for step, own in names.items()}


@pytest.mark.parametrize(
    ("names", "lack"),
    [
        (["step_5-00001-of-00003.pt", "step_5-00002-of-00003.pt"], ["only 2 of 3 parts are there: [1, 2]"]),
        (["step_5-00001-of-00002.pt", "step_5-00002-of-00002.pt"], []),
        (["epoch_5_world_size_4_rank_0.pt"], ["only 1 of 4 parts are there: [0]"]),
        (["epoch_5_rank_1.pt"], []),
        (["epoch_5.pt"], []),
    ],
)
def test_parts_that_names_count_are_all_needed(names, lack):
    """Only a name that says how many there are can say that some are missing."""
    (found,) = find_checkpoints(listing(*names))
    assert [gap.message for gap in LAYOUTS[found.layout].gaps(found, {})] == lack


def test_nested_checkpoints_stop_the_outer_one_and_pieces_do_not():
    """A step folder inside a checkpoint is its own; DeepSpeed's tag folder is a piece."""
    found = summary(
        "step_5/model.safetensors",
        "step_5/run/step_7/model.safetensors",
        "checkpoint-9/trainer_state.json",
        "checkpoint-9/global_step9/mp_rank_00_model_states.pt",
    )
    assert found["step_5"] == ("folder", "step_#", 5, 1)
    assert found["step_5/run/step_7"] == ("folder", "step_5/run/step_#", 7, 1)
    assert found["checkpoint-9"] == ("hf-trainer", "checkpoint-#", 9, 2)
    assert len(found) == 3


def test_temporaries_and_links_are_not_checkpoints():
    """Writers' temporaries, and aliases such as final.pt, are passed over."""
    entries = listing("step-1.pt.tmp", "tmp-step-000000002/model.safetensors", ".tmpabc", "a-1.pt")
    entries.append(Entry(key="final.pt", kind="link", target="a-1.pt"))
    assert [c.path for c in find_checkpoints(entries)] == ["a-1.pt"]


def test_our_own_layout_is_known_by_its_name():
    """step-000000500 is ours, whatever is in it so far."""
    found = summary("step-000000500/model.safetensors")
    assert found == {"step-000000500": ("ckptguard", "step-#", 500, 1)}


def test_a_folder_without_state_is_no_checkpoint():
    """Logs and configurations alone are nothing to verify."""
    assert summary("logs/a.txt", "conf/config.json", "rng/rng_state.pth") == {}
    assert folder_as_checkpoint("logs", listing("logs/a.txt")) is None


def place(name, shape=(2, 2)):
    """A tensor by name and shape."""
    return TensorPlace(name=name, dtype="float32", shape=shape, span=0)


def test_roles_come_from_file_names_then_keys():
    """Names of files decide, else first keys; what is left counts as weights."""
    assert assign_roles("checkpoint-1/optimizer.pt", [place("state.0.exp_avg")], containers=("state",)) == ["optimizer"]
    mixed = [place("model.w"), place("optimizer.state.0.exp_avg"), place("best", ()), place("extra")]
    assert assign_roles("x-1.pt", mixed, containers=("model", "optimizer")) == ["model", "optimizer", "other", "model"]
    flat = [place("encoder.w"), place("logit_scale", ())]
    assert assign_roles("x-1.pt", flat, containers=()) == ["model", "model"]


@pytest.mark.parametrize("folder", ["seed-42", "exp_1", "12-30-00", "0", "version_0"])
@pytest.mark.parametrize("files", [("ckpt-100.pt", "ckpt-200.pt"), ("ckpt-100.pt",), ("last.ckpt", "best.ckpt")])
def test_a_numbered_folder_of_saves_is_no_checkpoint(folder, files):
    """The runs of a sweep: each file is one save, and comes and goes by itself."""
    found = summary(*(f"{folder}/{name}" for name in files))
    assert set(found) == {f"{folder}/{name}" for name in files}


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        ("epoch_3", ("model.pt", "optimizer.pt")),
        ("iter_3", ("G_3.pt", "D_3.pt")),
        ("exp-500", ("net-500.pth", "disc-500.pth")),
        ("500", ("part-0.pt", "part-1.pt")),
        ("step_100", ("layer-1.pt", "layer-2.pt")),
        ("global_step100", ("epoch_2.pt",)),
        ("model-100", ("model.safetensors",)),
    ],
)
def test_a_numbered_folder_of_parts_is_one_checkpoint(folder, files):
    """Files that were saved together, whatever digits they carry."""
    assert list(summary(*(f"{folder}/{name}" for name in files))) == [folder]
