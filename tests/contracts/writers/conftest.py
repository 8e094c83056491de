"""The runs that real writers leave, each written once per session; tests work on copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from groups import BY_KIND
from mishaps import MISHAPS

pytest.register_assert_rewrite("contract")

from contract import FIRST_SIGHT  # noqa: E402 - its assertions are to be told in full


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of the contract runs over its module's kinds and over the mishaps that it can see."""
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", metafunc.module.KINDS, ids=lambda kind: kind.name.partition("/")[2])
    if "mishap" in metafunc.fixturenames:
        first_sight = "first_sight" in metafunc.function.__name__
        metafunc.parametrize("mishap", FIRST_SIGHT if first_sight else tuple(MISHAPS))


Written = Callable[[str], Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """``written("hf_trainer/single")``: the run as its writer left it. Never change it: copy it."""
    root = tmp_path_factory.mktemp("written")

    ready: set[str] = set()

    def run(kind: str) -> Path:
        place = root / kind
        if kind in ready:
            return place
        if kind in BY_KIND:
            group = BY_KIND[kind]
            for sibling in group.kinds:  # what a writer that failed has left behind
                shutil.rmtree(place.parent / sibling, ignore_errors=True)
            group.write(place.parent)
            ready.update(f"{group.system}/{sibling}" for sibling in group.kinds)
        else:
            write_here(kind, place, run)
            ready.add(kind)
        return place

    return run


@pytest.fixture
def copied(written: Written, tmp_path: Path) -> Written:
    """``copied("hf_trainer/single")``: a copy of the run, times kept, that the test may damage."""

    def copy(kind: str) -> Path:
        target = tmp_path / kind.replace("/", "-")
        shutil.copytree(written(kind), target, symlinks=True)
        return target

    return copy


def write_here(kind: str, place: Path, written: Written) -> None:
    """The systems whose writers are a few lines around torch.save need no process of their own."""
    import write_hallo
    import write_megatron
    import write_nanovlm
    import write_plain
    import write_wenet

    steps = (2, 4, 6)
    writers: dict[str, Callable[[], None]] = {
        "megatron/ranks": lambda: write_megatron.write_megatron(place),
        "nanovlm/nested": lambda: write_nanovlm.write_nanovlm(place),
        "plain/nested": lambda: write_plain.write_plain(place),
        "plain/legacy": lambda: write_plain.write_legacy(place),
        "wenet/epochs": lambda: write_wenet.write_epochs(place),
        "wenet/steps": lambda: write_wenet.write_steps(place),
        "wenet/converted": lambda: write_wenet.write_converted(place),
        "wenet/tags": lambda: write_wenet.write_tags(place, written("deepspeed/zero2"), steps),
        "hallo/stage1": lambda: write_hallo.write_hallo(place, written("accelerate/deepspeed"), steps),
    }
    writers[kind]()
