"""A cluster of real processes: a parameter server over gRPC and its workers. Only this package knows gRPC."""
