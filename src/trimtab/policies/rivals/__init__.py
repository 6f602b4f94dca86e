"""Balancers of other projects and papers, reimplemented for comparison."""
