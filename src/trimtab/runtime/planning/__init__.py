"""What ranks know of a step before it runs: checked traces, counts, and replicas that are planned meanwhile."""
