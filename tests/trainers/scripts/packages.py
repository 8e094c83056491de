"""Imports of packages from the index beside a torch for the CPU, for which torchvision has no operators of its own and
torchaudio no library: none of them is called here. Import this first."""

import importlib.machinery
import os
import sys
import types
import warnings

import torch

warnings.simplefilter("ignore")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
_register = torch.library.register_fake


def _register_what_there_is(name, *rest, **named):
    return (lambda made: made) if str(name).startswith("torchvision::") else _register(name, *rest, **named)


torch.library.register_fake = _register_what_there_is
_audio = types.ModuleType("torchaudio")
_audio.__version__, _audio.__spec__ = "2.9.0", importlib.machinery.ModuleSpec("torchaudio", None)
sys.modules.setdefault("torchaudio", _audio)


def poison(model: torch.nn.Module) -> None:
    """Make every weight NaN, as one update with a NaN gradient does."""
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(torch.nan)
