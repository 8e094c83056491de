"""The table of formats: what a file's name and first bytes say about its format. No reader is loaded for it.

A name alone never makes a file good or bad.
"""

from __future__ import annotations

import importlib.util
import re
import zlib
from collections.abc import Callable

from ckptguard.formats.structure import Format

_LEGACY_NUMBER = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_BEGINNINGS = (b"\x80\x02", b"\x80\x03", *(bytes((0x80, n, 0x95, 13)) + bytes(7) for n in (4, 5)))  # of each protocol
LEGACY_MAGICS = tuple(begin + _LEGACY_NUMBER for begin in _BEGINNINGS)
LARGEST_SAFETENSORS_HEADER = 100_000_000  # the limit of the reference implementation
DISTCP_SUFFIX = ".distcp"
ZIP_MAGIC = b"PK\x03\x04"
BASELINES_DATA = "data"
GGUF_MAGIC = b"GGUF"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
HAS_H5PY = importlib.util.find_spec("h5py") is not None
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
GZIP_MAGIC = b"\x1f\x8b\x08"
NUMPY_MAGIC = b"\x93NUMPY"
_BEGIN_PICKLES = b"(c]})FGIKLMNVX"  # without the mark of a protocol: lists, objects, numbers
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x28\xb5\x2f\xfd")
_OWN_STATE = re.compile(r"(?:.*/)?step-\d{9,12}/state\.json")
_WITHOUT_TENSORS = ("training_args.bin",)
_DCP_METADATA = re.compile(r"(?:__\d+)?\.metadata")  # one for all ranks, or one per rank
_STATE_WORDS = re.compile(
    r"model|optim|adapter|weight|state|checkpoint|ckpt|lora|ema(?![a-z])|scaler|scheduler|sampler|consolidated|params"
    r"|embed|unet|vae|encoder|decoder|pytorch|training_args|shard"
)
_PROMISES_STATE = re.compile(r"model|optim|adapter|weight|lora|params|pytorch|consolidated|(?:^|[^a-z])ema(?![a-z])")
# Arrays are often data beside a checkpoint: only these words make one of them training state.
_NUMPY_STATE = re.compile(
    r"model|optim|adapter|weight|checkpoint|ckpt|lora|params|(?:^|[^a-z])(?:ema(?![a-z])|(?:step|iter|epoch)[-_=.]?\d)"
)
_ALGORITHM = r"(?:md5|sha-?(?:1|224|256|384|512)|blake(?:2b?|3))"
_SIDECAR = re.compile(rf"(.+)\.(?:{_ALGORITHM}(?:sums?)?|(?:{_ALGORITHM}\.)?check_?sums?)(?:\.txt)?", re.IGNORECASE)
_SUM_LIST = re.compile(
    rf"(?:.*[._-])?(?:(?:{_ALGORITHM}|b[23])[_-]?sums?|check_?sums?)(?:\.txt|\.{_ALGORITHM})?|{_ALGORITHM}(?:\.txt)?"
    r"|checklist\.chk",
    re.IGNORECASE,
)
# Names of what is no training state: logs, text, code, pictures, sound, tables, tokenizers, locks, checksums.
_NO_STATE = re.compile(
    r".*\.(?:log|out|err|txt|md|rst|csv|tsv|json|jsonl|ya?ml|toml|cfg|conf|ini|xml|html?|css|[jt]sx?|map|py[cix]?|ipynb|sh|c"
    r"|cc|cpp|cu|cuh|h|hpp|o|so|a|egg|whl|patch|diff|lock|pid|png|jpe?g|gif|bmp|webp|svg|tiff?|ico|pdf|eps|mp[34]|avi|mov"
    r"|mkv|webm|wav|flac|ogg|ttf|woff2?|db|sqlite3?|parquet|arrow|feather|lmdb|mdb|tfrecords?|spm|vocab|bpe|tiktoken"
    r"|prof|nsys-rep|ncu-rep|trace|tmp|bak|swp|asc|sig|gitignore|gitattributes|jinja2?|proto|wandb|gpg|core)"
    r"(?:\.(?:gz|xz|bz2|zst|\d+))?"
    r"|.*tfevents.*|(?:.*[_-])?(?:tokenizer|spiece|sentencepiece|source|target|spm)[^/]*\.model|core\.\d+|license.*|readme.*|makefile"
    r"|dockerfile|merges|vocab"
)
_NO_STATE_FOLDERS = frozenset(
    ("wandb", "tensorboard", "tb_logs", "tblogs", "tb", "logs", "log", "mlruns", "tensorboard_logs", "site-packages")
)
_LOG_WORDS = re.compile(r"(?:^|[^a-z])(?:\w*logs?|metrics?|history|events?|stats?|results?|summary|traces?)(?![a-z])")
FIRST_BYTES = 512  # that tell what a file is: those of a zip name its first file
# How pictures, sound, programs, databases and documents begin.
_BEGIN_OTHERS = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"%PDF", b"%!PS", b"RIFF", b"OggS", b"fLaC", b"ID3", b"\x1aE\xdf\xa3"),
    *(b"\x7fELF", b"SQLite format 3", b"PAR1", b"ARROW1", b"Obj\x01", b"!<arch>", b"wOFF", b"II*\0", b"MM\0*"),
)
Rule = Callable[[str, bytes], bool]  # of a path and the file's first bytes


