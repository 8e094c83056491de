"""Ultralytics' own classification training: ``last.pt``, ``best.pt`` and ``epochN.pt``, whole pickled modules written
in place; ``resume=True`` reads ``last.pt``. It is stopped after its saves: at its end it makes ``last.pt`` unable to
resume. What is NaN in its weights it writes as 0; the optimizer's NaN remains."""

import packages  # first

# isort: split

import os

from PIL import Image
from tells import LAST, RUN, Tells
from ultralytics import YOLO

tells, home = Tells(RUN), RUN.parent
data = home.parent / "data"
for number in range(8):
    image = data / ("train", "val")[number % 2] / "ab"[number // 2 % 2] / f"{number}.png"
    image.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32), (30 * number, 10, 200 - 20 * number)).save(image)
last = RUN / "last.pt"


def written():
    return {path.name: path.stat().st_mtime_ns for path in RUN.glob("*.pt")}


lay = written()


def started(trainer):
    number = trainer.start_epoch
    tells.started(number, trainer.ema.ema.state_dict() if number else None)


def before_save(trainer):
    if tells.is_poisoned(trainer.epoch + 1):
        packages.poison(trainer.model)
        packages.poison(trainer.ema.ema)
        for state in trainer.optimizer.state.values():
            for value in state.values():
                if hasattr(value, "fill_") and value.is_floating_point():
                    value.fill_(float("nan"))


def saved(trainer):
    number, before = trainer.epoch + 1, dict(lay)
    lay.update(written())
    names = [name for name in lay if lay[name] != before.get(name)]  # it has its own rules which of them a save writes
    state = {name: value.half().float() for name, value in trainer.ema.ema.state_dict().items()}
    tells.saved(number, state, *names)
    if number >= LAST:
        os._exit(0)


model = YOLO(str(last) if last.exists() else "yolo11n-cls.yaml")
model.add_callback("on_train_start", started)
model.add_callback("on_train_epoch_end", before_save)
model.add_callback("on_model_save", saved)
if last.exists():
    model.train(resume=True)
else:
    model.train(
        data=str(data),
        epochs=50,
        imgsz=32,
        batch=4,
        nbs=4,
        workers=0,
        device="cpu",
        amp=False,
        plots=False,
        val=False,
        save_period=1,
        project=str(home.parent),
        name=home.name,
        exist_ok=True,
        optimizer="AdamW",
        lr0=0.05,
        warmup_epochs=0,
    )
