"""Which checkpoints a listing of a run shows. Pure: names and nothing else decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptguard.formats import tensor_suffix
from ckptguard.layouts import hf_trainer, own
from ckptguard.layouts.checkpoint import Checkpoint, is_part, step_from_name
from ckptguard.layouts.plain_folder import holds_state
from ckptguard.names import RECORDS_FOLDER, is_temporary, series_of
from ckptguard.storage.protocol import Entry

MAX_DEPTH = 3
FINAL_SERIES = "final"
_FINAL_NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_FINAL_BESIDE = ("config.json", "generation_config.json", "adapter_config.json", "training_args.bin")


def enter(key: str) -> bool:
    """Whether a listing of a run goes into this folder: not into our records, temporaries or hidden folders."""
    name = key.rpartition("/")[2]
    return name != RECORDS_FOLDER and not is_temporary(name) and not name.startswith(".") and name != "__pycache__"


def find_checkpoints(entries: Sequence[Entry]) -> list[Checkpoint]:
    """The checkpoints in a recursive listing of a run (taken with `enter`), sorted by path.

    A folder's checkpoint owns all files below it, except those of checkpoints nested in it.
    """
    folders: dict[str, list[Entry]] = {"": []}
    for entry in entries:
        if not any(is_temporary(part) for part in entry.key.split("/")):
            folder = entry.key.rpartition("/")[0]
            while folder not in folders:
                folders[folder] = []
                folder = folder.rpartition("/")[0]
            folders[entry.key.rpartition("/")[0]].append(entry)
    roots = {folder: layout for folder in folders if (layout := _folder_layout(folder, folders))}
    for folder in [f for f in roots if _is_piece(f, roots)]:
        del roots[folder]
    found = [_folder_checkpoint(folder, layout, folders, roots) for folder, layout in roots.items()]
    for folder, own_entries in folders.items():
        if not any(_below(folder, root) for root in roots) and folder.count("/") < MAX_DEPTH:
            found += _loose_files(folder, own_entries)
    return sorted((c for c in found if c.entries or c.irregular), key=lambda c: c.path)


def folder_as_checkpoint(name: str, entries: Sequence[Entry]) -> Checkpoint | None:
    """The folder itself as one checkpoint (its entries' keys begin with `name`), if a layout accepts it."""
    direct = {"": [], name: [e for e in entries if e.key.rpartition("/")[0] == name]}
    layout = _folder_layout(name, direct)
    if layout is None:
        return None
    kept = [e for e in entries if not any(is_temporary(part) for part in e.key.split("/")[1:])]
    return _checkpoint(name, layout, kept)


def _folder_layout(folder: str, folders: dict[str, list[Entry]]) -> str | None:
    if not folder or folder.count("/") >= MAX_DEPTH:
        return None
    parent, _, name = folder.rpartition("/")
    files = [e.name for e in folders[folder] if e.kind != "folder"]
    if own.FOLDER.fullmatch(name):
        return own.LAYOUT.name
    if hf_trainer.FOLDER.fullmatch(name):
        siblings = [
            f for f in folders if f.rpartition("/")[0] == parent and hf_trainer.FOLDER.fullmatch(f.rpartition("/")[2])
        ]
        if any(e.name in hf_trainer.MARKS for f in siblings for e in folders[f]):
            return hf_trainer.LAYOUT.name
    state = [f for f in files if holds_state(f)]
    if not state:
        return None
    if step_from_name(name) is None and all(_is_loose(f) for f in state):
        return None
    return "folder"


def _is_loose(file_name: str) -> bool:
    """Whether a tensor file is a checkpoint of its own: its name states a step and it is no shard."""
    return tensor_suffix(file_name) and holds_state(file_name) and step_from_name(file_name) is not None


def _is_piece(folder: str, roots: dict[str, str]) -> bool:
    """Whether a folder inside a checkpoint is a piece of it instead of a checkpoint nested in it."""
    if not any(_below(folder, root) and folder != root for root in roots):
        return False
    name = folder.rpartition("/")[2]
    return step_from_name(name) is None or name.startswith("global_step") or is_part(name)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _folder_checkpoint(folder: str, layout: str, folders: dict[str, list[Entry]], roots: dict[str, str]) -> Checkpoint:
    inner = [r for r in roots if r != folder and _below(r, folder)]
    entries: list[Entry] = []
    for sub, own_entries in folders.items():
        if _below(sub, folder) and not any(_below(sub, i) for i in inner):
            entries += own_entries
    return _checkpoint(folder, layout, entries)


def _checkpoint(path: str, layout: str, entries: Iterable[Entry], *, series: str | None = None) -> Checkpoint:
    ordered = sorted(entries, key=lambda e: e.key)
    return Checkpoint(
        path=path,
        layout=layout,
        series=series_of(path) if series is None else series,
        step=None if series is not None else step_from_name(path.rpartition("/")[2]),
        entries=tuple(e for e in ordered if e.kind == "file"),
        irregular=tuple(e for e in ordered if e.kind not in ("file", "folder")),
    )


def _loose_files(folder: str, entries: list[Entry]) -> list[Checkpoint]:
    """Single-file checkpoints of a folder that is none itself, and the run's final model at its root.

    Links at this level are aliases of other checkpoints (``final.pt``) and are passed over.
    """
    state = [e for e in entries if e.kind == "file" and tensor_suffix(e.name) and holds_state(e.name)]
    final: list[Entry] = []
    if not folder:
        final = [e for e in state if not _is_loose(e.name) and (e.name in _FINAL_NAMES or is_part(e.name))]
        if final:
            final += [e for e in entries if e.name in _FINAL_BESIDE or e.name.endswith(".index.json")]
    found = [_checkpoint(".", "folder", dict.fromkeys(final), series=FINAL_SERIES)] if final else []
    taken = {e.key for e in final}
    return found + [_checkpoint(e.key, "file", [e]) for e in state if e.key not in taken and not is_part(e.name)]
