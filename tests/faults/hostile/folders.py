"""Folders that try to lead a reader astray: links, things that are no files, names, depth, numbers, outward references.

Each function makes one in `place`; `outside` is a folder beside it that nobody may read, whose `secret` would be
damage if it were followed. It returns what to verify.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import torch
from support.format_files import safetensors_bytes
from support.hub_caches import Hub

Maker = Callable[[Path, Path], Path]
FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
MODEL = safetensors_bytes({"w": torch.arange(4.0)})


def checkpoint(place: Path, name: str = "model-5") -> Path:
    """A whole one of a single file."""
    folder = place / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(MODEL)
    return folder


def _with(make: Callable[[Path, Path], None]) -> Maker:
    def put(place: Path, outside: Path) -> Path:
        folder = checkpoint(place)
        make(folder, outside)
        return folder

    return put


def _linked(name: str, target: str) -> Maker:
    """A link of this name; "OUTSIDE" in the target is the folder outside."""

    def make(folder: Path, outside: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target.replace("OUTSIDE", str(outside)))

    return _with(make)


def _index(shard: str) -> Maker:
    def make(folder: Path, outside: Path) -> None:
        named = shard.replace("OUTSIDE", str(outside))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": named}}))

    return _with(make)


def _named(name: bytes | str, content: bytes = MODEL) -> Maker:
    def make(folder: Path, outside: Path) -> None:
        with open(os.path.join(os.fsencode(folder), os.fsencode(name)), "wb") as file:
            file.write(content)

    return _with(make)


def _socket(folder: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("optimizer.pt")
    finally:
        os.chdir(here)


def _device(kind: int, major: int, minor: int) -> Maker:
    def make(folder: Path, outside: Path) -> None:
        os.mknod(folder / "optimizer.pt", kind | 0o644, os.makedev(major, minor))

    return _with(make)


def _deep(levels: int) -> Maker:
    def make(folder: Path, outside: Path) -> None:
        current = os.open(folder, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir("d", dir_fd=current)
            below = os.open("d", os.O_RDONLY, dir_fd=current)
            os.close(current)
            current = below
        os.close(current)

    return _with(make)


def _many(folder: Path, outside: Path) -> None:
    for number in range(20_000 if FULL else 3000):
        os.close(os.open(folder / f"log-{number}.txt", os.O_CREAT | os.O_WRONLY))


def _loop(place: Path, outside: Path) -> Path:
    folder = checkpoint(place)
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    (folder / "self").symlink_to(".")
    return folder


def _hub(spoil: Callable[[Path, Path, Path], None]) -> Maker:
    """A hub cache with one download, spoiled: `spoil` gets the repository, the snapshot and the folder outside."""

    def make(place: Path, outside: Path) -> Path:
        hub = Hub(place / "hub")
        snapshot = hub.download({"model.safetensors": MODEL, "config.json": b"{}"})
        spoil(hub.repository(), snapshot, outside)
        return hub.repository()

    return make


def _relinked(link: Path, target: Path | str) -> None:
    link.unlink()
    link.symlink_to(target)


def _replaced(folder: Path, target: Path | str) -> None:
    folder.rename(folder.with_name("." + folder.name))
    folder.symlink_to(target)


def _linked_target(target: str) -> Maker:
    """A target that is a link itself; "CHECKPOINT" is a whole one beside it."""

    def make(place: Path, outside: Path) -> Path:
        link = place / "link"
        whole = checkpoint(place)
        link.symlink_to(target.replace("CHECKPOINT", str(whole)).replace("HERE", str(place)))
        return link

    return make


# Caches whose links lead out of their repository: bad, incomplete or undecided.
HUBS: dict[str, Maker] = {
    "weights outside": _hub(lambda _, s, out: _relinked(s / "model.safetensors", out / "secret.safetensors")),
    "weights of /dev/zero": _hub(lambda _, s, out: _relinked(s / "model.safetensors", "/dev/zero")),
    "weights upwards": _hub(lambda _, s, out: _relinked(s / "model.safetensors", "../../../../../outside/secret.pt")),
    "blob that is a link outside": _hub(
        lambda _, s, out: _relinked((s / "model.safetensors").resolve(), out / "secret.safetensors")
    ),
    "blobs that are a link outside": _hub(lambda r, s, out: _replaced(r / "blobs", out)),
    "one more file outside": _hub(lambda _, s, out: (s / "more.bin").symlink_to(out / "secret.pt")),
    "folder outside": _hub(lambda _, s, out: (s / "more").symlink_to(out)),
    "link to itself": _hub(lambda _, s, out: _relinked(s / "model.safetensors", "model.safetensors")),
}
# What the user names may be a link, and is followed: to a checkpoint, to nothing, to what is no file.
TARGETS: dict[str, tuple[Maker, int]] = {
    "link to a folder": (_linked_target("CHECKPOINT"), 0),
    "link to a file": (_linked_target("CHECKPOINT/model.safetensors"), 0),
    "link by a relative way": (_linked_target("model-5"), 0),
    "link to nothing": (_linked_target("HERE/absent"), 10),
    "link to itself": (_linked_target("link"), 10),
    "link to a device": (_linked_target("/dev/zero"), 10),
    "link to a terminal": (_linked_target("/dev/tty"), 10),
}
# Nothing of these may be called good.
WRONG: dict[str, Maker] = {
    "weights that are a link outwards": _linked("model.safetensors", "OUTSIDE/secret.safetensors"),
    "weights that are a link upwards": _linked("model.safetensors", "../../outside/secret.safetensors"),
    "weights that are a link to /dev/zero": _linked("model.safetensors", "/dev/zero"),
    "weights that are a link to themselves": _linked("model.safetensors", "model.safetensors"),
    "index upwards": _index("../../outside/secret.safetensors"),
    "index of an absolute path": _index("OUTSIDE/secret.safetensors"),
    "index of a URL": _index("http://127.0.0.1:9/secret.safetensors"),
    "index of a file URL": _index("file://OUTSIDE/secret.safetensors"),
    "index with a NUL": _index("model.safetensors\0"),
    "index of a home": _index("~/secret.safetensors"),
    "index of nothing": _index(""),
    "index of the folder": _index("."),
}
# These lie beside whole weights: bad, undecided or a notice, but never followed, opened or printed as they are.
ODD: dict[str, Maker] = {
    "optimizer that is a link outwards": _linked("optimizer.pt", "OUTSIDE/secret.pt"),
    "link to a password file": _linked("training_args.bin", "/etc/passwd"),
    "link to a folder outside": _linked("more", "OUTSIDE"),
    "link to the root": _linked("root", "/"),
    "link to /proc": _linked("proc.pt", "/proc/self/mem"),
    "link with an escape": _linked("x.pt", "\x1b[2J\u202e"),
    "links in a circle": _loop,
    "FIFO": _with(lambda folder, outside: os.mkfifo(folder / "optimizer.pt")),
    "socket": _with(_socket),
    "newline in a name": _named("optimizer\n.pt"),
    "escape in a name": _named("\x1b[2J\x1b]0;owned\x07optimizer.pt"),
    "right to left in a name": _named("tp.rezimitpo\u202e.bin"),
    "name that is no text": _named(b"\xff\xfe\x80.pt"),
    "long name": _named("a" * 251 + ".bin"),
    "option for a name": _named("--help.pt"),
    "name of our records": _named("_ckptguard"),
    "name that is a URL's": _named("http:"),
    "a thousand levels": _deep(1000),
    "very many files": _with(_many),
}
if os.geteuid() == 0:
    ODD |= {
        "null device": _device(stat.S_IFCHR, 1, 3),
        "zero device": _device(stat.S_IFCHR, 1, 5),
        "block device": _device(stat.S_IFBLK, 7, 0),
    }
