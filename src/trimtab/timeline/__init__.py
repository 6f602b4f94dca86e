"""The timeline: when each rank of an expert-parallel group does what, in passes over the layers."""
