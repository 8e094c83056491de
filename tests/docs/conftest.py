"""A sandbox for the examples of the documents."""

import pytest
import sandbox


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """A sandbox that nobody works in: pages get copies."""
    folder = tmp_path_factory.mktemp("filled")
    sandbox.in_a_process("fill", folder)
    return folder


@pytest.fixture
def workplace(filled, tmp_path, monkeypatch):
    """A sandbox of this test's own, entered; no settings of this machine leak in."""
    sandbox.copy(filled, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
