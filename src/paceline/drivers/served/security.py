"""Addresses, and TLS in which both sides show a certificate of the same CA.

    tls="keys/worker"  ->  keys/worker.crt  keys/worker.key  and the keys/ca.crt beside them

With a bad key file a connection just never comes up, so the files are checked here, where the reason is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID as Purpose

from paceline.errors import PacelineError
from paceline.files import read_plain

Host = str | ipaddress.IPv4Address | ipaddress.IPv6Address
Role = Literal["server", "worker"]
Tls = str | Path | ssl.SSLContext
"""A side's keys: their path without an ending, or the context that was made of them."""

PURPOSES: dict[Role, x509.ObjectIdentifier] = {"server": Purpose.SERVER_AUTH, "worker": Purpose.CLIENT_AUTH}
MOST_KEY_BYTES = 1_000_000  # a bundle of several hundred certificates
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE | re.ASCII)


class AddressError(PacelineError, ValueError):
    """A host or an address that cannot be, or that is not safe to listen on."""


class KeyFileError(PacelineError, ValueError):
    """A certificate or key that cannot be read, made or used, with the remedy."""


def server_credentials(tls: Tls) -> ssl.SSLContext:
    """Return a server's side of TLS: it lets in workers with a certificate of its own CA, and nobody else.

    A context that was made before is returned as it is: its key files need not be there any more.

    >>> server_credentials("nowhere/server")
    Traceback (most recent call last):
    paceline.drivers.served.security.KeyFileError: cannot read nowhere/server.crt (No such file or directory): ...
    """
    return tls if isinstance(tls, ssl.SSLContext) else _context_of_files(tls, "server")


def worker_credentials(tls: Tls) -> ssl.SSLContext:
    """Return a worker's side of TLS: it trusts the server of its own CA, and no other.

    A context that was made before is returned as it is: its key files need not be there any more.

    >>> worker_credentials("nowhere/worker")
    Traceback (most recent call last):
    paceline.drivers.served.security.KeyFileError: cannot read nowhere/worker.crt (No such file or directory): ...
    """
    return tls if isinstance(tls, ssl.SSLContext) else _context_of_files(tls, "worker")


def held_credentials(files: Mapping[str, str], role: Role) -> ssl.SSLContext:
    """Return a side of TLS from the texts of its key files, by name; they are checked as files are.

    >>> held_credentials({}, "worker")
    Traceback (most recent call last):
    paceline.drivers.served.security.KeyFileError: worker.crt is not among the keys that were handed over
    """

    def read(path: Path) -> bytes:
        if path.name not in files:
            raise KeyFileError(f"{path.name} is not among the keys that were handed over")
        return files[path.name].encode()

    pair, authority = read_side(role, role=role, read=read)
    with _as_file(pair.pem + b"\n" + pair.key_pem) as path:
        return _context(role, authority, path)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[Path]:
    """Give content the path of a file: one in memory, which goes with the process, or a private one without Linux."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("paceline-keys", os.MFD_CLOEXEC), "wb") as file:
            file.write(content)
            file.flush()
            yield Path(f"/proc/self/fd/{file.fileno()}")
    else:
        with tempfile.NamedTemporaryFile(prefix="paceline-keys-") as file:  # of mode 0600
            file.write(content)
            file.flush()
            yield Path(file.name)


def _context_of_files(tls: str | Path, role: Role) -> ssl.SSLContext:
    _, authority = read_side(tls, role=role)
    return _context(role, authority, *pair_paths(Path(tls).expanduser()))


def _context(role: Role, authority: bytes, path: Path, key_path: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == "server" else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
    try:
        context.load_cert_chain(path, key_path)
    except (OSError, ssl.SSLError) as error:
        both = f"{path} and {key_path}" if key_path else f"the keys of a {role}"
        raise KeyFileError(f"cannot use {both}: {error}") from error
    return context


# -- addresses ----------------------------------------------------------------------------------------------------


def parse_host(text: str) -> Host:
    """Return a host name in small letters, or an IP address.

    >>> parse_host("PS.example.org"), parse_host("10.0.0.7")
    ('ps.example.org', IPv4Address('10.0.0.7'))
    >>> parse_host("10.0.0")
    Traceback (most recent call last):
    paceline.drivers.served.security.AddressError: '10.0.0' is not a host: give a name or an IP address, as in
    ps.example.org or 10.0.0.7
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text)
    labels = text.removesuffix(".").split(".")
    # A name that ends in a number is an address with a mistake in it, never a name.
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise AddressError(f"{text!r} is not a host: give a name or an IP address, as in ps.example.org or 10.0.0.7")
    return text.removesuffix(".").lower()


