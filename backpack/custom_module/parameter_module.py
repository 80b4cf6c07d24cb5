"""A parameter, a buffer or a constant as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

__all__ = ["ParameterModule"]


class ParameterModule(Module):
    """Returns a parameter or a buffer that belongs to another module.

    The tensor is looked up at each call. It stays registered at its owner, and nowhere else: this
    module has no parameters of its own, and nothing in the state dict.
    """

    def __init__(self, owner: Module, name: str):
        """Remember where the tensor is.

        Args:
            owner: Module with the tensor.
            name: Name of the attribute.
        """
        super().__init__()
        self._owner = (owner,)  # in a tuple, lest the owner becomes a child
        self.name = name

    @classmethod
    def of_constant(cls, value: Tensor) -> ParameterModule:
        """Create a module that owns a constant: it moves along, but is not in the state dict."""
        holder = Module()
        module = cls(holder, "value")
        module.register_buffer("value", value, persistent=False)
        module._owner = (module,)
        return module

    def move_to(self, old: Module, new: Module) -> None:
        """Change the owner, if it is the old one, to a successor with the same tensor."""
        if self.owner is old:
            self._owner = (new,)

    @property
    def owner(self) -> Module:
        """The module with the tensor."""
        return self._owner[0]

    @property
    def parameter(self) -> Tensor:
        """The tensor, a ``Parameter`` or not."""
        return getattr(self.owner, self.name)

    def forward(self) -> Tensor:
        """Return the tensor: a view of a parameter, whose use autograd then knows."""
        tensor = self.parameter
        return tensor.view_as(tensor) if tensor.requires_grad else tensor

    def extra_repr(self) -> str:
        """Return where the tensor is from."""
        return f"{self.name!r} of {type(self.owner).__name__}"
