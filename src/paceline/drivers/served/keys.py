"""Key files for TLS, and how they are made: a private CA, the server's certificate and the workers'.

    DIR/ca.crt      ca.key         signs the others; ca.key stays where it was made
    DIR/server.crt  server.key     may only serve
    DIR/worker.crt  worker.key     may only connect; worker-1, worker-2, ... where several are asked for

Everything is checked before anything is written, and nothing is ever overwritten. A worker is handed ca.crt,
worker.crt and worker.key, never ca.key: whoever has that can let others in.

Keys for one run alone need no folder. Whoever starts server and workers elsewhere (on Ray, in Slurm's job) makes them
in memory, and hands each side its own; the CA's key stays, always:

    who starts the run    ca.key  ca.crt  server.*  worker.*
                                    ├──> server:       ca.crt server.crt server.key
                                    └──> each worker:  ca.crt worker.crt worker.key

Python's TLS takes keys from files alone, so they are a file in memory (memfd) for the moment in which a context is made
of them: no disk has them, and a process that is killed leaves none behind. Only where there is no Linux it is a file of
the temporary folder, which nobody but its user can read; one that is killed in that moment leaves it there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from paceline.drivers.served.security import (
    PURPOSES,
    Host,
    KeyFileError,
    Role,
    held_credentials,
    pair_paths,
    parse_host,
    read_pair,
    read_side,
)

LONGEST_DAYS = 36500
MOST_WORKERS = 10_000
_CLOCK_DIFFERENCE = timedelta(hours=1)


def make_keys(directory: Path, *, hosts: Sequence[str] = (), workers: int = 1, days: int = 3650) -> list[Path]:
    """Make the key files that a folder lacks, and return those made.

    The server's certificate is good for this machine's names and for `hosts`. No certificate outlives its CA.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in make_keys(Path(folder), hosts=["ps.example.org"])]
    ...     make_keys(Path(folder))
    ['ca.key', 'ca.crt', 'server.key', 'server.crt', 'worker.key', 'worker.crt']
    []
    """
    if not 1 <= days <= LONGEST_DAYS:
        raise KeyFileError(f"days is {days}: give 1 to {LONGEST_DAYS}")
    directory, sides, asked = Path(directory).expanduser(), _sides(workers), _asked_hosts(hosts)
    missing = [side for side in sides if not _is_there(directory / side)]
    authority = _existing_authority(directory)
    for side in sides:
        if side not in missing:
            _check_kept(directory / side, asked, authority)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = []
        if authority is None:
            authority = _new_authority(timedelta(days=days))
            made += _write_pair(directory / "ca", authority.certificate, authority.key)
        for side in missing:
            key = ec.generate_private_key(ec.SECP256R1())
            names = [*_own_hosts(), *asked] if _role(side) == "server" else []
            made += _write_pair(directory / side, _issue(authority, key, side, names, timedelta(days=days)), key)
    except OSError as error:
        raise KeyFileError(f"cannot make keys in {directory}: {error.strerror}: {error.filename}") from error
    return made


def key_files(directory: Path, *, workers: int = 1) -> list[Path]:
    """Return every file of a complete folder; those that `make_keys` does not return were there before.

    >>> [path.name for path in key_files(Path("keys"), workers=2)][4:]
    ['worker.key', 'worker.crt', 'worker-1.key', 'worker-1.crt']
    """
    folder = Path(directory).expanduser()
    return [path for side in ("ca", *_sides(workers)) for path in reversed(pair_paths(folder / side))]


# -- keys of one run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SideKeys:
    """The key files of one side of TLS, by name, as texts; they are never printed.

    >>> SideKeys(side="worker", files={"worker.key": "secret"})
    SideKeys(side='worker')
    """

    side: Role
    files: Mapping[str, str] = field(repr=False)

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of these keys, which touch no disk."""
        return held_credentials(self.files, self.side)


class RunAuthority:
    """The CA of one run, in memory: its own key is on no disk, and gone with this object.

    A server that is started again elsewhere gets a new certificate of the same CA.

    >>> authority = RunAuthority()
    >>> sorted(authority.server_keys("10.0.0.7").files), sorted(authority.worker_keys().files)
    (['ca.crt', 'server.crt', 'server.key'], ['ca.crt', 'worker.crt', 'worker.key'])
    """

    def __init__(self, *, days: int = 365) -> None:
        self._lifetime = timedelta(days=days)
        self._authority = _new_authority(self._lifetime)
        self._worker = self._keys("worker", [])

    def server_keys(self, host: str) -> SideKeys:
        """Return keys for a server at this host, by which workers know it."""
        return self._keys("server", [*_own_hosts(), *_asked_hosts([host])])

    def worker_keys(self) -> SideKeys:
        """Return the keys of workers; one certificate is good for all of them."""
        return self._worker

    def _keys(self, side: Role, hosts: Sequence[Host]) -> SideKeys:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _issue(self._authority, key, side, hosts, self._lifetime)
        texts = {
            "ca.crt": _certificate_text(self._authority.certificate),
            f"{side}.crt": _certificate_text(certificate),
            f"{side}.key": _key_text(key),
        }
        return SideKeys(side=side, files={name: text.decode("ascii") for name, text in texts.items()})


