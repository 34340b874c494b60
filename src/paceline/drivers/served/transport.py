"""gRPC's options for both sides, and what a process with large messages and many connections asks of its system."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from typing import Any

from paceline.drivers.served.messages import CHUNK_BYTES, MOST_HEADER_BYTES, MOST_WELCOME_BYTES, Sizes
from paceline.drivers.served.settings import Limits

METHOD = "/paceline.v1.Cluster/Work"
TOLD_BYTES = 2 * 1024 * 1024

_THROUGHPUT: list[tuple[str, Any]] = [
    ("grpc.optimization_target", "throughput"),
    ("grpc.http2.max_frame_size", 2**24 - 1),
    ("grpc.http2.lookahead_bytes", 2**24),
    ("grpc.max_metadata_size", 8192),
    ("grpc.enable_http_proxy", 0),  # a cluster's own network, whatever http_proxy says
]
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def server_options(sizes: Sizes, limits: Limits) -> list[tuple[str, Any]]:
    """Return gRPC's options for the server.

    gRPC ends a stream with too large a message without a word to either side; up to `TOLD_BYTES` more, the server says
    why.

    >>> dict(server_options(Sizes(most_payload_bytes=400, buffer_bytes=0), Limits()))["grpc.max_receive_message_length"]
    2163088
    """
    return [
        *_THROUGHPUT,
        ("grpc.max_receive_message_length", sizes.most_message_bytes + TOLD_BYTES),
        ("grpc.max_send_message_length", CHUNK_BYTES + MOST_WELCOME_BYTES + MOST_HEADER_BYTES),
        ("grpc.max_concurrent_streams", 4),
        ("grpc.keepalive_time_ms", round(limits.silence_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(limits.silence_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.max_connection_idle_ms", 30_000),
        ("grpc.server_handshake_timeout_ms", round(limits.hello_seconds * 1000)),
        ("grpc.so_reuseport", 0),
    ]


def worker_options(silence_seconds: float) -> list[tuple[str, Any]]:
    """Return gRPC's options for a worker."""
    return [
        *_THROUGHPUT,
        ("grpc.max_receive_message_length", CHUNK_BYTES + MOST_WELCOME_BYTES + MOST_HEADER_BYTES),
        ("grpc.max_send_message_length", CHUNK_BYTES + MOST_HEADER_BYTES),
        ("grpc.keepalive_time_ms", round(max(5.0, silence_seconds) * 1000)),
        ("grpc.keepalive_timeout_ms", round(max(5.0, silence_seconds) * 1000)),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, also right after a failed one
    ]


def keep_memory() -> None:
    """Let malloc keep the memory of messages for the next ones: a tenth to a fifth of a round of a large model."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**28)


def allow_many_files() -> None:
    """Take as many open files as the system allows: a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 65536
    if soft < min(wanted, 65536):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, 65536), hard))
