"""The public door of the converter: see ``backpack.convert.graph``."""

from backpack.convert.graph import convert_module_to_backpack
from backpack.convert.tracing import BackpackTracer, ConversionError

__all__ = ["BackpackTracer", "ConversionError", "convert_module_to_backpack"]
