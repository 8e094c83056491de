"""The tiny training on a device: its generator, autocast, a loss scaler that skips; and bits of tensors."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

from support.tiny_training import Training


class DeviceTraining(Training):
    """As `Training`, but dropout and noise are drawn on the device. `precision` is what autocast computes in; with
    "float16" there is a loss scaler, and the gradients of the updates in `hot` overflow."""

    def __init__(self, device: torch.device, precision: str | None = None, *, seed: int = 7, hot: tuple[int, ...] = ()):
        super().__init__(seed)
        self.device, self.hot = device, hot
        self.precision = None if precision is None else getattr(torch, precision)
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.5)
        scales = self.precision is torch.float16
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=4, enabled=scales)
        self.scales: dict[int, float] = {}

    def parts(self) -> dict[str, object]:
        """What a guard takes."""
        return super().parts() | ({"scaler": self.scaler} if self.scaler.is_enabled() else {})

    def update(self, step: int, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; (loss, gradient norm), both on the device."""
        x, y = (part.to(self.device) for part in batch)
        x = x + 0.001 * torch.randn_like(x) + 0.001 * random.random() + 0.001 * float(numpy.random.rand())
        self.model.train()
        with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
            found = self.model(x)
        loss = nn.functional.mse_loss(found.float(), y)
        self.optimizer.zero_grad()
        self.scaler.scale(loss * (1e30 if step in self.hot else 1.0)).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.losses[step], self.scales[step] = loss.item(), self.scaler.get_scale()
        return loss.detach(), norm


def rng_of(device: torch.device) -> bytes:
    """The state of a device's generator."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return bytes(state.tolist())


def bits(tensor: torch.Tensor) -> bytes:
    """What a tensor holds, wherever and however it lies."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
