"""Every test runs torch on one thread: tests run side by side, and small tensors make threads wait more than work."""

import os

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

settings.register_profile("paceline", deadline=None, derandomize=True)  # this machine is slow, and a test is no lottery
settings.load_profile("paceline")
