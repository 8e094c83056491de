"""Starts a writer in processes of its own: frameworks keep global state, and ranks are processes."""

from __future__ import annotations

import os
from pathlib import Path

from support.forked import HUGGING_FACE, LIGHTNING, TESTS, TORCH, Forked, wait_for_all

HERE = Path(__file__).resolve().parent
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_IMPORTED = {"dcp": TORCH, "lightning": LIGHTNING}  # by a word of the script's name


def launch(script: str, *arguments: object, ranks: int = 0) -> None:
    """Run ``write_<system>.py`` as it is (0 ranks) or as torchrun does; AssertionError with its output if it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    environment = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        # For what a script starts itself: the same code as here.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), TESTS, os.environ.get("PYTHONPATH")))),
    }
    place = HERE / script
    code = place.read_text(encoding="utf-8")
    imported = next((modules for word, modules in _IMPORTED.items() if word in place.name), HUGGING_FACE)
    store, ours = _meeting(ranks) if ranks else (None, [{}])
    processes: list[Forked] = []
    try:
        for one in ours:
            processes.append(
                Forked(
                    code,
                    *arguments,
                    name=str(place),
                    path=(str(HERE), TESTS),
                    environment=environment | one,
                    imported=imported,
                )
            )
        wait_for_all(processes, 300)
        told = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.close()
        del store
    codes = [process.returncode for process in processes]
    texts = "\n".join(f"{out[-3000:]}{err[-6000:]}" for out, err in told)
    assert not any(codes), f"{place.name} {arguments} ended with {codes}:\n{texts}"


def _meeting(ranks: int) -> tuple[object, list[dict[str, str]]]:
    """The store at which torchrun's processes meet, and what it tells each of them."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return store, [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
