"""The errors a user can meet. Every message reads "<where>: <what is>; expected <what>; <what to do>"."""

from __future__ import annotations


class Mxfp8Error(ValueError):
    """Base of every error this project raises for bad input; catch this one to catch them all."""

    def __init__(self, where: object, what: str = "", *, expected: str = "", advice: str = "") -> None:
        """Makes the message of its four parts.

        Args:
            where: file, node, tensor, option or function; or the whole message, if there are no other parts.
            what: what is wrong there.
            expected: what would be right.
            advice: what to do.
        """
        self.where, self.what, self.expected, self.advice = str(where), what, expected, advice
        parts = (f"{where}: {what}" if what else self.where, f"expected {expected}" if expected else "", advice)
        super().__init__("; ".join(filter(None, parts)))


class ShapeError(Mxfp8Error):
    """Shapes or dtypes of tensors do not fit together."""


class RecipeError(Mxfp8Error):
    """A recipe is malformed, contradicts itself, or does not fit the model it is applied to."""


class ContractError(Mxfp8Error):
    """A model or a node breaks a rule of its format: unreadable file, unknown opset, illegal attribute."""


class BackendError(Mxfp8Error):
    """A backend (native library, ONNX Runtime, CUDA) is missing or too old for what is asked of it."""
