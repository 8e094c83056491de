"""Checksum files as tools really write them, and which files they speak about."""

from __future__ import annotations

import subprocess

import pytest

from ckptguard.errors import SettingsError
from ckptguard.scan.whole_file_digests import new_hasher
from ckptguard.verification.checksum_files import parse_check_sums, sums_for

MD5 = "900150983cd24fb0d6963f7d28e17f72"
SHA1 = "a9993e364706816aba3e25717850c26c9cd0d89d"
SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
SHA512 = (
    "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a"
    "2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f"
)
BLAKE2 = (
    "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
    "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923"
)
BLAKE3 = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
NAMES = ("plain name.bin", "new\nline", "back\\slash", "cr\rx", " lead", "*star", "sub/größe-重み.pt", "a) = b (c")


@pytest.mark.parametrize(
    ("command", "algorithm"),
    [
        ("md5sum", "md5"),
        ("md5sum --tag", "md5"),
        ("md5sum --zero", "md5"),
        ("sha1sum --binary", "sha1"),
        ("sha224sum", "sha224"),
        ("sha256sum", "sha256"),
        ("sha256sum --binary", "sha256"),
        ("sha256sum --tag --zero", "sha256"),
        ("sha384sum", "sha384"),
        ("sha512sum --tag", "sha512"),
        ("b2sum --tag", "blake2b"),
        ("b2sum --length 256 --tag", "blake2b-256"),
    ],
)
def test_what_coreutils_write_is_read(tmp_path, command, algorithm):
    """Every name, however odd, with the digest that the file really has."""
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    text = subprocess.run([*command.split(), *NAMES], cwd=tmp_path, capture_output=True, check=True).stdout
    expected = {}
    for name in NAMES:
        hasher = new_hasher(algorithm, len(name.encode()))
        hasher.update(memoryview(name.encode()))
        expected[name] = {algorithm: hasher.hexdigest()}
    assert parse_check_sums(text, "SUMS") == expected


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        (f"{SHA256}  shasum.bin", ("shasum.bin", "sha256", SHA256)),
        (f"SHA2-256(openssl 3.bin)= {SHA256}", ("openssl 3.bin", "sha256", SHA256)),
        (f"SHA256(openssl 1.bin)= {SHA256}", ("openssl 1.bin", "sha256", SHA256)),
        (f"SHA2-512(x)= {SHA512}", ("x", "sha512", SHA512)),
        (f"BLAKE2B-512(x)= {BLAKE2}", ("x", "blake2b", BLAKE2)),
        (f"BLAKE3 (x) = {BLAKE3}", ("x", "blake3", BLAKE3)),
        (f"MD5 (bsd) = {MD5}", ("bsd", "md5", MD5)),
        (f"{MD5} bsd -r", ("bsd -r", "md5", MD5)),
        (f"{MD5.upper()} *WINDOWS.BIN", ("WINDOWS.BIN", "md5", MD5)),
        (f"{SHA1}  ./here", ("here", "sha1", SHA1)),
        (f"{SHA256}  -", ("", "sha256", SHA256)),
        (SHA256, ("", "sha256", SHA256)),
        (f"{SHA256}  /abs/x", ("/abs/x", "sha256", SHA256)),
        (f"{SHA256}  line\u2028end\x0b", ("line\u2028end\x0b", "sha256", SHA256)),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_other_tools_write_is_read(line, stated, ending, encoding):
    """shasum, openssl, b3sum, BSD; line ends and byte order marks of Windows; upper case."""
    path, algorithm, digest = stated
    text = f"# a comment{ending or chr(10)}{line}{ending}".encode(encoding)
    assert parse_check_sums(text, "list") == {path: {algorithm: digest}}


def test_the_lists_name_says_what_its_lines_do_not():
    """SHA-512 and BLAKE2b look alike, and so do SHA-256 and BLAKE3."""
    for source, digest, algorithm in (
        ("SHA512SUMS", SHA512, "sha512"),
        ("/a/model.bin.sha512", SHA512, "sha512"),
        ("b2sums.txt", BLAKE2, "blake2b"),
        ("B3SUMS", BLAKE3, "blake3"),
        ("model.safetensors.b3", BLAKE3, "blake3"),
        ("SUMS", SHA256, "sha256"),
        ("MD5SUMS", SHA256, "sha256"),
    ):
        assert parse_check_sums(f"{digest}  x\n", source) == {"x": {algorithm: digest}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{SHA512}  x", "may be sha512 or blake2b"),
        (f"SM3 (x) = {SHA256}", "SM3 of 64 digits"),
        (f"SHA512 (x) = {SHA256}", "SHA512 of 64 digits"),
        (f"{SHA256[:-1]}  x", "63 digits"),
        (f"{MD5}  x\n{'0' * 32}  x", "line 2: another md5"),
        (f"\\{MD5}  a\\tb", "an escape that no tool writes"),
        (f"\\{MD5}  a\\", "an escape that no tool writes"),
        (f"{MD5}  x\nhello there", "line 2: neither"),
        ("<html>404</html>", "line 1: neither"),
        ("version https://git-lfs.github.com/spec/v1", "line 1: neither"),
        ("", "states no checksums"),
        ("# nothing\n\n", "states no checksums"),
        (b"\xff\xfe\x00", "not text"),
        (f"{MD5}  caf\xe9".encode("latin-1"), "not text"),
        (f"{MD5}  \u202e\n\x1b[31mx", "\\u001b[31mx"),
    ],
)
def test_what_is_ambiguous_or_no_list_is_one_sentence(text, says):
    """Refused, with the line, and nothing that a terminal would obey."""
    with pytest.raises(SettingsError) as caught:
        parse_check_sums(text, "list")
    assert says in caught.value.message
    assert caught.value.message.isprintable()


