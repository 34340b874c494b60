"""Every test runs torch on one thread: tests run side by side, and small tensors make threads wait more than work."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start
