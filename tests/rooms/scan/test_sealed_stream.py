"""Bytes held against the manifest while they pass."""

import pytest
from blake3 import blake3

from ckptguard.errors import RecordsError
from ckptguard.scan.sealed_stream import SealedStream
from ckptguard.storage.redaction import plain_url
from ckptguard.values.manifest import WHOLE_FORMATS, File, Span, Tensor

DATA = bytes(range(256)) * 8


def sealed(*places, form="safetensors"):
    """A file of these spans over `DATA`."""
    spans = tuple(Span(at, length, blake3(DATA[at : at + length]).hexdigest()) for at, length in places)
    inside = {n for at, length in places for n in range(at, at + length)} if form not in WHOLE_FORMATS else set()
    envelope = blake3(bytes(b for n, b in enumerate(DATA) if n not in inside)).hexdigest()
    tensors = tuple(Tensor(f"t{n}", "U8", (s.length,), n, "model") for n, s in enumerate(spans))
    return File(path="f", size=len(DATA), format=form, envelope=envelope, spans=spans, tensors=tensors)


SHAPES = [(), ((0, 2048),), ((8, 100), (108, 1000)), ((0, 0), (8, 0), (8, 10), (2048, 0)), ((5, 7), (2000, 48))]


@pytest.mark.parametrize("places", SHAPES)
@pytest.mark.parametrize("block", [1, 7, 100, 5000])
@pytest.mark.parametrize("form", ["safetensors", *sorted(WHOLE_FORMATS)])
def test_whole_and_damaged(places, block, form):
    """Every byte counts, wherever it lies and however it comes; the tensor that was hit is named."""
    file = sealed(*places, form=form)
    for hit in (None, 0, 9, 1050, 2047):
        data = bytearray(DATA)
        if hit is not None:
            data[hit] ^= 1
        stream = SealedStream(file)
        for at in range(0, len(data), block):
            stream.add(bytes(data[at : at + block]))
        wrong = stream.wrong()
        named = [f"t{n}" for n, (at, length) in enumerate(places) if hit is not None and at <= hit < at + length]
        assert (wrong is None) == (hit is None)
        assert all(f"(tensor {name})" in wrong for name in named)


def test_a_length_that_is_not_the_sealed_one():
    """Less or more is wrong, too."""
    for data in (b"", DATA[:-1], DATA + b"x"):
        stream = SealedStream(sealed((8, 100)))
        stream.add(data)
        assert stream.wrong() is not None


@pytest.mark.parametrize("places", [((0, 100), (50, 10)), ((100, 10), (0, 10)), ((2000, 100),)])
def test_spans_that_cannot_be(places):
    """Overlapping, out of order, beyond the end: the record is at fault, not the bytes."""
    with pytest.raises(RecordsError):
        SealedStream(sealed(*places))


def test_urls_in_records_hold_no_user_and_no_query():
    """What is recorded of where a training began."""
    assert plain_url("s3://user:secret@bucket/run?token=x") == "s3://bucket/run"
    assert plain_url("sftp://me@host/run") == "sftp://host/run"
    assert plain_url("/runs/what?") == "/runs/what?"
