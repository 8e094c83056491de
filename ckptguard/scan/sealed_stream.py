"""Compare a stream of bytes with the manifest's digests, without knowing its format."""

from __future__ import annotations

from blake3 import blake3

from ckptguard.errors import RecordsError
from ckptguard.values.manifest import WHOLE_FORMATS, File


class SealedStream:
    """Takes all bytes of one file in order. Raises RecordsError if the manifest's spans are impossible."""

    def __init__(self, file: File) -> None:
        ends = [0, *(span.offset + span.length for span in file.spans)]
        if any(span.offset < end for span, end in zip(file.spans, ends, strict=False)) or max(ends) > file.size:
            raise RecordsError(f"the manifest states spans of {file.path} that overlap or reach beyond its end")
        self._file = file
        self._of_all = file.format in WHOLE_FORMATS  # the envelope, not only what is outside spans
        self._envelope, self._span = blake3(), blake3()
        self._number = 0  # of the span that ends next
        self._at = 0
        self._wrong: list[int] = []

    def add(self, block: bytes | memoryview) -> None:
        """Take the next bytes."""
        left = memoryview(block)
        if self._of_all:
            self._envelope.update(left)
        while left:
            self._close_spans()
            hasher, until = self._here(self._at + len(left))
            if not self._of_all or hasher is self._span:
                hasher.update(left[: until - self._at])
            left = left[until - self._at :]
            self._at = until

    def wrong(self) -> str | None:
        """After the last byte, return what differs from the seal, or None."""
        self._close_spans()
        file = self._file
        if self._at != file.size:
            return f"{file.path} has {self._at} bytes instead of {file.size}"
        if self._wrong:
            name = next((t.name for t in file.tensors if t.span == self._wrong[0]), None)
            return f"{file.path} is not what was sealed" + (f" (tensor {name})" if name is not None else "")
        return None if self._envelope.hexdigest() == file.envelope else f"{file.path} is not what was sealed"

    @property
    def wrong_spans(self) -> tuple[int, ...]:
        """The numbers of the spans whose bytes differ from the sealed ones; call `wrong` first."""
        return tuple(self._wrong)

    def _here(self, end: int) -> tuple[blake3, int]:
        """Return the hasher for the next bytes, and where it ends, at most `end`."""
        if self._number == len(self._file.spans):
            return self._envelope, end
        span = self._file.spans[self._number]
        if self._at < span.offset:
            return self._envelope, min(span.offset, end)
        return self._span, min(span.offset + span.length, end)

    def _close_spans(self) -> None:
        """Compare the spans that end here; some may be empty."""
        spans = self._file.spans
        while self._number < len(spans) and self._at == spans[self._number].offset + spans[self._number].length:
            if self._span.hexdigest() != spans[self._number].blake3:
                self._wrong.append(self._number)
            self._span = blake3()
            self._number += 1