# -- the parts of keys ----------------------------------------------------------------------------------------------


def _sides(workers: int) -> list[str]:
    if not 1 <= workers <= MOST_WORKERS:
        raise KeyFileError(f"workers is {workers}: give 1 to {MOST_WORKERS:,}")
    return ["server", "worker", *(f"worker-{number}" for number in range(1, workers))]


def _role(side: str) -> Role:
    return "server" if side == "server" else "worker"


def _asked_hosts(hosts: Sequence[str]) -> list[Host]:
    if isinstance(hosts, str):
        raise KeyFileError(f"hosts is the text {hosts!r}: give a list, as in [{hosts!r}]")
    parsed = [parse_host(text) for text in hosts]
    for host in parsed:
        if not isinstance(host, str) and host.is_unspecified:
            raise KeyFileError(f"{host} is where a server listens: give the host that workers connect to")
        if isinstance(host, ipaddress.IPv6Address) and host.scope_id:
            raise KeyFileError(f"{host} names a network card of one machine: give it without %{host.scope_id}")
    return parsed


def _own_hosts() -> list[Host]:
    hosts: list[Host] = ["localhost", ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    with contextlib.suppress(ValueError):  # a machine may be called anything; such a name cannot be connected to
        hosts.append(parse_host(socket.gethostname()))
    return hosts


# -- keys that exist ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def _is_there(prefix: Path) -> bool:
    there = [path for path in pair_paths(prefix) if os.path.lexists(path)]
    if len(there) == 1:
        lacking = next(path.name for path in pair_paths(prefix) if path not in there)
        remedy = "make new keys in another folder" if prefix.name == "ca" else f"delete {there[0].name} and run again"
        raise KeyFileError(f"{prefix.parent} has {there[0].name} but no {lacking}: bring {lacking} back, or {remedy}")
    return bool(there)


def _existing_authority(directory: Path) -> _Authority | None:
    if not _is_there(directory / "ca"):
        return None
    pair = read_pair(directory / "ca")
    extensions = pair.certificate.extensions
    try:
        may_sign = extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        may_sign = False
    if not may_sign or not isinstance(pair.key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise KeyFileError(f"{directory / 'ca.crt'} is not a CA with an EC or RSA key: make new keys in another folder")
    return _Authority(certificate=pair.certificate, key=pair.key)


def _check_kept(prefix: Path, asked: Sequence[Host], authority: _Authority | None) -> None:
    if authority is None:
        raise KeyFileError(f"{prefix.parent} has {prefix.name}.crt but no ca.crt: make new keys in another folder")
    pair, _ = read_side(prefix, role=_role(prefix.name))
    if prefix.name != "server" or not asked:
        return
    try:
        names = pair.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    known = {*names.get_values_for_type(x509.DNSName), *names.get_values_for_type(x509.IPAddress)}
    if lacking := [str(host) for host in asked if host not in known]:
        raise KeyFileError(
            f"{prefix}.crt is not for {', '.join(lacking)}: delete {prefix}.crt and {prefix}.key and run again with "
            "every host"
        )


# -- new keys ----------------------------------------------------------------------------------------------------


def _new_authority(lifetime: timedelta) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two CAs of one name look alike in every error message.
    name = _common_name(f"paceline CA {secrets.token_hex(4)}")
    builder = (
        _builder(name, name, key, _now() + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    return _Authority(certificate=builder.sign(key, hashes.SHA256()), key=key)


def _issue(
    authority: _Authority, key: ec.EllipticCurvePrivateKey, side: str, hosts: Sequence[Host], lifetime: timedelta
) -> x509.Certificate:
    issuer = authority.certificate
    end = min(_now() + lifetime, issuer.not_valid_after_utc)
    builder = (
        _builder(_common_name(f"paceline {side}"), issuer.subject, key, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([PURPOSES[_role(side)]]), critical=False)
        .add_extension(_issuer_identifier(issuer), critical=False)
    )
    if hosts:
        names = [x509.DNSName(host) if isinstance(host, str) else x509.IPAddress(host) for host in dict.fromkeys(hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_DIFFERENCE)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _issuer_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(**allowed: bool) -> x509.KeyUsage:
    first = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    others = ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{use: allowed.get(use, False) for use in (*first, *others)})


def _now() -> datetime:
    return datetime.now(UTC)


def _write_pair(
    prefix: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
) -> list[Path]:
    path, key_path = pair_paths(prefix)
    pair = ((key_path, _key_text(key), 0o600), (path, _certificate_text(certificate), 0o644))
    for each, content, mode in pair:
        with os.fdopen(os.open(each, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as sink:
            sink.write(content)
    return [key_path, path]


def _key_text(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    bare = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, bare)


def _certificate_text(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
