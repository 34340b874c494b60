"""Key files: what they say, who may read them, and that running again never takes anything away."""

from __future__ import annotations

import os
import socket
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from paceline.drivers.served import keys
from paceline.drivers.served.keys import key_files, make_keys
from paceline.drivers.served.security import server_credentials, worker_credentials

SIDES = ("ca", "server", "worker")
BAD_NAMES = [
    "",
    " ",
    "a b",
    "ps:29400",
    "http://ps",
    "a..b",
    ".",
    "-ps",
    "ps-",
    "*",
    "pl\u00e4tz",
    "\u212a",
    "x" * 64,
    "ps\n",
]
BAD_ADDRESSES = ["10.0.0", "10.0.0.300", "10.0.0.0/8", "[::1]", "0.0.0.0", "::", "fe80::1%eth0"]


def certificate(folder, side):
    return x509.load_pem_x509_certificate((folder / f"{side}.crt").read_bytes())


def extension(folder, side, kind):
    return certificate(folder, side).extensions.get_extension_for_class(kind).value


def names(folder):
    alternative = extension(folder, "server", x509.SubjectAlternativeName)
    addresses = alternative.get_values_for_type(x509.IPAddress)
    return {*alternative.get_values_for_type(x509.DNSName), *map(str, addresses)}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def made_long_ago(monkeypatch, folder, *, days_ago=30, **options):
    """Keys as they would have been made in the past."""
    with monkeypatch.context() as patch:
        patch.setattr(keys, "_now", lambda: datetime.now(UTC) - timedelta(days=days_ago))
        return make_keys(folder, **options)


# -- what is made -------------------------------------------------------------------------------------------------


def test_the_files_made_are_the_files_named_and_each_key_is_its_certificates(tmp_path):
    made = make_keys(tmp_path, workers=3)
    assert made == key_files(tmp_path, workers=3)
    assert sorted(made) == sorted(tmp_path.iterdir())
    for side in (*SIDES, "worker-1", "worker-2"):
        key = load_pem_private_key((tmp_path / f"{side}.key").read_bytes(), password=None)
        assert key.public_key() == certificate(tmp_path, side).public_key()
    assert len({certificate(tmp_path, side).serial_number for side in (*SIDES, "worker-1", "worker-2")}) == 5


def test_keys_can_be_read_by_their_owner_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_keys(tmp_path / "new" / "keys")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "keys").iterdir()}
    assert modes == {f"{s}.key": 0o600 for s in SIDES} | {f"{s}.crt": 0o644 for s in SIDES}
    assert stat.S_IMODE((tmp_path / "new" / "keys").stat().st_mode) == 0o700


