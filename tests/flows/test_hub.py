"""A model of the hub by its id, from a real server that speaks as much of the hub's protocol as a download takes."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from tests.roles import small
from tilth.cli.main import app
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained
from tilth.models.hub import fetched, is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves the files of ``folder`` as the model org/small."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self):
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/org/small/revision/"):
            said = {"id": "org/small", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.answer(json.dumps(said).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith("/api/models/org/small/tree/"):
            said = [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]
            self.answer(json.dumps(said).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith(f"/org/small/resolve/{COMMIT}/") and name in files:
            tag = hashlib.sha256(files[name]).hexdigest()
            self.answer(files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def answer(self, body, headers, code=200):
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The only hub that this process knows; ``close`` it, and it does not answer."""
    model = Decoder(small.config())
    model.init_weights_(7)
    folder = tmp_path / "served"
    save_pretrained(folder, model.config, dict(model.named_parameters()), tokenizer=small.TOKENIZER)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights once more")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Hub,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.chdir(tmp_path)
    place = f"http://127.0.0.1:{server.server_port}"
    files = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, place)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "ENDPOINT", place)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fetched.cache_clear()
    yield server
    close(server)
    fetched.cache_clear()


def close(server):
    server.shutdown()
    server.server_close()


def tilth(*arguments):
    return CliRunner().invoke(app, list(arguments))


SHORT = ["supervised.steps=1", "algorithm.steps=1", "data.digits=1", "model.context=16", "rollout.max_tokens=4",
         "rollout.prompts=2", "rollout.group=2", "run.eval_prompts=4", "train.threads=1",
         "model.path=org/small"]  # fmt: skip


def test_a_run_begins_from_an_id_of_the_hub_and_its_cache_serves_without_one(hub, tmp_path):
    laid = tilth("layout", "addition-grpo", *SHORT)
    assert laid.exit_code == 0, laid.stderr
    assert not list((tmp_path / "home").rglob("*.safetensors"))  # nothing is started, and no weights are fetched
    ran = tilth("run", "addition-grpo", *SHORT, "reference.path=org/small", "algorithm.kl_coef=0.1")
    assert ran.exit_code == 0, ran.stderr
    assert [path.name for path in (tmp_path / "home").rglob("*.safetensors")] == ["model.safetensors"]
    close(hub)
    fetched.cache_clear()
    said = tilth("generate", "org/small", "1+2=", "--json", "--temperature", "0")
    here = tilth("generate", "served", "1+2=", "--json", "--temperature", "0")
    assert said.exit_code == 0 and json.loads(said.stdout)["tokens"] == json.loads(here.stdout)["tokens"]


@pytest.mark.parametrize("spec", ["org/small", "org/another"])
def test_without_it_an_error_says_how_to_get_it(hub, tmp_path, spec):
    if spec == "org/small":
        close(hub)
    for command in (["generate", spec, "1+2="], ["layout", "addition-grpo", f"model.path={spec}"]):
        failed = tilth(*command)
        assert failed.exit_code == 2 and f"hf download {spec} --local-dir" in failed.stderr, failed.stderr
        assert failed.stderr.count("error:") == 1


def test_what_is_an_id_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_id("Qwen/Qwen2.5-0.5B-Instruct")
    for spec in ("Qwen2.5-0.5B", "./Qwen/x", "/Qwen/x", "models/mine", "runs/mine", "a/b/c", "a/b@best", "s3://a/b"):
        assert not is_hub_id(spec) and fetched(spec) == spec
