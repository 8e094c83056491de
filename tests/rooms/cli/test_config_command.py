"""config: every setting, its value, and where it is from; and no secret."""

from __future__ import annotations

import msgspec
import pytest

from ckptguard.records.run import open_run
from ckptguard.records.run_settings import allow_nonfinite
from ckptguard.values.settings import Settings

SECRET = "s3cr3t-t0ken"


@pytest.fixture
def shown(document):
    """The settings by name, as `config` says."""

    def call(*words):
        code, found = document("config", *words)
        assert code == 0
        return {one["name"]: (one["value"], one["source"], one["place"]) for one in found["settings"]}

    return call


def test_every_setting_is_shown_with_its_default(root, shown, monkeypatch):
    """In the order of the settings; nothing is set here."""
    monkeypatch.delenv("CKPTGUARD_SETTLE")
    found = shown()
    assert list(found) == [field.name for field in msgspec.structs.fields(Settings)]
    assert {source for _, source, _ in found.values()} == {"default"}
    assert found["settle"] == (5.0, "default", None)
    assert found["keep_best"] == ([], "default", None)


def test_each_source_is_named(root, tmp_path, shown, monkeypatch):
    """A flag, then the environment, then the file, also where the value is the default's."""
    (tmp_path / "ckptguard.toml").write_text('records = "x"\nkeep_good = 2\nworkers = 3\n')
    monkeypatch.setenv("CKPTGUARD_WORKERS", "4")
    found = shown("--records", str(tmp_path / "there"))
    assert found["records"] == (str(tmp_path / "there"), "flag", "--records")
    assert found["workers"] == (4, "environment", "CKPTGUARD_WORKERS")
    assert found["keep_good"] == (2, "file", "ckptguard.toml")
    (tmp_path / "other.toml").write_text("repair = true\n")
    assert shown("--config", "other.toml")["repair"] == (True, "file", "other.toml")


def test_what_a_run_adds(verified, shown, tmp_path, monkeypatch):
    """Where its records and replicas are, and the tensors that were allowed not to be finite."""
    monkeypatch.setenv("CKPTGUARD_REPLICAS", f"{tmp_path}/copies/{{run}}")
    allow_nonfinite(open_run(str(verified)), ("mask.*",))
    found = shown(verified)
    assert found["records"][0] == str(verified / "_ckptguard")
    assert found["replicas"][0] == [f"{tmp_path}/copies/{verified.name}"]
    assert found["allow_nonfinite"] == (["mask.*"], "records", None)


def test_no_secret_is_shown(root, tmp_path, invoke):
    """Neither in text nor in the document: of hooks, of stores, and of the file that has them."""
    (tmp_path / "ckptguard.toml").write_text(
        f'webhook = "https://hooks.example.com/services/{SECRET}"\n'
        f'on_incident = ["notify", "--token={SECRET}", "slack://{SECRET}/x",'
        f" \"curl -H 'Authorization: Bearer {SECRET}' https://hooks.example.com\"]\n"
        f'[storage.s3]\nkey = "{SECRET}"\nendpoint_url = "http://{SECRET}"\n'
    )
    for words in ((), ("--json",)):
        result = invoke("config", *words)
        assert result.exit_code == 0
        assert SECRET not in result.output
        assert "***" in result.stdout
        assert "endpoint_url" in result.stdout


def test_settings_as_text_hide_the_addresses_of_a_command():
    """A log may have them."""
    address = f"https://hooks.example.com/{SECRET}"
    assert SECRET not in repr(Settings(on_incident=("curl", address, f"-d {address}")))


def test_what_is_set_comes_first(root, invoke):
    """In text, where people look for what is not as usual."""
    lines = invoke("config").stdout.splitlines()
    assert lines[0].split() == ["SETTING", "VALUE", "FROM"]
    assert lines[1].split() == ["settle", "0.0", "CKPTGUARD_SETTLE"]
    assert lines[-1].split()[-1] == "default"


def test_a_mistake_in_a_setting_is_said(root, tmp_path, invoke):
    """With the code of wrong settings."""
    (tmp_path / "ckptguard.toml").write_text("settel = 1\n")
    result = invoke("config")
    assert result.exit_code == 2
    assert "settel" in result.stderr
