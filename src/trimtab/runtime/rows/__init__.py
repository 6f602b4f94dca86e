"""Rows of one instance: where each goes, their exchange, and the expert compute over them."""
