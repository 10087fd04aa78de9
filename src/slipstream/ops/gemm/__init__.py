"""Products with weights: plain, quantised, low-bit, of experts and of adapters."""
