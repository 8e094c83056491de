"""A small character transformer and its text: what the demo trains. Nothing here knows of ckptguard."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 64
BATCH = 32
WIDTH = 96
HEADS = 4
LAYERS = 2
VOCABULARY = 128  # ASCII; anything else reads as "?"


def read_corpus(limit: int = 1_500_000) -> torch.Tensor:
    """The first `limit` characters of the standard library's own sources, by file name."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def draw_batch(corpus: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step: the same every time that the step is taken."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([corpus[s : s + CONTEXT + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer of the transformer."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed(self.norm_feed(x))


class CharTransformer(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """The logits of every next character."""
        return self.head(self.norm(self.blocks(self.characters(characters) + self.places)))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    loss_scale: float | None,
) -> tuple[float, float]:
    """One update; returns loss and gradient norm. With a loss scale, forward and backward run in fp16.

    The scale is fixed and nobody looks whether the scaled gradients still fit: that is the mistake which the demo
    makes on purpose.
    """
    inputs, targets = batch
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16, enabled=loss_scale is not None):
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss * (loss_scale or 1.0)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None and loss_scale is not None:
            parameter.grad.div_(loss_scale)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()