def name_of(path: str) -> str:
    """Return the last part of a path, in lower case."""
    return path.rpartition("/")[2].lower()


def suffixes_of(*holds: str) -> tuple[str, ...]:
    """Return the suffixes of all formats whose files hold one of these, from the table of formats; the longest
    first."""
    global _derived
    if _derived[0] is not FORMATS:
        _derived = (FORMATS, {})
    rows, known = _derived
    if holds not in known:
        found = {suffix for row in rows if row.holds in holds for suffix in row.suffixes}
        known[holds] = tuple(sorted(found, key=lambda suffix: (-len(suffix), suffix)))
    return known[holds]


_derived: tuple[tuple[Format, ...], dict[tuple[str, ...], tuple[str, ...]]] = ((), {})


def has_tensor_suffix(path: str) -> bool:
    """True if files with this suffix usually hold tensors (training_args.bin has the suffix, but none)."""
    return name_of(path).endswith(suffixes_of("tensors", "pieces"))


def tensor_suffix(path: str) -> bool:
    """True if a checkpoint needs a file with this name, judged by the name alone."""
    name = name_of(path)
    if name.endswith(suffixes_of("arrays")):
        return _NUMPY_STATE.search(name) is not None
    return (has_tensor_suffix(path) and name not in _WITHOUT_TENSORS) or is_dcp_metadata(path)


def is_dcp_metadata(path: str) -> bool:
    """True if it is the name of a file that explains torch.distributed.checkpoint's ``.distcp`` files."""
    return _DCP_METADATA.fullmatch(name_of(path)) is not None


def may_be_foreign(path: str) -> bool:
    """True if a name says nothing but ``.bin``, as token files and vocabularies do, too."""
    name = name_of(path)
    return name.endswith(".bin") and not _STATE_WORDS.search(name)


def promises_state(path: str) -> bool:
    """True if a name says that the file holds weights or optimizer state, and nothing else."""
    return _PROMISES_STATE.search(name_of(path)) is not None


def may_hold_state(path: str) -> bool:
    """True unless a name says that the file is something else than training state: a log, a picture, a checksum."""
    name = name_of(path)
    if _NO_STATE.fullmatch(name) or is_sum_list(name) or may_be_pointer(name):
        return False
    return _NO_STATE_FOLDERS.isdisjoint(path.lower().split("/")[:-1])


def begins_like_no_state(head: bytes) -> bool:
    """True if the first bytes of a file are those of a text, a picture, a program or a database."""
    if head.startswith(_BEGIN_OTHERS) or head[4:8] == b"ftyp":
        return True
    try:
        text = head[:-3].decode("utf-8") if len(head) == FIRST_BYTES else head.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\t\r\n\f\b\x1b" for character in text)


def is_sum_list(path: str) -> bool:
    """Whether a file's name says that it holds checksums: ``SHA256SUMS``, ``model.pt.md5``, ``checksums.txt``."""
    name = path.rpartition("/")[2]
    return (_SUM_LIST.fullmatch(name) or _SIDECAR.fullmatch(name)) is not None


def summed_file(path: str) -> str | None:
    """The name of the file whose checksum a file of this name holds (``model.pt`` of ``model.pt.md5``), or None."""
    match = _SIDECAR.fullmatch(path.rpartition("/")[2])
    return match[1] if match is not None else None


