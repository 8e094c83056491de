"""Tools that save, load or check checkpoints, each used as its own documentation says."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file, save_file

import ckptguard
from benchmarks.peers.faults import WIDTH, State, state_of
from ckptguard.runs.run_view import open_view
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

QUICK = Settings(settle=0.0, workers=1)


class Tool:
    """One of them. A save is in `folder(root, step)` unless it says otherwise."""

    name = ""
    needs: tuple[str, ...] = ()  # modules, or programs with a / before
    width = WIDTH  # of the weights that a resume has a place for

    def lacks(self) -> list[str]:
        """What it needs and is not here."""
        return [n for n in self.needs if not (shutil.which(n[1:]) if n[0] == "/" else importlib.util.find_spec(n))]

    def folder(self, root: Path, step: int) -> Path:
        """Where a save is."""
        return root / f"step-{step}"

    def files(self, root: Path, step: int) -> list[Path]:
        """The files of a save, the largest first."""
        found = [path for path in self.folder(root, step).rglob("*") if path.is_file()]
        return sorted(found, key=lambda path: (-path.stat().st_size, path.name))

    def save(self, root: Path, step: int, state: State) -> None:
        """Save a state."""
        raise NotImplementedError

    def is_right(self, root: Path, step: int) -> bool:
        """Load a save as a resume does, or check it. Any exception says that it is not right."""
        raise NotImplementedError

    def newest_good(self, root: Path) -> int | None:
        """The step of the save to go back to, if the tool can tell."""
        return None

    def restore(self, root: Path, step: int, to: Path) -> bool:
        """Bring back a save whose files were deleted, if the tool can."""
        return False


def fits(state: State, width: int) -> None:
    """Load it into a model and an optimizer that have what a training needs. Raises as torch does."""
    wanted = state_of(0, width=width)
    model = torch.nn.ParameterDict({n.replace(".", "-"): torch.nn.Parameter(v) for n, v in wanted["model"].items()})
    model.load_state_dict({name.replace(".", "-"): value for name, value in state["model"].items()})
    optimizer = torch.optim.Adam(list(model.values()))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state["optimizer"]["state"]})


class TorchFiles(Tool):
    """`torch.save`, and `torch.load` with what a strict `load_state_dict` notices."""

    name = "torch"

    def save(self, root: Path, step: int, state: State) -> None:
        """One file of the model and one of the optimizer."""
        folder = self.folder(root, step)
        folder.mkdir(parents=True)
        torch.save(state["model"], folder / "model.pt")
        torch.save(state["optimizer"], folder / "optimizer.pt")

    def is_right(self, root: Path, step: int) -> bool:
        """Load both."""
        folder = self.folder(root, step)
        loaded = {part: torch.load(folder / f"{part}.pt", weights_only=True) for part in ("model", "optimizer")}
        fits(loaded, self.width)
        return True


class Safetensors(Tool):
    """`save_file` and `load_file` with a strict `load_state_dict`."""

    name = "safetensors"

    def save(self, root: Path, step: int, state: State) -> None:
        """One file of the model and one of the optimizer."""
        folder = self.folder(root, step)
        folder.mkdir(parents=True)
        save_file(state["model"], folder / "model.safetensors")
        moments = {f"{n}.{name}": v for n, own in state["optimizer"]["state"].items() for name, v in own.items()}
        save_file(moments, folder / "optimizer.safetensors")

    def is_right(self, root: Path, step: int) -> bool:
        """Load both."""
        folder, moments = self.folder(root, step), dict[int, dict[str, torch.Tensor]]()
        for name, value in load_file(folder / "optimizer.safetensors").items():
            moments.setdefault(int(name.partition(".")[0]), {})[name.partition(".")[2]] = value
        state = {"model": load_file(folder / "model.safetensors"), "optimizer": {"state": moments}}
        fits(state, self.width)
        return True


class Distributed(Tool):
    """`torch.distributed.checkpoint`: `save` and `load` into the state of a training."""

    name = "dcp"
    asynchronous = False

    def save(self, root: Path, step: int, state: State) -> None:
        """Save it without a process group, and wait for the end."""
        import torch.distributed.checkpoint as dcp

        folder = self.folder(root, step)
        if self.asynchronous:
            with _gloo():
                dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder, no_dist=True)

    def is_right(self, root: Path, step: int) -> bool:
        """Load what the training has names for."""
        import torch.distributed.checkpoint as dcp

        wanted = state_of(0, width=self.width)
        dcp.load(wanted, checkpoint_id=self.folder(root, step), no_dist=True)
        return True


class AsyncDistributed(Distributed):
    """The same with `async_save`."""

    name = "dcp-async"
    asynchronous = True


@contextlib.contextmanager
def _gloo() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Orbax(Tool):
    """Orbax's `StandardCheckpointer`, restored into the shapes of a training."""

    name = "orbax"
    needs = ("orbax", "jax")

    def save(self, root: Path, step: int, state: State) -> None:
        """Save numpy's arrays, and wait for the end."""
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.folder(root, step).absolute(), _arrays(state))

    def is_right(self, root: Path, step: int) -> bool:
        """Restore it."""
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.restore(self.folder(root, step).absolute(), _arrays(state_of(0, width=self.width)))
        return True


