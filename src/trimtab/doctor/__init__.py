"""Checks of `trimtab doctor`."""
