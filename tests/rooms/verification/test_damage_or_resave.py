"""Damage or re-save: in doubt, damage."""

from functools import partial

import msgspec
import pytest

from ckptguard.formats.structure import Problem, SpanPlace, Structure, TensorPlace
from ckptguard.scan.result import ScannedFile
from ckptguard.storage.protocol import Entry
from ckptguard.values.manifest import File, Manifest, Span, Tensor
from ckptguard.verification.damage_or_resave import Change, KnownBefore, classify_change

TENSORS = 6


def sealed_file(path="c-1/a.safetensors", content="old"):
    """A sealed file of some tensors, whose digests spell their content."""
    return File(
        path=path,
        size=100,
        format="safetensors",
        envelope=f"header-{content}",
        mtime_ns=1,
        inode=1,
        spans=tuple(Span(i * 16, 16, f"{path}-{content}-{i}") for i in range(TENSORS)),
        tensors=tuple(Tensor(f"t{i}", "float32", (4,), i, "model") for i in range(TENSORS)),
    )


def manifest(*files):
    """A manifest of these files."""
    return Manifest(
        series="c-#",
        path="c-1",
        layout="folder",
        step=1,
        generation=1,
        digest_origin="observer",
        sealed_at="",
        version="",
        nonce="",
        files=files,
    )


def found(file, *, new=False, changed=0, problems=(), truncated=False):
    """The file as it is found now: `changed` of its tensors hold other bytes."""
    digests = tuple(s.blake3 if i >= changed else f"new-{file.path}-{i}" for i, s in enumerate(file.spans))
    entry = Entry(key=file.path, kind="file", size=file.size, mtime_ns=2 if new else 1, inode=1)
    return ScannedFile(
        entry=entry,
        structure=Structure(
            format="safetensors",
            spans=tuple(SpanPlace(s.offset, s.length) for s in file.spans),
            tensors=tuple(TensorPlace(t.name, t.dtype, t.shape, t.span) for t in file.tensors),
            problems=tuple(Problem(message=p) for p in problems),
            truncated=truncated,
        ),
        envelope=file.envelope,
        span_digests=digests,
        numbers=(None,) * len(file.tensors),
    )


A, B = sealed_file(), sealed_file("c-1/b.safetensors")
RANK = msgspec.structs.replace(A, path="c-1/rank_1.safetensors")  # it saves the same tensors as `A`
STATE = File(path="c-1/trainer_state.json", size=5, format="json", envelope="s", mtime_ns=1, inode=1)
NEW = partial(found, new=True, changed=TENSORS)
OF_ANOTHER_STEP = manifest(
    msgspec.structs.replace(A, spans=tuple(Span(i * 16, 16, f"new-{A.path}-{i}") for i in range(TENSORS)))
)


def classify(sealed, files, *, others=(), good=True, whole=True, last="", by_writer=False):
    """Classify with the usual circumstances."""
    past = KnownBefore(other_contents=lambda: others, ever_good=good)
    now = {f.entry.key: f for f in files}
    return classify_change(sealed, now, past, whole=whole, last_written=last, sealed_by_writer=by_writer)


@pytest.mark.parametrize(
    ("change", "sealed", "files", "circumstances"),
    [
        pytest.param(Change.SAME, [A, B], [found(A, new=True), found(B, new=True)], {}, id="touched or copied"),
        pytest.param(Change.RESAVED, [A, B], [NEW(A), NEW(B)], {}, id="all files new, most tensors other"),
        pytest.param(Change.DAMAGED, [A], [found(A, new=True, changed=1)], {}, id="one tensor of a new file"),
        pytest.param(Change.DAMAGED, [A], [found(A, new=True, changed=2)], {}, id="a minority of its tensors"),
        pytest.param(Change.DAMAGED, [A], [found(A, changed=TENSORS)], {}, id="old times, however much changed"),
        pytest.param(Change.RESAVING, [A, B], [NEW(A), found(B)], {}, id="a writer has got to one of two files"),
        pytest.param(Change.RESAVING, [A, RANK], [NEW(A), found(RANK)], {}, id="the same of two ranks"),
        pytest.param(Change.DAMAGED, [A, B], [found(A, new=True, changed=1), found(B)], {}, id="harmed, the other old"),
        # Truncated and new: it is being saved again, or was until its writer died.
        pytest.param(Change.RESAVING, [A], [NEW(A, truncated=True, problems=["short"])], {"whole": False}, id="cut"),
        pytest.param(Change.DAMAGED, [A], [NEW(A)], {"others": [OF_ANOTHER_STEP]}, id="a stale copy of another step"),
        # The writer of our own layout takes a new name.
        pytest.param(Change.DAMAGED, [A], [NEW(A)], {"by_writer": True}, id="our own layout"),
        pytest.param(Change.RESAVED, [A], [found(A, new=True, changed=1)], {"good": False}, id="nothing to lose"),
        pytest.param(Change.RESAVING, [A, STATE], [NEW(A), found(STATE)], {"last": STATE.path}, id="the last is old"),
    ],
)  # fmt: skip
def test_in_doubt_it_is_damage(change, sealed, files, circumstances):
    """What is found beside what was sealed, and which change that is."""
    assert classify(manifest(*sealed), files, **circumstances) is change


@pytest.mark.parametrize(
    ("seconds", "change"),
    [
        ((10, 12), Change.RESAVED),
        ((12, 10), Change.RESAVING),
        ((10, 500), Change.RESAVING),
        ((10, None), Change.RESAVING),
    ],
)
def test_frozen_files_are_written_with_the_others(seconds, change):
    """An old file that was written with the new ones, and in its order, is frozen; else it was left by the old save."""
    first, second = (msgspec.structs.replace(f, mtime_ns=n * 10**9) for n, f in ((1, A), (2, B)))
    now = [found(first, changed=TENSORS), found(second)]
    now = [
        msgspec.structs.replace(f, entry=msgspec.structs.replace(f.entry, mtime_ns=s and s * 10**9, inode=2))
        for f, s in zip(now, seconds, strict=True)
    ]
    assert classify(manifest(first, second), now) is change
