"""What file systems are told besides a URL: endpoints, keys, timeouts. A value that shows no secret."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.errors import SettingsError


class StorageOptions:
    """Options for URLs: by protocol (``s3``) or by the beginning of a URL (``s3://bucket``). Immutable.

    They come from ``[storage]`` in ``ckptguard.toml``. Below them fsspec's own configuration stays in force, and so
    do each library's own files and variables.

    They belong to whoever was given them, not to the process, so that several users' keys stand side by side. Neither
    `repr` nor pickle has their values. A copy that went through pickle knows the names alone, and refuses to be used
    for a URL that one of them fits: without its key, somebody else's might be taken. `revealed()` is the one way to
    pass the values on.
    """

    __slots__ = ("_by_name", "_withheld")

    _by_name: dict[str, dict[str, Any]]
    _withheld: bool

    def __init__(self, options: Mapping[str, Mapping[str, Any]] | StorageOptions | None = None) -> None:
        given: Any = options.revealed() if isinstance(options, StorageOptions) else {} if options is None else options
        if not isinstance(given, Mapping) or not all(isinstance(values, Mapping) for values in given.values()):
            # Not what was wrong with it: that could quote a secret.
            raise SettingsError("storage must be a table of tables, by protocol or by the beginning of a URL")
        object.__setattr__(self, "_by_name", {str(name).rstrip("/"): _copied(given[name]) for name in given})
        object.__setattr__(self, "_withheld", False)

    @property
    def names(self) -> tuple[str, ...]:
        """The protocols and beginnings of URLs that there are options for."""
        return tuple(sorted(self._by_name))

    def for_url(self, url: str) -> dict[str, Any]:
        """The options for a URL: its protocol's, then those of every beginning of it, the longer ones winning.
        SettingsError if pickle took their values away."""
        found: dict[str, Any] = {}
        for name in sorted(self._by_name, key=lambda name: ("://" in name, len(name))):
            if name == url.partition(":")[0] or ("://" in name and (url == name or url.startswith(f"{name}/"))):
                self._must_have_values()
                found.update(_copied(self._by_name[name]))
        return found

    def revealed(self) -> dict[str, dict[str, Any]]:
        """All options with their secrets: for handing them on, never for showing them. SettingsError if pickle took
        their values away."""
        self._must_have_values()
        return {name: _copied(values) for name, values in self._by_name.items()}

    def _must_have_values(self) -> None:
        if self._withheld:
            raise SettingsError(
                f"the storage options for {', '.join(self.names)} were left behind when these settings were pickled",
                hint="load the settings again where they are used, or pass the options on as revealed()",
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
    """What comes out of pickle."""
    options = StorageOptions({name: {} for name in names})
    object.__setattr__(options, "_withheld", bool(names))
    return options


def _copied(value: Any) -> Any:
    """Tables and lists anew, what is in them as it is: a user's credentials object need not be copyable."""
    if isinstance(value, Mapping):
        return {name: _copied(below) for name, below in value.items()}
    return [_copied(below) for below in value] if isinstance(value, list) else value


NO_OPTIONS = StorageOptions()
