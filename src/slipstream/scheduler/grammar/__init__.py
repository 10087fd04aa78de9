"""Grammars: compiled, advanced and filled into masks beside the device."""
