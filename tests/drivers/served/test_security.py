"""Who gets through: addresses, key files with something wrong, and real handshakes."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.served import keys
from paceline.drivers.served.keys import make_keys
from paceline.drivers.served.security import (
    check_exposed,
    is_loopback,
    join_address,
    parse_address,
    server_credentials,
    worker_credentials,
)

TIMEOUT_SECONDS = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """ours and theirs: two CAs; old: all of it expired."""
    root = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        make_keys(root / name)
    make_expired(root / "old")
    return root


def make_expired(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_now", lambda: datetime.now(UTC) - timedelta(days=30))
        make_keys(folder, days=1)


# -- handshakes ---------------------------------------------------------------------------------------------------


def raw_server(prefix, authority):
    """A server's credentials as someone makes them who does not check."""
    context = raw_client(authority, prefix, kind=ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def raw_client(authority, prefix=None, kind=ssl.PROTOCOL_TLS_CLIENT):
    """A client's credentials as someone makes them who does not check, or has no certificate."""
    context = ssl.SSLContext(kind)
    context.load_verify_locations(authority)
    if prefix is not None:
        context.load_cert_chain(prefix.with_suffix(".crt"), prefix.with_suffix(".key"))
    return context


@contextmanager
def serving(credentials):
    """A server that says who called; yields its port and the list of calls that came through."""
    calls, listener = [], socket.create_server(("127.0.0.1", 0))

    def answer(connection):
        connection.settimeout(TIMEOUT_SECONDS)
        with suppress(OSError), connection, credentials.wrap_socket(connection, server_side=True) as secure:
            calls.append(secure.recv(100))
            (name,) = (value for ((kind, value),) in secure.getpeercert()["subject"] if kind == "commonName")
            secure.sendall(name.encode())

    def accept():
        with suppress(OSError):
            while True:
                answer(listener.accept()[0])

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], calls
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(TIMEOUT_SECONDS)


def call(port, credentials, *, host="127.0.0.1", known_as=None):
    """Who the server takes us for; OSError if it does not listen to us."""
    with socket.create_connection((host, port), timeout=TIMEOUT_SECONDS) as plain:
        if credentials is not None:
            plain = credentials.wrap_socket(plain, server_hostname=known_as or host)
        with plain:
            plain.sendall(b"hello")
            if not (found := plain.recv(100)):
                raise ConnectionResetError("it hung up")
            return found


