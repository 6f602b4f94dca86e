"""Show it: terminal tables of traces and plans."""
