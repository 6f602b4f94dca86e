"""One file or folder a framework: where its experts and routers are, how its routing is recorded and replayed."""
