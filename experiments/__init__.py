"""Published figures reproduced, and the simulator compared with measured steps. Not part of the package."""