def _arrays(state: State) -> State:
    model = {name: value.numpy() for name, value in state["model"].items()}
    own = state["optimizer"]["state"]
    moments = {str(number): {name: value.numpy() for name, value in of.items()} for number, of in own.items()}
    return {"model": model, "optimizer": moments}


class Md5Sum(TorchFiles):
    """`md5sum` into a list right after the save, and `md5sum -c`."""

    name = "md5sum"
    needs = ("/md5sum",)

    def save(self, root: Path, step: int, state: State) -> None:
        """The same files, and a list."""
        super().save(root, step, state)
        folder = self.folder(root, step)
        done = subprocess.run(["md5sum", "model.pt", "optimizer.pt"], cwd=folder, capture_output=True, check=True)
        (root / f"step-{step}.md5").write_bytes(done.stdout)

    def is_right(self, root: Path, step: int) -> bool:
        """Compare."""
        command = ["md5sum", "--check", "--quiet", str(root / f"step-{step}.md5")]
        return subprocess.run(command, cwd=self.folder(root, step), capture_output=True, check=False).returncode == 0


class HubCache(Safetensors):
    """`hf cache verify`: the digests are those that a hub has, here a server with what was saved."""

    name = "hf-verify"
    needs = ("huggingface_hub",)

    def save(self, root: Path, step: int, state: State) -> None:
        """The same files, and what a hub would say of them."""
        super().save(root, step, state)
        listed = [_on_hub(path, self.folder(root, step)) for path in self.files(root, step)]
        (root / f"step-{step}.json").write_text(json.dumps(listed))

    def is_right(self, root: Path, step: int) -> bool:
        """Ask it. A missing file is one."""
        with _hub((root / f"step-{step}.json").read_text()) as endpoint:
            program = [sys.executable, "-m", "huggingface_hub.cli.hf", "cache", "verify", "some/model"]
            options = ["--local-dir", str(self.folder(root, step)), "--fail-on-missing-files"]
            own = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
            done = subprocess.run([*program, *options], env=own, capture_output=True, check=False)
        return done.returncode == 0


def _on_hub(path: Path, folder: Path) -> dict[str, Any]:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"oid": digest, "size": len(content), "pointerSize": 134}
    return {"type": "file", "oid": digest[:40], "size": len(content), "path": str(path.relative_to(folder)), "lfs": lfs}


