"""A file beside weights that its loader cannot load is never good; one that it loads is. Real loaders say it."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from support.runs import QUICK, save_file, state_dict

from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
TOKENIZER = json.dumps({"model": {"vocab": {f"token {n}": n for n in range(300)}}, "version": "1.0"}).encode()


def archive(value: object) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def arrays(**values: np.ndarray) -> bytes:
    """What numpy.savez writes."""
    stream = io.BytesIO()
    np.savez(stream, **values)
    return stream.getvalue()


# What loads, by the kind of the file, and what a download, a checkout, a crash or a user leaves in its place.
WHOLE: dict[str, list[bytes]] = {
    "torch": [
        archive({"w": torch.ones(4, 4)}),
        archive({"last_epoch": 3, "_last_lr": [0.1]}),
        archive({"w": torch.ones(2, 2)} | {"note": "<html>"}),
    ],
    "safetensors": [save_safetensors({"w": torch.ones(4, 4)})],
    "npz": [arrays(w=np.ones((4, 4), np.float32))],
    "json": [
        TOKENIZER,
        b"{}",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}\n\n',
        b"\xef\xbb\xbf{}",
        '{"a": "\u00e4 \\ud800"}'.encode(),
        '{"a": 1}'.encode("utf-16"),
        b"[1, 2]",
    ],
}
BROKEN: dict[str, bytes] = {
    "lfs": POINTER,
    "lfs without an end": POINTER[:60],
    "lfs of windows": POINTER.replace(b"\n", b"\r\n"),
    "html": b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n",
    "html, late": b"\n\n  <HTML><body>502 Bad Gateway</body></HTML>",
    "html with a mark": b"\xef\xbb\xbf<html><title>Sign in</title>",
    "xml": b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>',
    "xml alone": b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>",
    "a sentence": b"Entry not found",
    "a sentence and a line": b"Invalid credentials in Authorization header\n",
    "a number": b"2",
    "nul": b"\0" * 4096,
    "one nul": b"\0",
    "empty": b"",
    "cut json": TOKENIZER[: len(TOKENIZER) // 2],
    "json and nul": TOKENIZER[:-200] + b"\0" * 200,
    "nul and json": b"\0" * 512 + TOKENIZER[512:],
    "two json": TOKENIZER + TOKENIZER,
    "no utf-8": b'{"a": "\xff\xfe"}',
    "yaml": b"epoch: 3\nlr: 0.1\n",
    "noise": bytes(range(256)) * 9,
}
ANSWERS: dict[str, bytes] = {  # JSON that loads as JSON, and as nothing else
    "an error": b'{"error": "AccessDenied"}',
    "an error of a hub": b'{"error":"Repository not found"}\n',
    "a list": b"[1, 2, 3]",
    "a message": b'{"message": "API rate limit exceeded", "documentation_url": "https://example.org"}',
}
NAMES = {
    "torch": [
        *("vae.pth", "scheduler.pt", "training_args.bin", "optimizer.pt", "scaler.pt", "rng_state.pth", "extra.ckpt"),
        *("pytorch_model.bin", "ema.pt", "random_states_0.pt", "sub/unet.pth", "adapter.bin", "a.pth.tar"),
    ],
    "safetensors": ["extra.safetensors", "sub/vae.safetensors"],
    "npz": ["model_arrays.npz"],
    "json": [
        *("tokenizer.json", "vocab.json", "config.json", "special_tokens_map.json", "added_tokens.json", "params.json"),
        *(
            "preprocessor_config.json",
            "sub/tokenizer_config.json",
            "generation_config.json",
            "modules.json",
            "notes.json",
        ),
    ],
}
LOADERS: dict[str, Callable[[bytes], object]] = {
    "torch": lambda raw: torch.load(io.BytesIO(raw), weights_only=False),
    "safetensors": load_safetensors,
    "npz": lambda raw: [np.load(io.BytesIO(raw))[name] for name in ("w",)],
    "json": json.loads,
}


def loads(kind: str, raw: bytes) -> bool:
    """True if the real loader takes it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LOADERS[kind](raw)
    except Exception:
        return False
    return True


