"""What all tests have in common."""

import os

# Sessions check sampled weights as each micro-step begins; ranks inherit it.
os.environ.setdefault("TRIMTAB_VERIFY_WEIGHTS", "1")