@contextlib.contextmanager
def _hub(tree: str) -> Iterator[str]:
    """A server that answers for one model as a hub does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_tree = "/tree/" in urlsplit(self.path).path
            answer = tree if is_tree else json.dumps({"id": "some/model", "sha": "0" * 40, "siblings": []})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Restic(TorchFiles):
    """`restic backup` after each save, and `restic check --read-data`. The harm is done to what it keeps."""

    name = "restic"
    needs = ("/restic",)

    def _restic(self, root: Path, *arguments: str) -> bool:
        own = {**os.environ, "RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": str(root / "cache")}
        command = ["restic", "--repo", str(root / "kept"), "--quiet", *arguments]
        return subprocess.run(command, env=own, capture_output=True, check=False).returncode == 0

    def files(self, root: Path, step: int) -> list[Path]:
        """Those of its repository that came with a save."""
        found = [path for path in (root / "kept" / "data").rglob("*") if path.is_file()]
        own = json.loads((root / f"step-{step}.new").read_text())
        mine = [path for path in found if path.name in own]
        return sorted(mine, key=lambda path: (-path.stat().st_size, path.name))

    def save(self, root: Path, step: int, state: State) -> None:
        """Save, and back up."""
        super().save(root, step, state)
        if not (root / "kept").exists() and not self._restic(root, "init"):
            raise RuntimeError("restic init failed")
        before = {path.name for path in (root / "kept" / "data").rglob("*")}
        if not self._restic(root, "backup", "--tag", f"step-{step}", str(self.folder(root, step))):
            raise RuntimeError("restic backup failed")
        now = {path.name for path in (root / "kept" / "data").rglob("*") if path.is_file()}
        (root / f"step-{step}.new").write_text(json.dumps(sorted(now - before)))

    def is_right(self, root: Path, step: int) -> bool:
        """Read all that it keeps."""
        return self._restic(root, "check", "--read-data")

    def restore(self, root: Path, step: int, to: Path) -> bool:
        """Bring it back."""
        return self._restic(root, "restore", "latest", "--tag", f"step-{step}", "--target", str(to))


class ModelSigning(Safetensors):
    """`model_signing sign key` after each save, and `verify key`."""

    name = "model-signing"
    needs = ("model_signing", "OpenSSL")

    def _signing(self, *arguments: object) -> bool:
        command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def save(self, root: Path, step: int, state: State) -> None:
        """Save, and sign."""
        super().save(root, step, state)
        if not (root / "key.pem").exists():
            _make_key(root)
        signature = ["--signature", root / f"step-{step}.sig", "--private_key", root / "key.pem"]
        if not self._signing("sign", "key", self.folder(root, step), *signature):
            raise RuntimeError("signing failed")

    def is_right(self, root: Path, step: int) -> bool:
        """Verify the signature and the digests."""
        signature = ["--signature", root / f"step-{step}.sig", "--public_key", root / "key.pub"]
        return self._signing("verify", "key", self.folder(root, step), *signature)


def _make_key(root: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (root / "key.pem").write_bytes(private)
    (root / "key.pub").write_bytes(public)


class Guarded(Tool):
    """A pass of ckptguard's daemon after each save of another tool, and `ckptguard verify`."""

    def __init__(self, saver: Tool) -> None:
        self.saver, self.name, self.needs = saver, f"ckptguard-{saver.name}", saver.needs

    def save(self, root: Path, step: int, state: State) -> None:
        """Save as another tool does, and let ckptguard look."""
        self.saver.save(root / "run", step, state)
        reconcile(open_view(str(root / "run"), QUICK), PassNotes(), assume_quiet=True)

    def folder(self, root: Path, step: int) -> Path:
        """Where a save is."""
        return self.saver.folder(root / "run", step)

    def is_right(self, root: Path, step: int) -> bool:
        """Verify it."""
        found = ckptguard.verify(root / "run", settings=QUICK).checkpoints
        return [one.outcome for one in found if one.path == f"step-{step}"] == ["good"]

    def newest_good(self, root: Path) -> int | None:
        """The step of the known-good one."""
        return int(Path(ckptguard.known_good(root / "run").path).name.partition("-")[2])

    def restore(self, root: Path, step: int, to: Path) -> bool:
        """From the kept copy."""
        return Path(ckptguard.restore(root / "run", to, step=step).path).is_dir()


TOOLS: tuple[Tool, ...] = (
    TorchFiles(),
    Safetensors(),
    Distributed(),
    AsyncDistributed(),
    Orbax(),
    Md5Sum(),
    HubCache(),
    Restic(),
    ModelSigning(),
    Guarded(TorchFiles()),
    Guarded(Safetensors()),
    Guarded(Distributed()),
)
