"""How do bytes become arrays and plain values? JSON, `.npy` and `.npz`, safetensors, pickles, torch files.

No byte of a file is trusted: sizes are held against what there is before memory is asked for, and nothing is run.
"""
