"""nanoVLM: fp16 autocast in a plain loop. A batch whose answers are all masked is harmless; an overflow is not.

python examples/cases/nanovlm.py [RUN]

The loop has no GradScaler and no test of the gradient norm, so one overflow makes every weight NaN. Here one picture
is over-exposed: in fp16 its products pass 65504, in bf16 or fp32 nothing would happen. Another batch has no answer to
learn from: its loss is NaN too, but its gradients are zeros, and training goes on. Checkpoints are nanoVLM's own: a
folder with `config.json` and `model.safetensors`.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_model, save_model
from torch import nn

import ckptguard

STEPS, SIZE, WORDS = 60, 32, 20
MASKED = range(160, 176)  # the pictures of one batch
OVEREXPOSED = 405  # one picture of another


class TinyVLM(nn.Module):
    """Patches of a picture, then the words of a question, through one transformer layer; the answer is one word."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, SIZE, 4, stride=4)
        self.words = nn.Embedding(WORDS, SIZE)
        self.layer = nn.TransformerEncoderLayer(SIZE, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(SIZE, WORDS)

    def forward(self, picture: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
        seen = self.patches(picture).square().flatten(2).transpose(1, 2)  # squares pass 65504 where patches pass 256
        return self.head(self.layer(torch.cat([seen, self.words(question)], 1))[:, -1])


def pictures() -> torch.utils.data.TensorDataset:
    """Pictures with one bright channel, a question, and the word for the channel."""
    torch.manual_seed(0)
    channel = torch.randint(0, 3, (640,))
    picture = torch.randn(640, 3, 16, 16) * 0.1
    picture[torch.arange(640), channel] += 1.0
    picture[OVEREXPOSED] *= 2_000
    question = torch.randint(10, WORDS, (640, 3))
    answer = channel.clone()
    answer[MASKED] = -100  # nothing to learn here, as when a question is cut off before its answer
    return torch.utils.data.TensorDataset(picture, question, answer)


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="nanovlm-")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    loader = torch.utils.data.DataLoader(pictures(), batch_size=16)
    model = TinyVLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def save(path: str, step: int) -> None:
        os.makedirs(path)
        with open(f"{path}/config.json", "w") as file:
            json.dump({"hidden_size": SIZE, "vocab_size": WORDS}, file)
        save_model(model, f"{path}/model.safetensors")

    def load(path: str) -> None:
        load_model(model, f"{path}/model.safetensors")
        optimizer.state.clear()  # nanoVLM saves no optimizer state

    with ckptguard.TrainingGuard(
        run, model=model, optimizer=optimizer, save=save, load=load, name="step_{step}"
    ) as guard:
        for step, (picture, question, answer) in guard.steps(loader, total=STEPS, save_every=10):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(picture, question), answer)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # whatever the norm is
            found = guard.observe(loss=loss, grad_norm=norm)
            if not loss.isfinite():
                print(f"step {step}: loss {loss:g}, gradient norm {norm:g}: {'sick' if found.sick else 'harmless'}")

    model.eval()
    picture, question, answer = pictures()[:160]
    right = (model(picture, question).argmax(1) == answer).float().mean()
    print(subprocess.check_output([sys.executable, "-m", "ckptguard", "incident", run], text=True))
    print(f"finished at step {guard.step}: {right:.0%} of 160 answers are right; see: ckptguard list {run}")


if __name__ == "__main__":
    main()