def test_a_key_is_never_readable_not_even_while_it_is_written(tmp_path, monkeypatch):
    opened = {}
    real = os.open

    def recording(path, flags, mode=0o777, **rest):
        opened[os.path.basename(path)] = (flags & os.O_EXCL, mode)
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(keys.os, "open", recording)
    make_keys(tmp_path)
    assert {opened[f"{side}.key"] for side in SIDES} == {(os.O_EXCL, 0o600)}


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    (tmp_path / "keys").mkdir(mode=0o755)
    before = (tmp_path / "keys").stat().st_mode
    make_keys(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode == before


def test_the_server_is_known_by_this_machines_names_and_by_those_asked_for(tmp_path):
    make_keys(tmp_path, hosts=["PS.example.org", "param_server", "10.0.0.7", "fd00::7", "localhost"])
    ours = {"localhost", "127.0.0.1", "::1", socket.gethostname().lower()}
    assert names(tmp_path) == ours | {"ps.example.org", "param_server", "10.0.0.7", "fd00::7"}
    assert len(names(tmp_path)) == len(list(extension(tmp_path, "server", x509.SubjectAlternativeName)))


def test_a_machine_with_an_impossible_name_still_gets_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(keys.socket, "gethostname", lambda: "my machine!")
    make_keys(tmp_path)
    assert names(tmp_path) == {"localhost", "127.0.0.1", "::1"}


def test_a_certificate_is_for_its_purpose_and_for_nothing_else(tmp_path):
    make_keys(tmp_path)
    usages = {side: list(extension(tmp_path, side, x509.ExtendedKeyUsage)) for side in ("server", "worker")}
    assert usages == {"server": [ExtendedKeyUsageOID.SERVER_AUTH], "worker": [ExtendedKeyUsageOID.CLIENT_AUTH]}
    for side in SIDES:
        usage, limits = extension(tmp_path, side, x509.KeyUsage), extension(tmp_path, side, x509.BasicConstraints)
        assert usage.key_cert_sign == limits.ca == (side == "ca")
        assert usage.digital_signature == (side != "ca")


def test_every_certificate_leads_to_the_ca(tmp_path):
    make_keys(tmp_path)
    authority = certificate(tmp_path, "ca")
    for side in SIDES:
        certificate(tmp_path, side).verify_directly_issued_by(authority)
        identifier = extension(tmp_path, side, x509.AuthorityKeyIdentifier).key_identifier
        assert identifier == extension(tmp_path, "ca", x509.SubjectKeyIdentifier).digest


def test_clocks_may_differ_by_an_hour_and_no_certificate_outlives_its_ca(tmp_path):
    start = datetime.now(UTC)
    make_keys(tmp_path, days=10)
    make_keys(tmp_path, days=3000, workers=2)
    end = certificate(tmp_path, "ca").not_valid_after_utc
    assert end - start < timedelta(days=10, minutes=1)
    for side in (*SIDES, "worker-1"):
        assert certificate(tmp_path, side).not_valid_before_utc <= datetime.now(UTC) - timedelta(hours=1)
        assert certificate(tmp_path, side).not_valid_after_utc <= end


# -- running again ------------------------------------------------------------------------------------------------


def test_running_again_changes_nothing_and_adds_only_what_is_missing(tmp_path):
    make_keys(tmp_path, hosts=["10.0.0.7"])
    before = contents(tmp_path)
    assert make_keys(tmp_path, hosts=["10.0.0.7", "localhost"]) == []
    assert contents(tmp_path) == before
    added = make_keys(tmp_path, workers=2)
    assert [path.name for path in added] == ["worker-1.key", "worker-1.crt"]
    assert contents(tmp_path).items() >= before.items()
    worker_credentials(tmp_path / "worker-1")


def test_a_deleted_pair_is_made_again_under_the_same_ca(tmp_path):
    make_keys(tmp_path)
    for ending in ("crt", "key"):
        (tmp_path / f"server.{ending}").unlink()
    made = make_keys(tmp_path, hosts=["ps.example.org"])
    assert [path.name for path in made] == ["server.key", "server.crt"]
    assert "ps.example.org" in names(tmp_path)
    server_credentials(tmp_path / "server")


def test_hosts_that_the_server_lacks_are_told_with_the_remedy_and_nothing_is_made(tmp_path):
    make_keys(tmp_path, hosts=["10.0.0.7"])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"server\.crt is not for 10\.0\.0\.8, ps: delete .*server\.key and run again"):
        make_keys(tmp_path, hosts=["10.0.0.7", "10.0.0.8", "ps"], workers=2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("gone", "because"),
    [
        (["ca.key"], "has ca.crt but no ca.key: bring ca.key back, or make new keys in another folder"),
        (["ca.crt"], "has ca.key but no ca.crt: bring ca.crt back"),
        (["ca.crt", "ca.key"], "has server.crt but no ca.crt: make new keys in another folder"),
        (["server.crt"], "has server.key but no server.crt: bring server.crt back, or delete server.key and run again"),
        (["worker.key"], "has worker.crt but no worker.key: bring worker.key back, or delete worker.crt and run again"),
    ],
    ids="+".join,
)
def test_half_a_folder_is_told_in_one_line_and_left_as_it_is(tmp_path, gone, because):
    make_keys(tmp_path)
    for name in gone:
        (tmp_path / name).unlink()
    before = contents(tmp_path)
    with pytest.raises(ValueError) as error:
        make_keys(tmp_path)
    assert because in str(error.value)
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before


def test_an_old_folder_says_what_has_expired(tmp_path, monkeypatch):
    made_long_ago(monkeypatch, tmp_path / "all", days=1)
    with pytest.raises(ValueError, match=r"ca\.crt expired on \d{4}-\d\d-\d\d: take another folder"):
        make_keys(tmp_path / "all")


def test_an_old_certificate_under_a_good_ca_is_replaced_by_deleting_it(tmp_path, monkeypatch):
    made_long_ago(monkeypatch, tmp_path, days=3650)
    for ending in ("crt", "key"):
        (tmp_path / f"worker.{ending}").unlink()
    made_long_ago(monkeypatch, tmp_path, days=1)
    with pytest.raises(ValueError, match=r"worker\.crt expired on .*: delete it and its key and run `paceline keys"):
        make_keys(tmp_path)
    for ending in ("crt", "key"):
        (tmp_path / f"worker.{ending}").unlink()
    make_keys(tmp_path)
    worker_credentials(tmp_path / "worker")


def test_a_certificate_that_is_no_ca_does_not_sign(tmp_path):
    make_keys(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for ending in ("crt", "key"):
        (tmp_path / f"b/ca.{ending}").write_bytes((tmp_path / f"a/server.{ending}").read_bytes())
    with pytest.raises(ValueError, match=r"ca\.crt is not a CA"):
        make_keys(tmp_path / "b")


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [*BAD_NAMES, *BAD_ADDRESSES], ids=ascii)
def test_a_bad_host_is_named_before_anything_is_made(tmp_path, host):
    with pytest.raises(ValueError) as error:
        make_keys(tmp_path / "keys", hosts=["good.example.org", host])
    assert host.strip() in str(error.value)
    assert "give" in str(error.value)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("options", [{"days": 0}, {"days": 36501}, {"workers": 0}, {"hosts": "localhost"}], ids=str)
def test_a_bad_setting_is_named_before_anything_is_made(tmp_path, options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))} is .*: give"):
        make_keys(tmp_path / "keys", **options)
    assert not (tmp_path / "keys").exists()


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "keys").write_text("")
    with pytest.raises(ValueError, match=r"cannot make keys in .*keys"):
        make_keys(tmp_path / "keys")


def test_the_longest_life_can_be_written(tmp_path):
    make_keys(tmp_path, days=36500)
    assert certificate(tmp_path, "worker").not_valid_after_utc - datetime.now(UTC) > timedelta(days=36499)
