"""A sandbox for the examples of the documents."""

import os
import subprocess
import sys

import pytest
import sandbox


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """A sandbox that nobody works in: pages get copies."""
    folder = tmp_path_factory.mktemp("filled")
    # In a process of its own: an incident notes the versions of all that other tests have imported by now.
    subprocess.run([sys.executable, sandbox.__file__, folder], check=True, capture_output=True)
    return folder


@pytest.fixture
def workplace(filled, tmp_path, monkeypatch):
    """A sandbox of this test's own, entered; no settings of this machine leak in."""
    for name in [n for n in os.environ if n.startswith("CKPTGUARD_")]:
        monkeypatch.delenv(name)
    sandbox.copy(filled, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