def parse_address(text: str) -> tuple[str, int]:
    """Split HOST:PORT into a host without brackets and a port; port 0 lets the system choose.

    >>> parse_address("10.0.0.7:29400"), parse_address("[::1]:0")
    (('10.0.0.7', 29400), ('::1', 0))
    >>> parse_address(":29400")
    Traceback (most recent call last):
    paceline.drivers.served.security.AddressError: ':29400' is not an address: give HOST:PORT, as in 10.0.0.7:29400 or
    [::1]:29400
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        parsed = parse_host(host[1:-1] if bracketed else host)
    except ValueError:
        parsed = ""
    if not colon or parsed == "" or bracketed != isinstance(parsed, ipaddress.IPv6Address):
        raise AddressError(f"{text!r} is not an address: give HOST:PORT, as in 10.0.0.7:29400 or [::1]:29400")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise AddressError(f"{text!r} has the port {port!r}: give 0 to 65535, as in 10.0.0.7:29400")
    return str(parsed), int(port)


def join_address(host: str, port: int) -> str:
    """Join what `parse_address` splits, as it is written.

    >>> join_address("::1", 29400), join_address("localhost", 29400)
    ('[::1]:29400', 'localhost:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "unix:/tmp/ps", "0.0.0.0", "ps")]
    [True, True, True, True, False, False]
    """
    if host.startswith("unix:"):
        return True
    try:
        parsed = parse_host(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    if isinstance(parsed, str):
        return parsed == "localhost"
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def check_exposed(host: str, *, tls: Tls | None, insecure: bool, open: bool = False) -> None:
    """Refuse to listen to a network without TLS, unless the user says that the network is trusted.

    `open` lets in every user of this machine, and contradicts keys.

    >>> check_exposed("127.0.0.1", tls=None, insecure=False)
    >>> check_exposed("0.0.0.0", tls=None, insecure=False)
    Traceback (most recent call last):
    paceline.drivers.served.security.AddressError: 0.0.0.0 can be reached from other machines, by anyone: run `paceline
    keys DIR` and give --tls DIR/server, or give --insecure if the network is trusted (in Python: tls="DIR/server",
    insecure=True)
    """
    if tls is None and not insecure and not is_loopback(host):
        raise AddressError(
            f"{host or 'an empty host'} can be reached from other machines, by anyone: run `paceline keys DIR` and "
            "give --tls DIR/server, or give --insecure if the network is trusted "
            '(in Python: tls="DIR/server", insecure=True)'
        )
    if tls is not None and open:
        raise AddressError("with keys a certificate says who may join: leave --open out (in Python: open=)")


# -- key files ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A certificate and its key: the files as TLS takes them, and what they hold. Keys are never printed.

    >>> [each.name for each in dataclasses.fields(Pair) if each.repr]
    ['pem', 'certificate']
    """

    pem: bytes
    key_pem: bytes = dataclasses.field(repr=False)
    certificate: x509.Certificate
    key: PrivateKeyTypes = dataclasses.field(repr=False)


def pair_paths(prefix: Path) -> tuple[Path, Path]:
    """Return the paths of a certificate and its key.

    >>> [path.as_posix() for path in pair_paths(Path("keys/node.7"))]
    ['keys/node.7.crt', 'keys/node.7.key']
    """
    return prefix.parent / f"{prefix.name}.crt", prefix.parent / f"{prefix.name}.key"


def read_pair(prefix: Path, *, read: Callable[[Path], bytes] | None = None) -> Pair:
    """Read a certificate and its key; they must belong together, and today must be one of their days.

    `read` returns what a path holds: that of a plain file, unless keys are somewhere else.

    >>> read_pair(Path("nowhere/ca"))
    Traceback (most recent call last):
    paceline.drivers.served.security.KeyFileError: cannot read nowhere/ca.crt (No such file or directory): keys are
    named without their ending, as in
    keys/worker for keys/worker.crt and keys/worker.key, with keys/ca.crt beside them
    """
    path, key_path = pair_paths(prefix)
    read = read or _read
    pem, key_pem = read(path), read(key_path)
    certificate = _certificates(path, pem)[0]
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except TypeError:
        raise KeyFileError(f"{key_path} is locked with a password: give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError(f"{key_path} does not hold a private key in PEM form") from None
    try:
        belongs = key.public_key() == certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError(f"{path} has a key of no kind that is known here") from None
    if not belongs:
        raise KeyFileError(f"{key_path} is not the key of {path}: copy both from where they were made")
    _check_dates(path, certificate)
    return Pair(pem=pem, key_pem=key_pem, certificate=certificate, key=key)


def read_side(tls: str | Path, *, role: Role, read: Callable[[Path], bytes] | None = None) -> tuple[Pair, bytes]:
    """Read and check what one side needs: its pair, and the certificate of the CA beside it.

    >>> read_side("", role="worker")
    Traceback (most recent call last):
    paceline.drivers.served.security.KeyFileError: tls is '': give a path without its ending, as in keys/worker
    """
    prefix = Path(tls).expanduser()
    if not prefix.name:
        raise KeyFileError(f"tls is {str(tls)!r}: give a path without its ending, as in keys/{role}")
    pair, path, authority_path = read_pair(prefix, read=read), pair_paths(prefix)[0], prefix.parent / "ca.crt"
    authority = (read or _read)(authority_path)
    issuers = [each for each in _certificates(authority_path, authority) if _signed_by(pair.certificate, each)]
    if not issuers:
        raise KeyFileError(f"{path} is not signed by {authority_path}: copy both from where they were made")
    if issuers[0].issuer == issuers[0].subject and not _signed_by(issuers[0], issuers[0]):
        raise KeyFileError(f"{authority_path} is not as it was made (its own signature differs): copy it once more")
    _check_dates(authority_path, issuers[0])
    with contextlib.suppress(x509.ExtensionNotFound):  # without the extension, a certificate is for everything
        usage = pair.certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        if PURPOSES[role] not in usage:
            raise KeyFileError(f"{path} is not a certificate for a {role}: use {prefix.parent / role}")
    return pair, authority


def _read(path: Path) -> bytes:
    try:
        return read_plain(path, most_bytes=MOST_KEY_BYTES)
    except OSError as error:
        raise KeyFileError(
            f"cannot read {path} ({error.strerror}): keys are named without their ending, as in keys/worker for "
            "keys/worker.crt and keys/worker.key, with keys/ca.crt beside them"
        ) from error


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise KeyFileError(f"{path} does not hold a certificate in PEM form") from None


def _check_dates(path: Path, certificate: x509.Certificate) -> None:
    now, begin, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        remedy = "take another folder" if path.name == "ca.crt" else "delete it and its key"
        raise KeyFileError(f"{path} expired on {end:%Y-%m-%d}: {remedy} and run `paceline keys DIR`")
    if now < begin:
        raise KeyFileError(f"{path} is valid from {begin:%Y-%m-%d %H:%M} UTC on: is the clock of this machine right?")


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
