"""Damage or re-save: in doubt, damage."""

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


def classify(sealed, files, **changes):
    """Classify with the usual circumstances."""
    others = tuple(changes.pop("other_contents", ()))
    known = {name: changes.pop(name) for name in ("ever_good", "facts") if name in changes}
    past = KnownBefore(other_contents=lambda: others, **({"ever_good": True} | known))
    usual = {"whole": True, "last_written": "", "sealed_by_writer": False}
    return classify_change(sealed, {f.entry.key: f for f in files}, past, **(usual | changes))


A, B = sealed_file(), sealed_file("c-1/b.safetensors")


def test_equal_content_is_the_same_whatever_the_times_say():
    """A touched or copied checkpoint is no change."""
    assert classify(manifest(A, B), [found(A, new=True), found(B, new=True)]) is Change.SAME


def test_a_whole_new_save_is_a_resave():
    """All files new, most tensors other."""
    files = [found(A, new=True, changed=TENSORS), found(B, new=True, changed=TENSORS)]
    assert classify(manifest(A, B), files) is Change.RESAVED


@pytest.mark.parametrize("changed", [1, 2])
def test_few_changed_tensors_are_damage_even_in_a_new_file(changed):
    """One tensor, or a minority, is what damage looks like."""
    assert classify(manifest(A), [found(A, new=True, changed=changed)]) is Change.DAMAGED


def test_old_times_are_damage_however_much_changed():
    """Bytes that changed under their old times were not written by a trainer."""
    assert classify(manifest(A), [found(A, changed=TENSORS)]) is Change.DAMAGED


def test_half_of_the_files_new_is_a_resave_under_way():
    """A writer has got to the first of two files."""
    files = [found(A, new=True, changed=TENSORS), found(B)]
    assert classify(manifest(A, B), files) is Change.RESAVING


def test_a_harmed_new_file_beside_old_ones_is_damage():
    """One new file with one tensor changed is no re-save under way."""
    assert classify(manifest(A, B), [found(A, new=True, changed=1), found(B)]) is Change.DAMAGED


def test_a_cut_new_file_may_still_be_being_written():
    """A single file that is truncated and new is being saved again, or was until its writer died."""
    files = [found(A, new=True, changed=TENSORS, truncated=True, problems=["short"])]
    assert classify(manifest(A), files, whole=False) is Change.RESAVING


def test_a_stale_copy_of_another_step_is_damage():
    """A new file that holds exactly what another step holds was put there by mistake."""
    other = msgspec.structs.replace(manifest(sealed_file(content="x")), step=2)
    spans = tuple(Span(i * 16, 16, f"new-{A.path}-{i}") for i in range(TENSORS))
    other = msgspec.structs.replace(other, files=(msgspec.structs.replace(other.files[0], spans=spans),))
    files = [found(A, new=True, changed=TENSORS)]
    assert classify(manifest(A), files, other_contents=[other]) is Change.DAMAGED


def test_our_own_layout_never_resaves_in_place():
    """Its writer takes a new name, so any change is damage."""
    files = [found(A, new=True, changed=TENSORS)]
    assert classify(manifest(A), files, sealed_by_writer=True) is Change.DAMAGED


def test_what_never_was_good_has_nothing_to_lose():
    """After a BAD save, a new file is judged on its own, however little of it changed."""
    assert classify(manifest(A), [found(A, new=True, changed=1)], ever_good=False) is Change.RESAVED


def test_the_last_written_file_must_be_new_too():
    """Weights are new, the layout's last file is not: not finished."""
    last = File(path="c-1/trainer_state.json", size=5, format="json", envelope="s", mtime_ns=1, inode=1)
    files = [found(A, new=True, changed=TENSORS), found(last)]
    assert classify(manifest(A, last), files, last_written="c-1/trainer_state.json") is Change.RESAVING


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
