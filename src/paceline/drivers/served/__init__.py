"""A cluster of real processes: a parameter server over gRPC and its workers. Only this package knows gRPC."""

import os

# gRPC writes a line of its own for every failed handshake; what matters is told by us. Read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
