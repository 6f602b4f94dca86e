"""The ranks of a session: process groups, checks that they make the same calls, recordings of their activities."""