def refused(port, credentials, **options):
    """Why a call did not get through; fails if it did, or if only the time ran out."""
    with pytest.raises(OSError) as error:
        call(port, credentials, **options)
    assert not isinstance(error.value, TimeoutError), error.value
    return str(error.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_worker_gets_through_and_is_known_by_name(folders, host):
    with serving(server_credentials(folders / "ours/server")) as (port, calls):
        assert call(port, worker_credentials(str(folders / "ours/worker")), host=host) == b"paceline worker"
    assert calls == [b"hello"]


def test_a_client_that_is_not_a_worker_of_this_ca_is_refused(folders):
    ours = folders / "ours"
    strangers = {
        "no TLS at all": None,
        "no certificate": raw_client(ours / "ca.crt"),
        "another CA's worker": raw_client(ours / "ca.crt", folders / "theirs/worker"),
        "the server's own certificate": raw_client(ours / "ca.crt", ours / "server"),
        "the CA's own certificate": raw_client(ours / "ca.crt", ours / "ca"),
        "an expired worker": raw_client(ours / "ca.crt", folders / "old/worker"),
    }
    with serving(server_credentials(ours / "server")) as (port, calls):
        for credentials in strangers.values():
            refused(port, credentials)
        assert calls == []
        assert call(port, worker_credentials(ours / "worker")) == b"paceline worker"


@pytest.mark.parametrize("impostor", ["ours/worker", "theirs/server", "old/server"])
def test_a_server_that_is_not_the_server_of_this_ca_is_refused(folders, impostor):
    ours = folders / "ours"
    with serving(raw_server(folders / impostor, ours / "ca.crt")) as (port, calls):
        assert "CERTIFICATE_VERIFY_FAILED" in refused(port, worker_credentials(ours / "worker"))
    assert calls == []


def test_an_expired_pair_is_refused_by_the_other_side_under_a_ca_both_trust(folders, tmp_path):
    make_expired_sides(tmp_path)
    with serving(server_credentials(tmp_path / "server")) as (port, calls):
        refused(port, raw_client(tmp_path / "ca.crt", tmp_path / "past/worker"))
        assert calls == []
    with serving(raw_server(tmp_path / "past/server", tmp_path / "ca.crt")) as (port, calls):
        assert "CERTIFICATE_VERIFY_FAILED" in refused(port, worker_credentials(tmp_path / "worker"))
        assert calls == []


def make_expired_sides(folder):
    """A CA that is good; good sides in the folder and expired ones in folder/past."""
    past = folder / "past"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_now", lambda: datetime.now(UTC) - timedelta(days=30))
        make_keys(past)
        for name in ("server.crt", "server.key", "worker.crt", "worker.key"):
            (past / name).unlink()
        make_keys(past, days=1)
    for name in ("ca.crt", "ca.key"):
        shutil.copy(past / name, folder / name)
    make_keys(folder)


def test_a_server_is_refused_under_a_name_that_its_certificate_lacks(folders):
    with serving(server_credentials(folders / "ours/server")) as (port, calls):
        assert "not valid for" in refused(port, worker_credentials(folders / "ours/worker"), known_as="127.0.0.2")
    assert calls == []


# -- key files with something wrong -------------------------------------------------------------------------------


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of our keys, to be spoilt."""
    return shutil.copytree(folders / "ours", tmp_path / "keys")


def reason(read, tls):
    with pytest.raises(ValueError) as error:
        read(tls)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["worker.crt", "worker.key", "ca.crt"])
def test_a_file_that_is_missing_or_holds_something_else_is_named(folder, name):
    (folder / name).write_bytes(b"\xff\x00 nothing of the kind")
    kind = "private key" if name.endswith("key") else "certificate"
    assert f"{name} does not hold a {kind} in PEM form" in reason(worker_credentials, folder / "worker")
    (folder / name).unlink()
    assert f"{name} (No such file" in reason(worker_credentials, folder / "worker")
    (folder / name).mkdir()
    assert f"{name} (it is a folder, not a plain file" in reason(worker_credentials, folder / "worker")


def test_a_certificate_in_the_place_of_a_key_and_the_reverse_are_told(folder):
    shutil.copy(folder / "worker.crt", folder / "worker.key")
    assert "worker.key does not hold a private key" in reason(worker_credentials, folder / "worker")
    shutil.copy(folder / "server.key", folder / "server.crt")
    assert "server.crt does not hold a certificate" in reason(server_credentials, folder / "server")


def test_another_sides_key_is_told(folder):
    shutil.copy(folder / "server.key", folder / "worker.key")
    assert "worker.key is not the key of" in reason(worker_credentials, folder / "worker")


@pytest.mark.parametrize(("read", "side"), [(server_credentials, "server"), (worker_credentials, "worker")])
def test_another_ca_is_told(folders, folder, read, side):
    shutil.copy(folders / "theirs/ca.crt", folder / "ca.crt")
    assert f"{side}.crt is not signed by {folder / 'ca.crt'}" in reason(read, folder / side)


def test_a_ca_file_may_hold_several(folders, folder):
    both = (folders / "theirs/ca.crt").read_bytes() + (folder / "ca.crt").read_bytes()
    (folder / "ca.crt").write_bytes(both)
    with serving(server_credentials(folder / "server")) as (port, _):
        assert call(port, worker_credentials(folders / "ours/worker")) == b"paceline worker"


def test_the_other_roles_certificate_is_told_with_the_right_one(folder):
    assert f"worker.crt is not a certificate for a server: use {folder}/server" in reason(
        server_credentials, folder / "worker"
    )
    assert f"server.crt is not a certificate for a worker: use {folder}/worker" in reason(
        worker_credentials, folder / "server"
    )


def test_a_key_with_a_password_is_told(folder):
    key = load_pem_private_key((folder / "worker.key").read_bytes(), password=None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (folder / "worker.key").write_bytes(locked)
    assert "worker.key is locked with a password" in reason(worker_credentials, folder / "worker")


@pytest.mark.parametrize(("read", "side"), [(server_credentials, "server"), (worker_credentials, "worker")])
def test_an_expired_certificate_is_told_with_its_date(folders, read, side):
    day = datetime.now(UTC) - timedelta(days=29)
    days = [f"{day + timedelta(days=shift):%Y-%m-%d}" for shift in (-1, 0)]  # midnight may have passed since
    text = reason(read, folders / "old" / side)
    assert any(f"{side}.crt expired on {each}" in text for each in days)


def test_a_certificate_that_outlived_its_ca_is_told_with_the_cas_date(folders, tmp_path):
    folder = shutil.copytree(folders / "old", tmp_path / "keys")
    pem, key = (folder / "ca.crt").read_bytes(), load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    subject = x509.load_pem_x509_certificate((folder / "worker.crt").read_bytes())
    renewed = (
        x509.CertificateBuilder(subject.issuer, subject.subject, subject.public_key(), subject.serial_number)
        .not_valid_before(subject.not_valid_before_utc)
        .not_valid_after(datetime.now(UTC) + timedelta(days=10))
        .sign(key, SHA256())
    )
    (folder / "worker.crt").write_bytes(renewed.public_bytes(Encoding.PEM))
    expired = x509.load_pem_x509_certificate(pem).not_valid_after_utc
    assert f"ca.crt expired on {expired:%Y-%m-%d}: take another" in reason(worker_credentials, folder / "worker")


def test_a_certificate_of_the_future_asks_about_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_now", lambda: datetime.now(UTC) + timedelta(days=2))
    make_keys(tmp_path)
    assert "is the clock of this machine right?" in reason(worker_credentials, tmp_path / "worker")


@pytest.mark.parametrize("tls", ["", ".", "/"])
def test_a_prefix_without_a_name_is_told(tls):
    assert "as in keys/worker" in reason(worker_credentials, tls)


def test_the_ending_and_the_folder_are_not_the_prefix_and_that_is_said(folder):
    for mistaken in (folder / "worker.crt", folder):
        assert "keys are named without their ending, as in keys/worker" in reason(worker_credentials, mistaken)


def test_a_side_may_have_a_dot_in_its_name_and_a_home(folder, monkeypatch):
    for ending in ("crt", "key"):
        (folder / f"worker.{ending}").rename(folder / f"node.7.{ending}")
    monkeypatch.setenv("HOME", str(folder.parent))
    worker_credentials("~/keys/node.7")


# -- addresses ----------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]{1,5}){0,2}", fullmatch=True)
hosts = st.one_of(names, st.ip_addresses().map(str))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(host=hosts, port=st.integers(0, 65535))
def test_an_address_joined_and_parsed_is_the_same(host, port):
    assert parse_address(join_address(host, port)) == (host, port)


BAD_HOSTS = ["", ":", ":1", "1", "ps", "::1:1", "[::1]", "[]:1", "[10.0.0.7]:1", "[ps]:1", "http://ps:1", "10.0.300:1"]
BAD_PORTS = ["ps:", "ps:x", "ps:-1", "ps:65536", "ps:1.5", "ps: 1", "ps:1\n", "ps:\u0663", "ps:000001"]


@pytest.mark.parametrize("text", [*BAD_HOSTS, *BAD_PORTS], ids=ascii)
def test_a_bad_address_is_named_with_an_example(text):
    with pytest.raises(ValueError) as error:
        parse_address(text)
    assert repr(text) in str(error.value)
    assert "as in 10.0.0.7:29400" in str(error.value)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "::ffff:127.0.0.1", "localhost", "LocalHost.", "unix:/tmp/ps"]
)
def test_what_only_this_machine_reaches_needs_no_tls(host):
    assert is_loopback(host)
    check_exposed(host, tls=None, insecure=False)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "[::]", "", "*", "10.0.0.7", "128.0.0.1", "::ffff:10.0.0.7", "localhost.example.org", "127.1"],
)
def test_what_others_reach_needs_tls_or_a_word_of_trust(host):
    assert not is_loopback(host)
    with pytest.raises(
        ValueError, match=r"give --tls DIR/server, or give --insecure .* \(in Python: tls=\"DIR/server\""
    ):
        check_exposed(host, tls=None, insecure=False)
    check_exposed(host, tls="keys/server", insecure=False)
    check_exposed(host, tls=None, insecure=True)
