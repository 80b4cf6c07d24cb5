"""The layers of a recurrent module, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import GRU, LSTM, RNN, Dropout, Module, RNNBase

from backpack.custom_module.reduce_tuple import ReduceTuple

PREFIXES: dict[type[RNNBase], str] = {RNN: "rnn", LSTM: "lstm", GRU: "gru"}


class RNNLayers(Module):
    """Holds modules with one layer each that share the parameters of one with several layers.

    Its children are called ``lstm_0, reduce_tuple_0, dropout_0, lstm_1, …`` (or ``rnn_0``,
    ``gru_0``; no dropout if the probability is zero). They are called one after the other by
    whoever has converted the module; this one is a container only. The state dict has the names of
    the original.
    """

    def __init__(self, rnn: RNNBase):
        """Create the modules.

        Args:
            rnn: ``torch.nn.RNN``, ``LSTM`` or ``GRU`` with any number of layers.
        """
        super().__init__()
        self.prefix = PREFIXES[type(rnn)]
        self.num_layers = rnn.num_layers
        for k in range(rnn.num_layers):
            self.add_module(f"{self.prefix}_{k}", _single_layer(rnn, k))
            if k + 1 < rnn.num_layers:
                self.add_module(f"reduce_tuple_{k}", ReduceTuple(0))
                if rnn.dropout > 0:
                    self.add_module(f"dropout_{k}", Dropout(rnn.dropout))
        self.train(rnn.training)

    def path(self, k: int) -> list[str]:
        """Return the names of the modules that lead from layer k to the input of the next.

        Args:
            k: Number of the layer.

        Returns:
            Names of children, the layer first.
        """
        names = [f"{self.prefix}_{k}", f"reduce_tuple_{k}", f"dropout_{k}"]
        return [name for name in names if name in self._modules]

    def _names(self) -> Iterator[tuple[str, str]]:
        """Yield names of parameters here and in the original."""
        for k in range(self.num_layers):
            layer = f"{self.prefix}_{k}"
            for name, _ in self.get_submodule(layer).named_parameters():
                yield f"{layer}.{name}", name.replace("_l0", f"_l{k}")

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the state under the original's names."""
        state = super().state_dict(
            *args, destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        for here, original in self._names():
            if prefix + here in state:
                state[prefix + original] = state.pop(prefix + here)
        return state

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for here, original in self._names():
            if prefix + original in state_dict:
                state_dict[prefix + here] = state_dict.pop(prefix + original)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _single_layer(rnn: Any, k: int) -> Module:
    directions = 2 if rnn.bidirectional else 1
    width = (rnn.proj_size or rnn.hidden_size) * directions
    options: dict[str, Any] = {"nonlinearity": rnn.nonlinearity} if isinstance(rnn, RNN) else {}
    if isinstance(rnn, LSTM):
        options["proj_size"] = rnn.proj_size
    layer = type(rnn)(
        rnn.input_size if k == 0 else width,
        rnn.hidden_size,
        bias=rnn.bias,
        batch_first=rnn.batch_first,
        bidirectional=rnn.bidirectional,
        device="meta",  # no memory, no random numbers: the parameters are replaced
        **options,
    )
    for name, _ in list(layer.named_parameters()):
        setattr(layer, name, getattr(rnn, name.replace("_l0", f"_l{k}")))
    return layer
