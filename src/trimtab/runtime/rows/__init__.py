"""Rows of one instance: physical experts, layout, exchange, expert compute."""
