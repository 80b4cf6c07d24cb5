"""The layers of a recurrent module, one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.nn import GRU, LSTM, RNN, Dropout, Module, RNNBase

from backpack.custom_module.reduce_tuple import ReduceTuple


class RNNLayers(RNNBase):
    """A recurrent module with several layers, and a child for each of them.

    It has the parameters, attributes and methods of the original, under the original's names. Its
    children are called ``lstm_0, reduce_tuple_0, dropout_0, lstm_1, …`` (or ``rnn_0``, ``gru_0``;
    no dropout if the probability is zero). They are called one after the other by whoever has
    converted the module, share its parameters, and have no state of their own.
    """

    prefix: str

    @staticmethod
    def of(rnn: RNNBase) -> RNNLayers:
        """Create the module and its children from ``torch.nn.RNN``, ``LSTM`` or ``GRU``."""
        cls = LAYERS[type(rnn)]
        self: RNNLayers = cls.__new__(cls)
        for name, value in vars(rnn).items():
            if not name.startswith("_backpack"):
                vars(self)[name] = copy.copy(value)
        for hooks in (self._forward_hooks, self._forward_hooks_with_kwargs):
            hooks.clear()  # there are none but that of extend()
        for k in range(rnn.num_layers):
            self.add_module(f"{self.prefix}_{k}", _single_layer(rnn, k))
            if k + 1 < rnn.num_layers:
                self.add_module(f"reduce_tuple_{k}", ReduceTuple(0))
                if rnn.dropout > 0:
                    self.add_module(f"dropout_{k}", Dropout(rnn.dropout))
        for layer in self.layers():
            layer.register_forward_pre_hook(_read)
        self.own_layers()
        self.train(rnn.training)
        return self

    def path(self, k: int) -> list[str]:
        """Return the names of the children that lead from layer k to the input of the next."""
        names = [f"{self.prefix}_{k}", f"reduce_tuple_{k}", f"dropout_{k}"]
        return [name for name in names if name in self._modules]

    def layers(self) -> list[Any]:
        """Return the modules with one layer each, as far as they are there."""
        children = [self._modules.get(f"{self.prefix}_{k}") for k in range(self.num_layers)]
        return [layer for layer in children if layer is not None]

    def own_layers(self) -> None:
        """Let the layers read the parameters of this module."""
        for layer in self.layers():
            vars(layer)["_layers"] = (self,)  # in a tuple, lest it becomes a child
        self.share()

    def share(self) -> None:
        """Let the layers have the parameters that this module has now.

        Raises:
            RuntimeError: If one is no parameter any longer.
        """
        for k, layer in enumerate(self.layers()):
            own, shared = layer._parameters, self._parameters
            for name in own:
                original = name.replace("_l0", f"_l{k}")
                if original not in shared:
                    raise RuntimeError(
                        f"{original} of {type(self).__name__} is no parameter any longer, but the "
                        "layers have become modules that read it. Register parametrisations and "
                        "the like before extend(model, use_converter=True)."
                    )
                if own[name] is not shared[original]:
                    own[name] = shared[original]
                    layer._flat_weight_refs = []
            if not layer._flat_weight_refs:
                layer._init_flat_weights()

    def flatten_parameters(self) -> None:
        """Let the parameters of each layer lie one after the other in memory."""
        for layer in self.layers():
            layer.flatten_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        """Let the layers know new parameters."""
        super().__setattr__(name, value)
        if name in self._parameters:
            self.share()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        for layer in self.layers():
            layer._flat_weight_refs = []
        super()._apply(fn, recurse=False)  # the children have nothing else
        self.share()
        return self

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the state of the original."""
        state = super().state_dict(
            *args, destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        for child in self._modules:
            for key in [key for key in state if key.startswith(f"{prefix}{child}.")]:
                del state[key]
        return state

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for k, layer in enumerate(self.layers()):  # they have what they need
            for name, p in layer._parameters.items():
                state_dict[f"{prefix}{self.prefix}_{k}.{name}"] = p


class RNNLayersOfRNN(RNNLayers, RNN):
    """Layers of ``torch.nn.RNN``."""

    prefix = "rnn"


class RNNLayersOfLSTM(RNNLayers, LSTM):
    """Layers of ``torch.nn.LSTM``."""

    prefix = "lstm"


class RNNLayersOfGRU(RNNLayers, GRU):
    """Layers of ``torch.nn.GRU``."""

    prefix = "gru"


LAYERS: dict[type[RNNBase], type[RNNLayers]] = {
    RNN: RNNLayersOfRNN,
    LSTM: RNNLayersOfLSTM,
    GRU: RNNLayersOfGRU,
}


def _read(layer: Any, args: Any) -> None:
    """Take the parameters that the module with all layers has now."""
    (layers,) = layer._layers
    layers.share()


def _single_layer(rnn: Any, k: int) -> Module:
    width = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
    names = ["hidden_size", "bias", "batch_first", "bidirectional"]
    names += {RNN: ["nonlinearity"], LSTM: ["proj_size"], GRU: []}[type(rnn)]
    options = {name: getattr(rnn, name) for name in names}
    # no memory, no random numbers: the parameters are replaced
    return type(rnn)(rnn.input_size if k == 0 else width, device="meta", **options)
