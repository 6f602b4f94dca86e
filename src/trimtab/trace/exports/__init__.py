"""Exports of traces to other formats, one file per format; `trimtab.trace.formats` reads all of them."""
