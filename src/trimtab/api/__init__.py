"""`trimtab.plan`, `trimtab.simulate` and `trimtab.analyze`: what the commands of these names compute, from Python."""
