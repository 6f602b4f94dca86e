"""Complete programs that use Trimtab. Nothing in the package, `benchmarks/` or `experiments/` imports them."""
