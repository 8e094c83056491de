"""Options for file systems besides a URL: endpoints, keys, timeouts. The value never shows its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.errors import SettingsError

PAGE = 1000  # names in one answer of an object store


class StorageOptions:
    """Options for URLs, by protocol (``s3``) or by the beginning of a URL (``s3://bucket``). Immutable.

    They come from ``[storage]`` in ``ckptguard.toml``. fsspec's own configuration stays valid below them, and so do
    each library's files and variables. They belong to one owner and not to the process, so several users' keys can
    coexist.

    Neither `repr` nor pickle contains their values. An unpickled copy knows only the names, and refuses a URL that one
    of them fits: otherwise another user's key might be used. Only `revealed()` passes the values on.
    """

    __slots__ = ("_by_name", "_withheld")

    _by_name: dict[str, dict[str, Any]]
    _withheld: bool

    def __init__(self, options: Mapping[str, Mapping[str, Any]] | StorageOptions | None = None) -> None:
        given: Any = options.revealed() if isinstance(options, StorageOptions) else {} if options is None else options
        if not isinstance(given, Mapping) or not all(isinstance(values, Mapping) for values in given.values()):
            # Do not say what was wrong: that could quote a secret.
            raise SettingsError("storage must be a table of tables, by protocol or by the beginning of a URL")
        object.__setattr__(self, "_by_name", {str(name).rstrip("/"): _copied(given[name]) for name in given})
        object.__setattr__(self, "_withheld", False)

    @property
    def names(self) -> tuple[str, ...]:
        """The protocols and URL beginnings with options."""
        return tuple(sorted(self._by_name))

    def for_url(self, url: str) -> dict[str, Any]:
        """Return the options for a URL: its protocol's, then those of its beginnings, longer ones last.

        Raises SettingsError after pickling, which removes the values.
        """
        found: dict[str, Any] = {}
        for name in sorted(self._by_name, key=lambda name: ("://" in name, len(name))):
            if name == url.partition(":")[0] or ("://" in name and (url == name or url.startswith(f"{name}/"))):
                self._must_have_values()
                found.update(_copied(self._by_name[name]))
        return found

    def revealed(self) -> dict[str, dict[str, Any]]:
        """Return all options with their secrets, to pass them on, never to show them.

        Raises SettingsError after pickling, which removes the values.
        """
        self._must_have_values()
        return {name: _copied(values) for name, values in self._by_name.items()}

    def _must_have_values(self) -> None:
        if self._withheld:
            raise SettingsError(
                f"the storage options for {', '.join(self.names)} were removed when these settings were pickled",
                hint="load the settings again in that process, or pass the options on with revealed()",
            )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StorageOptions):
            return NotImplemented
        return (self._by_name, self._withheld) == (other._by_name, other._withheld)

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"StorageOptions(for {', '.join(self.names) or 'nothing'})"

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> StorageOptions:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_values, (self.names,)


def _without_values(names: tuple[str, ...]) -> StorageOptions:
    """Return what unpickling produces."""
    options = StorageOptions({name: {} for name in names})
    object.__setattr__(options, "_withheld", bool(names))
    return options


def _copied(value: Any) -> Any:
    """Copy tables and lists, but not what is in them: a credentials object may not be copyable."""
    if isinstance(value, Mapping):
        return {name: _copied(below) for name, below in value.items()}
    return [_copied(below) for below in value] if isinstance(value, list) else value


NO_OPTIONS = StorageOptions()
