"""quantize_(): packs the weights of a module in place, without an export."""