def test_the_same_sum_twice_and_two_kinds_of_sums():
    """Repeated lines are no trouble, and every kind counts."""
    assert parse_check_sums(f"{MD5}  x\n{MD5}  ./x\n", "s") == {"x": {"md5": MD5}}
    for text in (f"{MD5}  x\n{SHA256}  x\n", f"{SHA256}  x\n{MD5}  x\n"):
        assert parse_check_sums(text, "s") == {"x": {"md5": MD5, "sha256": SHA256}}


A, B, C = {"md5": "a" * 32}, {"md5": "b" * 32}, {"sha256": "c" * 64}
FILES = ["models/m/x.bin", "models/m/sub/y.bin"]


@pytest.mark.parametrize(
    ("folder", "paths"),
    [
        ("/root/models/m", ("x.bin", "sub/y.bin", "gone")),
        ("/root/models/m/sub", ("../x.bin", "y.bin", "../gone")),
        ("/root/models", ("m/x.bin", "m/sub/y.bin", "m/gone")),
        ("/root", ("models/m/x.bin", "models/m/sub/y.bin", "models/m/gone")),
        ("/elsewhere", ("../root/models/m/x.bin", "../root/models/m/sub/y.bin", "../root/models/m/gone")),
        ("/elsewhere", ("x.bin", "sub/y.bin", "gone")),
        ("/elsewhere", ("m/x.bin", "m/sub/y.bin", "m/gone")),
        ("/elsewhere", ("/root/models/m/x.bin", "/root/models/m/sub/y.bin", "/root/models/m/gone")),
        ("", ("x.bin", "sub/y.bin", "gone")),
    ],
)
def test_where_paths_lead(folder, paths):
    """From the list's own folder, from the target, from the folder around it, or from the root of all."""
    sums = {paths[0]: A, paths[1]: B, paths[2]: A, "../../../../etc/passwd": A, "/etc/passwd": B}
    expected = {FILES[0]: A, FILES[1]: B, "models/m/gone": A}
    assert sums_for(sums, "models/m", FILES, root="/root", folder=folder) == expected


def test_lists_of_many_models_speak_of_one():
    """What lies outside the target is not asked for."""
    sums = {"m/x.bin": A, "other/x.bin": B, "m2/x.bin": B}
    assert sums_for(sums, "m", ["m/x.bin"], root="/r", folder="/r") == {"m/x.bin": A}


def test_one_file_by_its_place_or_its_name():
    """Its place decides where several have its name; a sum without a name is the only file's."""
    sums = {"a/x": A, "b/x": B}
    assert sums_for(sums, "b/x", ["b/x"], root="/r", folder="/r") == {"b/x": B}
    assert sums_for({"": A}, "x", ["x"]) == {"x": A}
    assert sums_for({"deep/x": A}, "x", ["x", "x.yaml"]) == {"x": A}
    for unfit in ({"a/x": A, "c/x": B}, {"": A, "y": B}, {"y": B}):
        with pytest.raises(SettingsError):
            sums_for(unfit, "x", ["x"])
    for unfit in ({"": A}, {"y": A}):
        with pytest.raises(SettingsError):
            sums_for(unfit, "m", ["m/x"])


def test_a_runs_final_model():
    """Files at the root of a run."""
    assert sums_for({"x": A, "gone": B}, ".", ["x", "y"], root="/r", folder="/r") == {"x": A, "gone": B}


def test_two_paths_to_one_file_must_agree():
    """However they are written."""
    files = ["m/x", "m/y"]
    assert sums_for({"x": A, "sub/../x": A}, "m", files) == {"m/x": A}
    assert sums_for({"x": A, "sub/../x": C}, "m", files) == {"m/x": A | C}
    assert sums_for({"x": A, "sub/../x": C}, "m/x", files, root="/r", folder="/r/m") == {"m/x": A | C}
    for target in ("m", "m/x"):
        with pytest.raises(SettingsError, match="two different md5 for m/x"):
            sums_for({"x": A, "sub/../x": B}, target, files, root="/r", folder="/r/m")