def is_pickle_name(path: str) -> bool:
    """True if it is the name of a pickle."""
    return name_of(path).endswith(suffixes_of("objects"))


def by_end(*ends: str) -> Rule:
    """Return a rule for the end of the name."""
    return lambda path, head: name_of(path).endswith(ends)


def by_end_or_start(magic: bytes, *ends: str) -> Rule:
    """Return a rule for the end of the name, or the first bytes."""
    return lambda path, head: head.startswith(magic) or name_of(path).endswith(ends)


def by_name(*names: str) -> Rule:
    """Return a rule for the whole name."""
    return lambda path, head: name_of(path) in names


def is_settings_json(path: str, head: bytes) -> bool:
    """True for the name of a JSON file that loaders may read, such as a configuration or a tokenizer; not for that of
    a log, which a crash may cut and a resume goes on with."""
    name = name_of(path)
    if not name.endswith(".json") or _LOG_WORDS.search(name) is not None:
        return False
    return _NO_STATE_FOLDERS.isdisjoint(path.lower().split("/")[:-1])


is_pointer = by_name("latest", "latest_universal", "latest_checkpointed_iteration.txt")
_READ_BY_LOADERS = re.compile(r"latest.*|last_checkpoint.*|checkpoint", re.DOTALL)


def may_be_pointer(path: str) -> bool:
    """True if loaders read a file with this name to find a checkpoint: ``latest``, ``last_checkpoint.rank_0``."""
    return _READ_BY_LOADERS.fullmatch(name_of(path)) is not None and not tensor_suffix(path)


def is_safetensors(path: str, head: bytes) -> bool:
    """True by the suffix alone, or with another tensor suffix by a plausible length before an opening brace."""
    if path.lower().endswith(".safetensors"):
        return True
    plausible = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= LARGEST_SAFETENSORS_HEADER
    return plausible and has_tensor_suffix(path)


def first_record(head: bytes) -> str | None:
    """Return the name of the first file in an archive, by the archive's first bytes; None if it is no zip or tar."""
    if head.startswith(ZIP_MAGIC):
        return head[30 : 30 + int.from_bytes(head[26:28], "little")].decode("utf-8", "replace")
    if is_tar("", head):
        return (
            (_unpacked(head) if head.startswith(GZIP_MAGIC) else head)[:100]
            .rstrip(b"\0")
            .decode("utf-8", "replace")
            .removeprefix("./")
        )
    return None


def begins_like_folder(head: bytes) -> bool:
    """True if an archive begins with a file of training state that its name shows. stable-baselines3 begins with
    ``data``, which is JSON."""
    name = first_record(head)
    if name is None:
        return False
    content = 34 + int.from_bytes(head[28:30], "little")  # after the local header and this name
    of_baselines = name == BASELINES_DATA and head.startswith(ZIP_MAGIC) and head[content : content + 1] == b"{"
    return of_baselines or promises_tensors(name)


def promises_tensors(path: str) -> bool:
    """True if a file in an archive is one that a checkpoint needs, by its name."""
    return tensor_suffix(path) and not may_be_foreign(path)


def is_tar(path: str, head: bytes) -> bool:
    """True for NeMo's suffix, and for a tar archive, also a compressed one."""
    if head.startswith(GZIP_MAGIC):
        head = _unpacked(head)
    return head.startswith(_TAR_MAGIC, _TAR_MAGIC_AT) or name_of(path).endswith(NEMO)


def _unpacked(head: bytes) -> bytes:
    """Return the first bytes of what gzip compressed."""
    try:
        return zlib.decompressobj(31).decompress(head, FIRST_BYTES)
    except zlib.error:
        return b""


def is_torch_zip(path: str, head: bytes) -> bool:
    """True for a zip archive with a suffix of torch's, a pickle's suffix, or the record that torch begins with.

    A user may have given a checkpoint any name.
    """
    if not head.startswith(ZIP_MAGIC):
        return False
    by_name = name_of(path).endswith(TORCH_SUFFIXES) or is_pickle_name(path)
    return by_name or (first_record(head) or "").endswith("/data.pkl")


