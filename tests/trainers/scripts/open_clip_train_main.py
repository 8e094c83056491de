"""open_clip's own training main over its synthetic data: ``epoch_N.pt``, and ``epoch_latest.pt`` written beside and
renamed; ``--resume latest --save-most-recent``."""

import packages  # first

# isort: split

import json

import open_clip_train.main as main
from open_clip.factory import add_model_config
from tells import LAST, RUN, Tells

BEGIN: list[int] = []
tells, logs = Tells(RUN), RUN.parent.parent
RUN.mkdir(parents=True, exist_ok=True)
config = logs.parent / "ViT-tiny.json"
vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
text = {"context_length": 77, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1}
config.write_text(json.dumps({"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}))
add_model_config(config)
train_one_epoch, models = main.train_one_epoch, []


def tell(epoch):
    tells.saved(epoch, models[0].state_dict(), f"epoch_{epoch}.pt", "epoch_latest.pt")


def observed(model, data, loss, epoch, *rest, **named):
    models[:] = [model]
    if BEGIN:
        tell(epoch)
    else:
        BEGIN.append(epoch)
        tells.started(epoch, model.state_dict() if epoch else None)
    if tells.is_poisoned(epoch + 1):
        packages.poison(model)
    return train_one_epoch(model, data, loss, epoch, *rest, **named)


main.train_one_epoch = observed
words = "--dataset-type synthetic --train-num-samples 4 --batch-size 2 --workers 0 --precision fp32 --device cpu"
words += f" --model ViT-tiny --epochs {LAST} --save-frequency 1 --save-most-recent --resume latest --warmup 0 --lr 1e-3"
main.main([*words.split(), "--logs", str(logs), "--name", RUN.parent.name])
if models:
    tell(LAST)
