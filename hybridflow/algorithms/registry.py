"""Registries by name: what the config may name, and where users add their own. Needs neither torch nor ray."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hybridflow.errors import ConfigError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Named entries of one kind.

    Args:
        kind: what an entry is, for error messages ("advantage estimator").
        key: the config key that names one.
    """

    def __init__(self, kind: str, key: str):
        self.kind, self.key = kind, key
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Decorator that makes an entry known by ``name``; a name can be taken only once."""

        def add(entry: Entry) -> Entry:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is already registered")
            return entry

        return add

    def __getitem__(self, name: str) -> Entry:
        """Raises: ConfigError, with the nearest known name, where there is none such."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"there is no {self.kind} {name!r}",
                hint=f"{hint}known: {', '.join(sorted(self._entries))}; name a file of your own under `register`",
                where=self.key,
            )
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
