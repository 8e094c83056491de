"""Hallo: a damaged pretrained file, DeepSpeed's loss scale at its minimum, and another number of processes.

python examples/cases/hallo.py [FOLDER]

Training broke down on loading: every prediction was NaN, and DeepSpeed halved its loss scale until it ended the run
with "Current loss scale already at minimum". The cause was a pretrained file that had been damaged on its way. The
same exception comes of data: here a video's frames are 0 to 65535 instead of 0 to 1, and fp16 ends at 65504. And a
checkpoint of two processes does not load into one. Everything is in fp16 and on the CPU.
"""

import hashlib
import logging
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptguard

STEPS, FRAME = 24, 16
UNSCALED = range(64, 96)  # the frames of one video


def denoiser() -> nn.Module:
    """Stands for the network that predicts the noise in a frame."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2 * FRAME, 32), nn.SiLU(), nn.Linear(32, FRAME))


def frames() -> torch.utils.data.TensorDataset:
    """Noisy frames, each with the noise that is to be predicted."""
    torch.manual_seed(0)
    frame, noise = torch.rand(192, FRAME), torch.randn(192, FRAME)
    frame[UNSCALED] *= 65535
    return torch.utils.data.TensorDataset(torch.cat([frame + noise, frame], 1), noise)


def damaged_file(folder: str) -> None:
    """One byte of a download is wrong. Its numbers are finite all the same: only the sums that came with it tell."""
    path, sums = f"{folder}/damaged.safetensors", f"{folder}/published"  # beside it as SHA256SUMS it is used by itself
    save_file(denoiser().state_dict(), path)
    with open(path, "r+b") as file, open(sums, "w") as published:
        content = file.read()
        published.write(f"{hashlib.sha256(content).hexdigest()}  damaged.safetensors\n")
        file.seek(len(content) - 1)  # the exponent of the last weight
        file.write(b"\x7e")
    print("--- a damaged file, before the first step")
    print(f"without sums: {ckptguard.check_pretrained(path).outcome.value}")
    try:
        ckptguard.check_pretrained(path, sums=sums)
    except ckptguard.CkptguardError as error:
        print(error, flush=True)


def make_engine(weights: dict[str, torch.Tensor] | None = None):
    """DeepSpeed with ZeRO-2 in fp16, as Hallo sets it up."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a faster reduction, which it would compile first
    get_accelerator().is_fp16_supported = lambda: True  # the CPU can, slowly
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16]
    deepspeed.init_distributed(dist_backend="gloo")
    model = denoiser()
    if weights is not None:
        model.load_state_dict(weights)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True, "initial_scale_power": 3, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batches() -> torch.utils.data.DataLoader:
    """Each process has its share of the frames."""
    data = frames()
    return torch.utils.data.DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data, shuffle=False))


def say(text: object) -> None:
    """The first of the processes speaks for all."""
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def train_from_damaged_file(folder: str) -> None:
    """Without any guard: what the file does to training."""
    say("--- a damaged file, trained on plainly")
    engine = make_engine(load_file(f"{folder}/damaged.safetensors"))
    try:
        for noisy, noise in batches():
            loss = nn.functional.mse_loss(engine(noisy.half()).float(), noise)
            engine.backward(loss)
            engine.step()
            say(f"loss {loss:g}, loss scale {engine.optimizer.loss_scaler.cur_scale:g}")
    except Exception as error:
        say(f"training ends: {error}")


def train(folder: str) -> None:
    """Under guard, from sound weights, or from what is known-good in the run."""
    say(f"--- under guard, number of processes: {os.environ['WORLD_SIZE']}")
    engine = make_engine()
    try:
        with ckptguard.integrations.deepspeed.EngineGuard(engine, f"{folder}/run") as guard:
            for _, (noisy, noise) in guard.steps(batches(), total=STEPS, save_every=4):
                guard.update(nn.functional.mse_loss(engine(noisy.half()).float(), noise))
    except ckptguard.CkptguardError as error:
        say(f"{error}; {error.hint}")
    else:
        finite = all(weight.isfinite().all() for weight in engine.module.parameters())
        say(f"finished at step {guard.step}, all weights finite: {finite}")


PARTS = {"plainly": train_from_damaged_file, "guarded": train}


def start(processes: int, folder: str, *parts: str) -> None:
    """Start this file again, in so many processes, for these parts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, __file__, folder, *parts], env=environment, check=True)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="hallo-")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for part in sys.argv[2:]:
        PARTS[part](folder)
    if len(sys.argv) > 2:
        sys.stdout.flush()
        os._exit(0)  # gloo's threads sometimes abort a process that ends in the usual way
    os.makedirs(folder, exist_ok=True)
    damaged_file(folder)
    start(2, folder, "plainly", "guarded")
    print(
        subprocess.check_output([sys.executable, "-m", "ckptguard", "incident", f"{folder}/run"], text=True), flush=True
    )
    start(1, folder, "guarded")
    print(f"see: ckptguard list {folder}/run")


if __name__ == "__main__":
    main()
