"""What failed downloads and checkouts leave in the place of a file: a Git LFS pointer, an HTML or XML page."""

from __future__ import annotations

import re

from ckptguard.formats.table import is_sum_list, name_of

_POINTER = b"version https://git-lfs"
_POINTER_SIZE = 1024  # the specification allows no longer one
_HTML = re.compile(rb"<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_XML = re.compile(rb"<(?:\?xml|error|listbucketresult)\b", re.IGNORECASE)
_MARK = b"\xef\xbb\xbf"
# Documents, pictures, sound and tables: no loader of a model reads them, and some are HTML or XML themselves.
_DOCUMENTS = re.compile(
    r".*\.(?:md|rst|html?|xhtml|xml|svg|css|js|pdf|eps|png|jpe?g|gif|webp|bmp|tiff?|ico|mp[34]|avi|mov|mkv|webm|wav|flac"
    r"|ogg|csv|tsv|parquet|arrow|ipynb|log|out|err|zip|gz|jinja2?)|.*tfevents.*|\.git.*"
    r"|(?!vocab|merges|.*token).*\.txt"
)


def stand_in(path: str, head: bytes, size: int) -> str | None:
    """Return what stands in the place of a file, in a sentence that says what to do; None if its first bytes are not
    those of such a thing, or the file may be one."""
    text = head.removeprefix(_MARK).lstrip()
    pointer = text.startswith(_POINTER) and size <= _POINTER_SIZE
    if not (pointer or text.startswith(b"<")) or _DOCUMENTS.fullmatch(name_of(path)) or is_sum_list(path):
        return None
    if pointer:
        return "this is a Git LFS pointer, not the file itself: run `git lfs pull`"
    for start, what in ((_HTML, "HTML"), (_XML, "XML")):
        if start.match(text):
            return f"this is an {what} page, such as a failed download leaves: download the file again"
    return None