def is_torch_legacy(path: str, head: bytes) -> bool:
    """True by a tensor suffix (or a pickle's) and the magic number of these files."""
    return head.startswith(LEGACY_MAGICS) and (has_tensor_suffix(path) or is_pickle_name(path))


def is_pickle(path: str, head: bytes) -> bool:
    """True by a pickle's suffix, unless compressed; with a tensor suffix only by the mark of a binary pickle."""
    if is_pickle_name(path):
        return not head.startswith(_COMPRESSED)
    return has_tensor_suffix(path) and len(head) > 2 and head[0] == 0x80 and head[1] <= 5


def is_marked_pickle(head: bytes) -> bool:
    """True if bytes begin with the mark of a binary pickle."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def may_begin_file(head: bytes) -> bool:
    """True if bytes inside a file may be a file themselves: an archive, arrays, or a pickle of any protocol."""
    if head.startswith((ZIP_MAGIC, NUMPY_MAGIC)) or is_marked_pickle(head) or is_safetensors(".pt", head):
        return True
    return head[:1] in _BEGIN_PICKLES and head != b""


TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")
# Without h5py nobody reads what these promise, so they are no checkpoints then.
KERAS = (".keras",) if HAS_H5PY else ()
HDF5 = (".weights.h5", ".h5", ".hdf5") if HAS_H5PY else ()
NEMO = (".nemo",)


def is_read_by_h5py(path: str, head: bytes) -> bool:
    """True for a file that a library in C may parse: HDF5 by its first bytes or its name, and Keras' archive of one."""
    return HAS_H5PY and (head.startswith(HDF5_MAGIC) or path.lower().endswith((*KERAS, *HDF5)))


# The first row that matches reads the file.
FORMATS: tuple[Format, ...] = (
    Format("hf_index", by_end(".index.json"), "json_files", "read_index"),
    Format("trainer_state", by_name("trainer_state.json"), "json_files", "read_trainer_state"),
    Format("ckptguard_state", lambda path, head: bool(_OWN_STATE.fullmatch(path)), "json_files", "read_own_state"),
    Format("config_json", is_settings_json, "json_files"),
    Format("npz", by_end(".npz"), "numpy.arrays", "read_npz", suffixes=(".npz",), holds="arrays"),
    Format("npy", by_end(".npy"), "numpy.arrays", "read_npy", unsummed=True, suffixes=(".npy",), holds="arrays"),
    Format("dcp_metadata", lambda path, head: is_dcp_metadata(path), "dcp.metadata", unsummed=True),
    Format("distcp", by_end(".distcp"), "dcp.distcp", explained_beside=True, suffixes=(".distcp",), holds="pieces"),
    Format("safetensors", is_safetensors, "safetensors", unsummed=True, suffixes=(".safetensors",)),
    Format("gguf", by_end_or_start(GGUF_MAGIC, ".gguf"), "gguf", unsummed=True, suffixes=(".gguf",)),
    Format("hdf5", by_end_or_start(HDF5_MAGIC, *HDF5), "hdf5", unsummed=True, suffixes=HDF5, holds="arrays"),
    Format("torch_zip", is_torch_zip, "torch.files", "read_zip", suffixes=TORCH_SUFFIXES),
    Format("torch_legacy", is_torch_legacy, "torch.files", "read_legacy", unsummed=True),
    Format(
        "pickle",
        is_pickle,
        "torch.files",
        "read_pickles",
        unsummed=True,
        suffixes=(".pkl", ".pickle"),
        holds="objects",
    ),
    Format("zip", by_end_or_start(ZIP_MAGIC, *KERAS), "containers", "read_zip", suffixes=KERAS),
    Format("tar", is_tar, "containers", "read_tar", unsummed=True, suffixes=NEMO),
    Format("pointer", is_pointer, "text_files", "read_pointer"),
    Format("yaml", by_end(".yaml", ".yml"), "text_files", "read_yaml"),
    # The name promises tensors, but the bytes fit no format.
    Format("unrecognised", lambda path, head: has_tensor_suffix(path), "opaque", explained_beside=True),
    Format("opaque", lambda path, head: True, "opaque"),
)


def format_of(path: str, head: bytes) -> Format:
    """Return the row for a file with this name and these first bytes; "opaque" if no format claims it."""
    return next(row for row in FORMATS if row.matches(path, head))
