"""TransformerEngine's questions to a recipe, which its code asks in place of isinstance."""

from __future__ import annotations


class Kind:
    """A recipe that answers TransformerEngine's questions. A subclass overrides the ones that it answers with True."""

    def mxfp8(self) -> bool:
        """Returns whether weights and activations have E4M3 elements and E8M0 scales on blocks of 32."""
        return False

    def delayed(self) -> bool:
        """Returns whether scales follow from earlier steps (DelayedScaling)."""
        return False

    def float8_current_scaling(self) -> bool:
        """Returns whether a tensor has one scale, from its own values (Float8CurrentScaling)."""
        return False

    def float8_block_scaling(self) -> bool:
        """Returns whether 128 values, or 128 x 128 of a weight, share a scale (Float8BlockScaling)."""
        return False

    def nvfp4(self) -> bool:
        """Returns False: NVFP4 has no recipe here."""
        return False

    def custom(self) -> bool:
        """Returns False: there are no recipes with quantizers of the user."""
        return False

    def float8_per_tensor_scaling(self) -> bool:
        """Returns whether a tensor has one scale."""
        return self.delayed() or self.float8_current_scaling()

    def fp8(self) -> bool:
        """Returns whether elements are FP8 and scales float32."""
        return self.float8_per_tensor_scaling() or self.float8_block_scaling()

    def block_scaling(self) -> bool:
        """Returns whether blocks of a tensor have scales of their own."""
        return self.mxfp8() or self.float8_block_scaling()
