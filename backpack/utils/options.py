"""What an object was made with, for its ``repr``."""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from typing import Any, ClassVar


class ShowsOptions:
    """Its ``repr`` is the call that makes it, without options that have their default values."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the signature be that of the constructor, not of what notes its arguments."""
        super().__init_subclass__(**options)
        own = signature(cls.__init__)
        cls.__signature__ = own.replace(parameters=[*own.parameters.values()][1:])

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Note the arguments, whatever the constructor of a subclass makes of them."""
        self = super().__new__(cls)
        self._made_with = args, kwargs
        return self

    def __repr__(self) -> str:
        """Write the call, such as ``KFAC(mc_samples=3)``."""
        args, kwargs = self._made_with
        own = self.__signature__
        parts: list[str] = []
        for name, value in own.bind_partial(*args, **kwargs).arguments.items():
            if own.parameters[name].kind is Parameter.VAR_POSITIONAL:
                parts += map(repr, value)
            elif own.parameters[name].kind is Parameter.VAR_KEYWORD:
                parts += [f"{key}={option!r}" for key, option in value.items()]
            elif not _equal(value, own.parameters[name].default):
                # not what a method is bound to, which may show this
                shown = getattr(value, "__qualname__", None) if callable(value) else None
                parts.append(f"{name}={shown or repr(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _equal(value: Any, default: Any) -> bool:
    """Whether an option has its default value: numbers and texts are compared, no tensors."""
    return value is default or (type(value) is type(default) and value == default)
