"""The figures that the README quotes. Each is a command under `trimtab bench`."""
