"""Faults planted in the ranks of a real vLLM engine, to show what is caught and who is blamed.

A fault is a mapping with ``kind`` and the fields of that kind; ``rank`` (default 0) is the one rank
that has it. torch is imported inside: the names are needed where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytest.errors import UsageError

KINDS: Mapping[str, frozenset[str]] = {
    # one bit of one element of a parameter: sign, exponent or mantissa, as its dtype has them
    "weight_bit_flip": frozenset({"rank", "parameter", "element", "bit"}),
    # `width` neighbouring elements of a module's output are multiplied by `value`, in every
    # `every`-th of its calls: a warp's stripe
    "activation_stripe": frozenset({"rank", "module", "element", "width", "value", "every"}),
    # one row of a module's output is NaN
    "nan_row": frozenset({"rank", "module", "row", "every"}),
}
# Norms stay what they are on every platform; matrices may be packed anew after loading.
_PARAMETER = "model.layers.0.post_attention_layernorm.weight"
_MODULE = "model.layers.0.mlp"


def check_fault(fault: Mapping[str, Any], where: str) -> None:
    """Refuse a fault that no rank can plant. Raises UsageError."""
    kind = fault.get("kind")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UsageError(f"{where}.fault: kind {kind!r} is not known to vLLM engines ({known})")
    unknown = sorted(set(fault) - KINDS[str(kind)] - {"kind"})
    if unknown:
        fields = ", ".join(sorted(KINDS[str(kind)]))
        raise UsageError(f"{where}.fault: {kind} has no {', '.join(unknown)}; it has {fields}")


def plant(model: Any, rank: int, fault: Mapping[str, Any]) -> str:
    """Plant ``fault`` in this rank's ``model``; what was done, '' on other ranks.

    Raises LookupError for a name that the model does not have.
    """
    if rank != int(fault.get("rank", 0)):
        return ""
    if fault["kind"] == "weight_bit_flip":
        return _flip(model, fault)
    name = str(fault.get("module", _MODULE))
    module = dict(model.named_modules())[name]
    module.register_forward_hook(_Disturbance(fault))
    return f"{fault['kind']} in {name}"


def _flip(model: Any, fault: Mapping[str, Any]) -> str:
    import torch

    name = str(fault.get("parameter", _PARAMETER))
    data = dict(model.named_parameters())[name].data
    integers = {2: torch.int16, 4: torch.int32}[data.element_size()]
    bits = data.view(-1).view(integers)
    element = int(fault.get("element", 0)) % bits.numel()
    bit = int(fault.get("bit", 8 * data.element_size() - 4))
    mask = 1 << bit
    # the sign bit's mask does not fit the signed type
    if bit == 8 * data.element_size() - 1:
        mask -= 1 << (bit + 1)
    bits[element] ^= mask
    return f"bit {bit} of element {element} of {name}"


class _Disturbance:
    """A forward hook that changes part of the output in place, every so many calls."""

    def __init__(self, fault: Mapping[str, Any]) -> None:
        self._fault, self._calls = fault, 0

    def __call__(self, _module: Any, _inputs: Any, output: Any) -> None:
        fault, tensor = self._fault, output[0] if isinstance(output, tuple) else output
        at_call, self._calls = self._calls, self._calls + 1
        if at_call % int(fault.get("every", 1)):
            return
        if fault["kind"] == "nan_row":
            row = int(fault.get("row", 0)) % tensor.shape[0]
            tensor[row] = float("nan")
        else:
            begin = int(fault.get("element", 0))
            tensor[..., begin : begin + int(fault.get("width", 32))] *= float(
                fault.get("value", 2.0)
            )
