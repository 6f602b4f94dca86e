"""Readers of other frameworks' routing dumps, one file per framework, and the conversion of their records.

A reader takes a file and model facts, and yields `Record`s while reading.
"""
