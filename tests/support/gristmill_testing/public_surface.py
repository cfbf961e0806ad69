"""Which public names of a client library did a test module really call?

`Surface` wraps every public callable and property of the given classes, so that a call anywhere,
by the tests or by the library on their behalf, leaves a mark. Names come from `inspect`, never
from a list kept by hand: a newer library with a new method makes the module that uses this fail.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROTOCOL_NAMES = frozenset({"__enter__", "__exit__", "__await__"})
"""Special methods that a client writes itself, as `with` and `await`."""


class Surface:
    """The public names of some classes, and those that were called so far."""

    def __init__(self, classes: list[type], package: str) -> None:
        self.classes = classes
        self.package = package
        self.called: set[str] = set()

    @property
    def names(self) -> set[str]:
        """`Class.member` of every public callable or property that the package itself defines."""
        return {f"{cls.__name__}.{name}" for cls in self.classes for name in self._members(cls)}

    @property
    def uncalled(self) -> list[str]:
        return sorted(self.names - self.called)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap the classes, and those subclasses that override a member, until the block ends."""
        with pytest.MonkeyPatch.context() as patch:
            for cls in self.classes:
                for name in self._members(cls):
                    for owner in _family(cls):
                        if name in vars(owner):
                            wrapped = self._wrapped(f"{cls.__name__}.{name}", vars(owner)[name])
                            patch.setattr(owner, name, wrapped)
            yield

    def _members(self, cls: type) -> list[str]:
        return [
            name
            for base in cls.__mro__
            if base.__module__.startswith(self.package)
            for name, value in vars(base).items()
            if _is_public(name) and _is_callable(value)
        ]

    def _wrapped(self, label: str, member: Any) -> Any:
        if isinstance(member, classmethod):
            return classmethod(self._marking(label, member.__func__))
        if isinstance(member, staticmethod):
            return staticmethod(self._marking(label, member.__func__))
        if isinstance(member, property):
            getter = member.fget
            assert getter is not None
            return property(self._marking(label, getter), member.fset, member.fdel, member.__doc__)
        return self._marking(label, member)

    def _marking(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marking(*args: Any, **kwargs: Any) -> Any:
            self.called.add(label)
            return function(*args, **kwargs)

        return marking


def _family(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [cls, *(leaf for child in children for leaf in _family(child))]


def _is_public(name: str) -> bool:
    # pydantic makes `model_post_init` for any model with private attributes: not the library's own.
    return name in PROTOCOL_NAMES or (not name.startswith("_") and name != "model_post_init")


def _is_callable(member: Any) -> bool:
    return inspect.isroutine(member) or isinstance(member, classmethod | staticmethod | property)
