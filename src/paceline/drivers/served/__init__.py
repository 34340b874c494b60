"""A cluster of real processes: a parameter server and its workers. Only this package knows sockets and TLS."""
