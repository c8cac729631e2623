"""Frozen dataclasses that check their own field types, and the one error a user can cause."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """A mistake in what the user gave; the message says what, where, and what would be right. Commands exit with 2."""


class ConfigError(InputError):
    """A mistake in a config file or an override."""


class RunError(RuntimeError):
    """A run that cannot go on, through nothing the user gave; the message is one line. Commands exit with 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of every settings dataclass: a value of the wrong type is refused when it is made.

    Never guesses across types, except int -> float, str -> Path and list -> tuple (JSON knows no tuples).
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            try:
                object.__setattr__(self, f.name, convert(value, hints[f.name]))
            except TypeError:
                raise ConfigError(
                    f"{type(self).__name__}.{f.name} must be {type_name(hints[f.name])}, got {value!r}"
                ) from None


def convert(value: Any, kind: Any) -> Any:
    """`value` as a `kind`; TypeError where it is not one."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Literal:
        if value in args:
            return value
        raise TypeError
    if origin in (typing.Union, types.UnionType):
        for arg in args:
            try:
                return convert(value, arg)
            except TypeError:
                continue
        raise TypeError
    if origin is tuple:
        if not isinstance(value, tuple | list):
            raise TypeError
        return tuple(convert(v, args[0]) for v in value)
    if kind is type(None) and value is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()  # no shell expands the ~ of key=~/value
    if isinstance(kind, type) and isinstance(value, kind) and isinstance(value, bool) <= (kind is bool):
        return value
    raise TypeError


def type_name(kind: Any) -> str:
    """How a type is called in a message: 'int', 'float or None', \"one of 'a', 'b'\"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is tuple:
        return f"a tuple of {type_name(args[0])}"
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`."""
    if not condition:
        raise ConfigError(message)
