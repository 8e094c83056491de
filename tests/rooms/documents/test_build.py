"""How results become documents: by the keys of their fields, and by one table of what is said otherwise."""

import enum
import importlib
import operator
import pkgutil

import ckptguard_daemon
import msgspec
import pytest

import ckptguard
from ckptguard.documents.build import FORMS, document, fields, plain
from ckptguard.records.incidents import Incident
from ckptguard.records.trash import Trashed
from ckptguard.values.ids import CheckpointId
from ckptguard.values.incident import SickTensor
from ckptguard.values.manifest import File
from ckptguard.values.verdict import Finding, Severity

OF_TYPES = [name for name in FORMS if "." in name]


def class_of(name):
    """The class that a form is for."""
    module, _, kind = name.partition(".")
    packages = (ckptguard, ckptguard_daemon)
    names = [m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]
    found = [m for m in names if m.rpartition(".")[2] == module and "commands" not in m]
    classes = [getattr(importlib.import_module(m), kind, None) for m in found]
    [one] = [c for m, c in zip(found, classes, strict=True) if c is not None and c.__module__ == m]
    return one


@pytest.mark.parametrize("name", OF_TYPES)
def test_every_form_is_that_of_a_class_and_of_what_it_has(name):
    """A class that is renamed, or a field that is, cannot silently change a document."""
    kind = class_of(name)
    own = set(getattr(kind, "__struct_fields__", ()))
    for word in FORMS[name].keys.split():
        key, _, attribute = word.partition(">")[0].partition("=")
        first = (attribute or key).partition(".")[0]
        known = key in FORMS[name].made or first == "*" or first in own or hasattr(kind, first)
        assert known or (first in ("series", "step") and "id" in own) or kind.__name__ == "WatchedRun", first


class Colour(enum.Enum):
    """A word."""

    RED = "red"


class Thing(msgspec.Struct, omit_defaults=True):
    """Records leave out what has its default."""

    id: CheckpointId
    colour: Colour = Colour.RED
    rate: float | None = None
    others: tuple[float, ...] = ()


def test_what_has_its_default_is_not_left_out():
    """Every field is there, ids and enums are text, and a number that is not finite is null."""
    id = CheckpointId("net-#.pt", 500, 1)
    assert fields(Thing(id)) == {"id": "500.1", "colour": "red", "rate": None, "others": []}
    assert fields(Thing(id, others=(1.0, float("inf"))), rate=2.5)["others"] == [1.0, None]
    assert fields(Thing(id), rate=2.5)["rate"] == 2.5
    assert list(fields(SickTensor(name="w", kind="weight"))) == list(SickTensor.__struct_fields__)


def test_what_is_unset_has_no_key():
    """Only the finding that says how many were left out has that key, and an incident without details has none."""
    finding = Finding(check="finite", severity=Severity.ERROR, message="m")
    assert "omitted" not in fields(finding)
    assert fields(msgspec.structs.replace(finding, omitted=3))["omitted"] == 3
    incident = Incident(id="i", step=1, cause="c", reason="r", opened_at="t", source="s")
    assert "details" not in fields(incident)


def test_an_id_says_series_and_step_of_what_has_no_such_fields():
    """The three keys are there whether a type has them or its id alone."""
    mark = operator.itemgetter("series", "step", "id")
    found = class_of("send_checkpoint.Replicated")(
        path="net-7.pt", id=CheckpointId("net-#.pt", None, 2), bytes=1, done="there"
    )
    assert mark(fields(found)) == ("net-#.pt", None, "-.2")
    assert "series step id" in FORMS["trash.Trashed"].keys
    assert hasattr(Trashed, "series")


def test_files_show_what_people_ask_for():
    """A file of a manifest has five keys, in their order."""
    file = File(path="a", size=1, format="raw", envelope="e")
    assert list(fields(file)) == ["path", "size", "format", "md5", "tensors"]


def test_documents_begin_alike():
    """Schema and command come first, then the keys in the order given."""
    found = document("list", target="/x", checkpoints=())
    assert list(found) == ["schema", "command", "target", "checkpoints"]
    assert plain({1: {"b": {2.5}}}) == {"1": {"b": [2.5]}}
