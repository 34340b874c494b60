"""How every test runs: torch on one thread, and with as little time as can be for memory.

Tests run side by side, and small tensors make threads wait more than work.
"""

import gc
import os

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

# What a tester frees it keeps for its next tensor. By glibc's own settings each large tensor is mapped anew, and the
# kernel has to clear its pages: a sixth of the time of the tests of networks. A process reads this as it starts, so
# whoever starts the testers sets it; the processes that tests start have glibc's own settings, as a user's have.
KEEP_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=16777216"

settings.register_profile("paceline", deadline=None, derandomize=True)  # this machine is slow, and a test is no lottery
settings.load_profile("paceline")


def pytest_configure(config):
    """Set it where testers are started, and take it away again in each of them."""
    if not hasattr(config, "workerinput"):
        if config.getoption("numprocesses", None):
            os.environ.setdefault("GLIBC_TUNABLES", KEEP_MEMORY)
    elif os.environ.get("GLIBC_TUNABLES") == KEEP_MEMORY:
        del os.environ["GLIBC_TUNABLES"]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Let the garbage collector pass over what stays until the end: torch, thousands of tests and their modules."""
    gc.collect()
    gc.freeze()
