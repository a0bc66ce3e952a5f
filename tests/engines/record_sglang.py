"""Record what a real server of SGLang answers, for the stand-in of ``test_sglang.py`` to be compared with.

    python tests/engines/record_sglang.py MODEL OUT.json [--device cuda]

Run it in an environment that has SGLang; it uses nothing of Tilth. It starts a server on the exported model and writes
each request with its answer, the lines of streams included.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

TOKEN = "recorded"
PROMPTS = [[1, 2, 3], [4, 5], [6]]


def exchange(port, path, body):
    """Send a request; return it with the status and the lines of the answer."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            status, lines = answer.status, [line.decode() for line in answer]
    except urllib.error.HTTPError as error:
        status, lines = error.code, [error.read().decode()]
    return {"path": path, "body": body, "status": status, "lines": lines}


def requests(model):
    """The requests of ``tilth.engines.sglang``, in an order in which it sends them."""
    params = {"max_new_tokens": 6, "stop_token_ids": [3], "ignore_eos": True, "sampling_seed": 1}
    for temperature in (0.0, 0.7):
        sampling = [{**params, "temperature": temperature}] * len(PROMPTS)
        rids = [f"{place}.{temperature}" for place in range(len(PROMPTS))]
        asked = {"rid": rids, "input_ids": PROMPTS, "sampling_params": sampling, "return_logprob": True, "stream": True}
        yield "generate", asked
    yield "flush_cache", {}
    yield "abort_request", {"rid": "0.0"}
    yield "abort_request", {"abort_all": True}
    yield "update_weights_from_disk", {"model_path": model, "abort_all_requests": True}
    yield "release_memory_occupation", {"tags": ["kv_cache"]}
    yield "resume_memory_occupation", {"tags": ["kv_cache"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=30000)
    options = parser.parse_args()
    given = ["--model-path", options.model, "--device", options.device, "--port", str(options.port)]
    given += ["--api-key", TOKEN, "--skip-tokenizer-init", "--enable-memory-saver"]
    server = subprocess.Popen([sys.executable, "-m", "sglang.launch_server", *given])
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{options.port}/health")
                break
            except OSError:
                time.sleep(1)
        found = [exchange(options.port, *request) for request in requests(options.model)]
    finally:
        server.terminate()
    with open(options.out, "w") as file:
        json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