def cases() -> Iterator[tuple[str, str, str, bytes]]:
    """Yield (kind, name, what, bytes): every name with everything."""
    for kind, names in NAMES.items():
        others = [
            *((f"whole {number}", raw) for number, raw in enumerate(WHOLE[kind])),
            *(BROKEN.items()),
            *(ANSWERS.items() if kind != "json" else ()),
            *((f"half {number}", raw[: len(raw) // 2]) for number, raw in enumerate(WHOLE[kind])),
            *((f"of {other}", WHOLE[other][0]) for other in WHOLE if {kind, other} != {"torch", "safetensors"}),
        ]
        for name in names:
            yield from ((kind, name, what, raw) for what, raw in others)


CASES = list(cases())


@pytest.mark.parametrize("part", range(4))
def test_good_is_what_loads(part, tmp_path):
    """Beside whole weights, a file is good if its loader takes it, and only then."""
    against = []
    for number, (kind, name, what, raw) in enumerate(CASES):
        if number % 4 != part:
            continue
        model = tmp_path / str(number)
        save_file(state_dict(1), tmp_path / "w.safetensors")
        (model / name).parent.mkdir(parents=True)
        os.rename(tmp_path / "w.safetensors", model / "model.safetensors")
        (model / name).write_bytes(raw)
        report = verify_target(str(model), QUICK)
        good = report.outcome is Outcome.GOOD
        if good is not loads(kind, raw):
            against.append(
                (name, what, report.outcome.value, [f.message for c in report.checkpoints for f in c.findings])
            )
    assert not against, (len(against), against[:12])


NAMED = {
    "lfs": "a Git LFS pointer",
    "lfs without an end": "a Git LFS pointer",
    "lfs of windows": "a Git LFS pointer",
    "html": "an HTML page",
    "html, late": "an HTML page",
    "html with a mark": "an HTML page",
    "xml": "an XML page",
    "xml alone": "an XML page",
}
OTHERS = ("tokenizer.model", "model.onnx", "flax_model.msgpack", "tf_model.h5", "model.gguf", "vocab.txt", "merges.txt")


PLACES = [*(name for names in NAMES.values() for name in names), *OTHERS, "model.safetensors"]
WHAT = sorted(NAMED)


@pytest.mark.parametrize(
    ("name", "what"),
    [(name, WHAT[n % len(WHAT)]) for i, name in enumerate(PLACES) for n in (i, i + 3, i + 5)],
)
def test_what_stands_in_the_place_of_a_file_is_called_by_its_name(name, what, tmp_path):
    """Whatever the file should be: the model itself, a tokenizer, a file of another framework."""
    save_file(state_dict(1), tmp_path / "model.safetensors")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(BROKEN[what])
    report = verify_target(str(tmp_path), QUICK)
    assert report.outcome is Outcome.BAD
    messages = [f.message for c in report.checkpoints for f in c.findings if f.file == name]
    assert any(NAMED[what] in message for message in messages), messages


@pytest.mark.parametrize("name", ["README.md", "picture.png", "index.html", "scheme.svg", "paper.pdf", "notes.xml"])
def test_documents_may_be_what_they_are(name, tmp_path):
    """Whoever pulled only the weights of a repository has pointers for its pictures, and an HTML page is one."""
    save_file(state_dict(1), tmp_path / "model.safetensors")
    for what in ("lfs", "html", "xml"):
        (tmp_path / name).write_bytes(BROKEN[what])
        assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD


LOGS = {
    "lines": b'{"loss": 1.0}\n{"loss": NaN}\n',
    "lines cut": b'{"loss": 1.0}\n{"lo',
    "nul": b'{"loss": 1.0}\n\0\0\0\0',
    "empty": b"",
    "half": b'[{"loss": 1.0}, {"los',
}


@pytest.mark.parametrize("what", sorted(LOGS))
@pytest.mark.parametrize("name", ["log.json", "train_log.json", "metrics.json", "wandb/x-summary.json", "history.json"])
def test_a_log_in_json_is_no_part_of_what_is_loaded(what, name, tmp_path):
    """A crash cuts it, and a resume appends to it."""
    save_file(state_dict(1), tmp_path / "model.safetensors")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(LOGS[what])
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD


def test_settings_with_comments_and_lines_of_json_are_good(tmp_path):
    """Their own reader knows them."""
    save_file(state_dict(1), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('// by hand\n{"a": 1}\n')
    (tmp_path / "data.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD


def test_a_text_is_good_where_its_layout_writes_it(tmp_path):
    """SpeechBrain's counters, beside the CKPT.yaml that its folders have, and only there."""
    save_file(state_dict(1), tmp_path / "model.safetensors")
    (tmp_path / "counter.ckpt").write_text("2")
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.BAD
    (tmp_path / "CKPT.yaml").write_text("epoch: 2\n")
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD
    (tmp_path / "counter.ckpt").write_text('{"error": "AccessDenied"}')
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.BAD
