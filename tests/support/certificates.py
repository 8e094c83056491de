"""Certificates for servers and clients on loopback, made by the command openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for localhost and its key, under a name."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the command openssl makes the certificate, and is not here")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", f"/O={name}/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    words += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *words], check=True, capture_output=True)
    key.chmod(0o600)
    return str(certificate), str(key)
