"""Readers of arrays and plain values: JSON, `.npy` and `.npz`, safetensors, pickles, torch files.

Files are untrusted: sizes are checked against the file before memory is allocated, and no code is run.
"""
