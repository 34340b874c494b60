"""The manifests of docs/kubernetes.md: each fits the published schemas, and its containers do what the page says."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.drivers.served.keys import make_keys
from paceline.traces.journal import Resumed, RunEnded, StepRecord
from paceline.traces.journal_files import read_journal
from tests import warm
from tests.docs.pages import DOCS, blocks
from tests.launches import free_port
from tests.waiting import until

VERSION = "1.37"
KINDS = ["Service", "PersistentVolumeClaim", "Job", "Job"]
DEADLINE_SECONDS = 120.0
ROOT = Path(__file__).parents[3]


def manifests():
    return [each for block in blocks("kubernetes.md", "yaml") for each in yaml.safe_load_all(block)]


def container(name):
    jobs = [each for each in manifests() if each["metadata"]["name"] == name]
    return jobs[0]["spec"]["template"]["spec"]["containers"][0]


def test_every_manifest_fits_the_schemas_and_a_wrong_one_does_not():
    validate = pytest.importorskip("kubernetes_validate", reason="manifests: needs kubernetes-validate")
    assert [each["kind"] for each in manifests()] == KINDS
    for each in manifests():
        validate.validate(each, VERSION, strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(manifests()[2] | {"spec": {"backofLimit": 3}}, VERSION, strict=True)


def test_volumes_mounts_ports_and_names_belong_together():
    service, claim, *jobs = manifests()
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        one = pod["containers"][0]
        assert {mount["name"] for mount in one["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {rule.get("onExitCodes", {}).get("containerName", one["name"])
                for rule in job["spec"]["podFailurePolicy"]["rules"]} == {one["name"]}  # fmt: skip
        text = (DOCS / "kubernetes.md").read_text()
        secret = next(volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys")
        assert secret["defaultMode"] == 0o440
        assert f"kubectl create secret generic {secret['secretName']} " in text
    server = jobs[0]["spec"]["template"]
    assert service["spec"]["selector"].items() <= server["metadata"]["labels"].items()
    port = server["spec"]["containers"][0]["ports"][0]
    assert (port["name"], port["containerPort"]) == tuple(service["spec"]["ports"][0].values())
    assert f"{service['metadata']['name']}:{port['containerPort']}" in container("paceline-worker")["command"]
    volumes = {volume["name"]: volume for volume in server["spec"]["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


class Pods:
    """The containers of the page as processes, with the paths and the address of this test in the place of a pod's."""

    def __init__(self, place):
        self.place = place
        self.port = free_port()
        made = place / "made"
        make_keys(made)
        for side in ("server", "worker"):  # as the kubelet mounts a Secret: by links to links
            version = place / f"{side}-keys" / "..2026_11_17"
            version.mkdir(parents=True)
            for name in ("ca.crt", f"{side}.crt", f"{side}.key"):
                (version / name).write_bytes((made / name).read_bytes())
                (version.parent / name).symlink_to(Path("..data", name))
            (version.parent / "..data").symlink_to(version.name)
        (place / "config").mkdir()
        text = 'rounds = 400\n[cluster]\nworkers = 1\n[strategy]\nname = "full"\n[server]\ncheckpoint_every = 20\n'
        (place / "config" / "my.toml").write_text(text)
        (place / "runs").mkdir()

    def here(self, text, side):
        for path in ("/config", "/runs"):
            text = text.replace(f"{path}/", f"{self.place}{path}/")
        text = text.replace("/keys/", f"{self.place}/{side}-keys/").replace("0.0.0.0:29400", f"127.0.0.1:{self.port}")
        return text.replace("paceline:29400", f"localhost:{self.port}")

    @contextlib.contextmanager
    def server(self):
        """Run the server's script: which command it execs is the shell's own answer."""
        one = container("paceline-server")
        assert one["command"] == ["sh", "-c"]
        script = self.here(one["args"][0], "server").replace("exec paceline", "echo paceline")
        words = shlex.split(subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout)
        with self._run(words) as process:
            yield process

    @contextlib.contextmanager
    def worker(self):
        with self._run([self.here(word, "worker") for word in container("paceline-worker")["command"]]) as process:
            yield process

    @contextlib.contextmanager
    def _run(self, words):
        assert words[0] == "paceline"
        log = self.place / f"{words[1]}.log"
        with log.open("ab") as sink:
            command = [sys.executable, "-m", *words]
            process = warm.Popen(command, cwd=self.place, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(20)

    def records(self, kind):
        trace = self.place / "runs" / "one" / "trace.jsonl"
        if not trace.exists() or not trace.stat().st_size:
            return []
        return [record for record in read_journal(trace).records if isinstance(record, kind)]

    def logs(self):
        """Return the last lines of all that runs."""
        return "\n".join(path.read_text()[-3000:] for path in self.place.glob("*.log"))

    def probe(self):
        """Do what a TCP probe does; return whether it found the port open."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except OSError:
            return False
        return True


def test_a_server_that_is_killed_resumes_on_its_volume_and_both_jobs_complete(tmp_path):
    pods = Pods(tmp_path)
    with pods.worker() as worker:
        with pods.server() as server:
            until(pods.probe, "the port is open", seconds=DEADLINE_SECONDS, log=pods.logs)
            for _ in range(5):
                assert pods.probe()
            until(lambda: len(pods.records(StepRecord)) > 30, "30 steps", seconds=DEADLINE_SECONDS, log=pods.logs)
            os.kill(server.pid, signal.SIGKILL)  # as a node that is lost
            server.wait(20)
        assert not pods.records(RunEnded)
        with pods.server() as server:
            assert server.wait(DEADLINE_SECONDS) == 0
        assert worker.wait(DEADLINE_SECONDS) == 0
    assert len(pods.records(Resumed)) == 1
    assert pods.records(RunEnded)[-1].rounds_done == 400
    log = (tmp_path / "serve.log").read_text()
    assert "warning" not in log.lower(), log  # a probe is nobody's attempt to get in
    with pods.server() as server:  # a pod that is started once more finds a run that is done
        assert server.wait(DEADLINE_SECONDS) == 0


def test_a_recipe_that_cannot_be_ends_with_the_code_that_fails_the_job(tmp_path):
    pods = Pods(tmp_path)
    (tmp_path / "config" / "my.toml").write_text("rounds = -1\n")
    with pods.server() as server:
        code = server.wait(DEADLINE_SECONDS)
    for job in ("paceline-server", "paceline-worker"):
        spec = next(each["spec"] for each in manifests() if each["metadata"]["name"] == job)
        assert spec["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"] == [code]
