"""Readers of arrays and plain values: JSON, `.npy` and `.npz`, safetensors, pickles, torch files.

Files are untrusted: no code of theirs is run. Memory and time are limited by `formats/bounded_import.py`.
"""
