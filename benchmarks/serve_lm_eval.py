"""lm-eval against a server and against transformers, on the same weights: the scores are equal.

    python benchmarks/serve_lm_eval.py --python PYTHON [--quick] [--json PATH]

--python: of an environment with lm-eval (``lm-eval[hf,api]``); without it nothing is compared. The model is that of
``serve.py``, the tasks are written here: choices by log-likelihood, perplexity of texts, and exact matches of generated
ones. Answers are compared one by one, too. Nothing is downloaded.
"""

import json
import os
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from driver import benchmark_parser, write_rows
from serve import WORDS, commands, free_port, make_model, started

TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "written": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs:
  until: [" say"]
  max_gen_toks: 16
  do_sample: false
  temperature: 0.0
metric_list:
  - metric: exact_match
""",
}


def write_tasks(folder: Path, count: int) -> None:
    """Write questions with four choices each, and a task of each kind over them."""
    chance = random.Random(1)
    rows = [
        {
            "question": " ".join(chance.choices(WORDS, k=chance.randrange(4, 20))),
            "choices": [" " + " ".join(chance.choices(WORDS, k=chance.randrange(1, 5))) for _ in range(4)],
            "answer": chance.randrange(4),
            "text": " ".join(chance.choices(WORDS, k=3)),
        }
        for _ in range(count)
    ]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"{head}{text}")


def answers(out: Path, task: str) -> dict[int, Any]:
    """Return question -> answers."""
    (found,) = out.rglob(f"samples_{task}_*.jsonl")
    rows = map(json.loads, found.read_text().splitlines())
    return {row["doc_id"]: row["filtered_resps"] for row in rows}


def compared(folder: Path) -> dict[str, float]:
    """Return the share of equal texts, and the largest difference of log-likelihoods."""
    ours, theirs = folder / "scores-local-completions", folder / "scores-hf"
    written = [answers(out, "written") for out in (ours, theirs)]
    apart = [
        abs(float(a[0]) - float(b[0]))
        for number, given in answers(theirs, "choices").items()
        for a, b in zip(given, answers(ours, "choices")[number], strict=True)
    ]
    same = [written[0][number] == text for number, text in written[1].items()]
    for number, text in written[1].items():
        if written[0][number] != text:
            print(f"question {number}: transformers {text!r}, server {written[0][number]!r}")
    return {"equal_texts": sum(same) / len(same), "log_likelihoods_apart": max(apart), "log_likelihoods": len(apart)}


def scores(python: str, kind: str, arguments: str, folder: Path, batch: int) -> dict[str, float]:
    """Return task.metric -> score."""
    out = folder / f"scores-{kind}"
    command = [
        python, "-m", "lm_eval", "--model", kind, "--model_args", arguments, "--include_path", str(folder / "tasks"),
        "--tasks", ",".join(TASKS), "--output_path", str(out), "--batch_size", str(batch),
        "--log_samples",
    ]  # fmt: skip
    if kind == "hf":
        command += ["--device", "cpu"]
    around = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(folder / "home")}
    around.pop("PYTHONPATH", None)
    done = subprocess.run(command, env={**around, "OPENAI_API_KEY": "none"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lm-eval of {kind} failed: {done.stderr[-3000:]}")
    (found,) = out.rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    return {
        f"{task}.{metric.partition(',')[0]}": value
        for task, row in results.items()
        for metric, value in row.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def main() -> None:
    parser = benchmark_parser(__doc__, "12 questions instead of 200")
    parser.add_argument("--python", default="", help="of an environment with lm-eval")
    args = parser.parse_args()
    if not args.python:
        print("left out: no lm-eval; give --python, the interpreter of an environment that has it")
        write_rows(args.json, [{"left_out": "no --python with lm-eval"}])
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder, port = Path(place), free_port()
        model = str(folder / "model")
        make_model(folder / "model", quick=True)
        (folder / "tasks").mkdir()
        write_tasks(folder / "tasks", 12 if args.quick else 200)
        hf = scores(args.python, "hf", f"pretrained={model},dtype=float32", folder, 8)
        with started(commands(model, "", port)["tilth"], port, folder / "server.log"):
            where = f"base_url=http://127.0.0.1:{port}/v1/completions,model={model},tokenizer={model}"
            more = "tokenizer_backend=huggingface,tokenized_requests=True,num_concurrent=4,max_length=512"
            ours = scores(args.python, "local-completions", f"{where},{more}", folder, 1)
        for name, value in hf.items():
            rows.append({"metric": name, "transformers": value, "server": ours[name]})
            print(f"{name:28s} transformers {value:.6f}  server {ours[name]:.6f}")
        rows.append(compared(folder))
        print("  ".join(f"{key} {value:.6g}" for key, value in rows[-1].items()))
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
