"""Errors travel: copied, pickled, and raised in another process, each keeps its kind, its message and its fields."""

from __future__ import annotations

import concurrent.futures
import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
import traceback
from collections.abc import Callable, Iterator

import ckptguard_daemon
import pytest

import ckptguard
from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.values.settings import parse_settings

ROUND_TRIPS: dict[str, Callable[[BaseException], BaseException]] = {
    **{f"pickle {n}": lambda e, n=n: pickle.loads(pickle.dumps(e, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def every_kind() -> list[type[CkptguardError]]:
    """The whole tree, after every module that could add to it was imported."""
    for package in (ckptguard, ckptguard_daemon):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)

    def below(kind: type[CkptguardError]) -> Iterator[type[CkptguardError]]:
        yield kind
        for further in kind.__subclasses__():
            yield from below(further)

    found = {kind: None for kind in below(CkptguardError) if kind.__module__.startswith("ckptguard")}
    return list(found)


def made(kind: type[CkptguardError]) -> CkptguardError:
    """One of this kind, with a value of its own for every field that it takes."""
    fields: dict[str, object] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            fields[name] = f"the {name} of it"
        if parameter.kind is parameter.VAR_KEYWORD:
            fields |= {"further": ("a", 1), "bytes": b"\xff"}
    error = kind("it went wrong: \udcff", **fields)
    error.add_note("while it was tested")
    return error


def everything_in(error: BaseException) -> dict[str, object]:
    """What tells one error from another."""
    return {"type": type(error), "text": str(error), "args": error.args, **error.__dict__}


def told_in_a_process(number: int) -> None:
    """Raise the error of this number, in a process of its own."""
    raise made(every_kind()[number])


def still_there() -> str:
    """What a pool answers that is still alive."""
    return "here"


def test_the_tree_is_found() -> None:
    """Kinds with fields of their own are among those that are tested here."""
    names = {kind.__name__ for kind in every_kind()}
    assert {"CkptguardError", "RefusedError", "SickTrainingError", "StoppedError", "ResavingError"} <= names
    assert len(names) > 20


@pytest.mark.parametrize("way", ROUND_TRIPS)
def test_every_error_survives_a_round_trip(way: str) -> None:
    """Every error of the tree comes out of pickle and copy as it went in, its fields and notes included."""
    for kind in every_kind():
        error = made(kind)
        again = ROUND_TRIPS[way](error)
        assert again is not error
        assert everything_in(again) == everything_in(error)
        assert again.kind == kind.kind  # type: ignore[attr-defined]


def test_every_error_comes_out_of_a_spawned_process() -> None:
    """An error that a spawned worker raises arrives whole, and the pool still works afterwards."""
    kinds = every_kind()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for number, kind in enumerate(kinds):
            with pytest.raises(kind) as raised:
                pool.submit(told_in_a_process, number).result()
            assert everything_in(raised.value) == everything_in(made(kind))
        assert pool.submit(still_there).result() == "here"


def test_a_traceback_says_what_to_do():
    """Who calls us from Python sees a traceback: its last lines are the message and the hint."""
    error = SettingsError("there is no setting 'setle'", hint="did you mean settle?")
    *_, message, hint = "".join(traceback.format_exception(error)).splitlines()
    assert message.endswith("SettingsError: there is no setting 'setle'")
    assert hint == "hint: did you mean settle?"
    assert "hint" not in "".join(traceback.format_exception(SettingsError("it is wrong")))
    assert str(error) == "there is no setting 'setle'"


def test_a_mistyped_setting_is_one_traceback():
    """It is raised again with its source, and what was raised first would only repeat it."""
    with pytest.raises(SettingsError) as raised:
        parse_settings('keep = "cpoy"', "ckptguard.toml")
    assert "direct cause" not in "".join(traceback.format_exception(raised.value))
