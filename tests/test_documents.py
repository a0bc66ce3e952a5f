"""Every command of README.md and docs/ runs as it stands there, one after another, in a folder for each page.

Models, batches and steps are made few by keys that stand before those of the page, which win. What cannot run
here is named below with the reason, and must still be what the command line and the recipes take.
"""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
import typer
from typer.testing import CliRunner

from tests.cluster.test_backend_declared import BACKEND
from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.documents import PAGES, ROOT, Block, Command, blocks
from tests.engines.test_engine_conformance import ENGINE
from tilth.cli.main import app
from tilth.config import plugins
from tilth.config.load import check_allowed, from_dict, load_recipe
from tilth.config.plugins import declared, load_plugins
from tilth.config.roles import roles_of
from tilth.launch.sweep import plan_sweep
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.family import new_config
from tilth.models.hf import load_pretrained, load_weights, save_pretrained

ELSEWHERE = {
    "make demo": "it makes an environment; tests/test_distribution.py installs by make",
    "make test": "these tests are a part of it",
    "python -m shop": "it takes the module from this folder; the page's records are made with its own function",
    "pip install": "it changes the environment",
    "python benchmarks/": "it takes minutes",
    "export RAY_AUTH_MODE": "two machines; tests/cluster/backends/test_ray.py starts two nodes in this way",
    "ray ": "two machines",
    "mkdir -p ~/.ray": "two machines",
    "scp ": "two machines",
    "tilth run addition-grpo cluster.backend=ray cluster.workers=16": "two machines",
    "srun ": "Slurm",
    "export TINKER_BASE_URL": "a client of a server; tests/serve/tinker/test_readme.py has it",
    "python -m tinker_cookbook": "tests/serve/tinker/test_readme.py runs it where it is installed",
    "python3 -m venv vllm-env": "it makes an environment; tests/engines/test_vllm.py takes one",
    "vllm-env/bin/pip": "that environment",
    "tilth run addition-grpo rollout.engine=vllm": "that environment",
    "tilth run addition-grpo run.checkpoints=s3://": "a store",
    "tilth env try 'mcp:": "a server of one's own; tests/envs/test_mcp.py has one",
    "tilth env records openenv:": "a server of one's own; tests/envs/test_openenv.py has one",
    "tilth env try openenv:": "that server",
    "tilth serve": "it serves until Ctrl-C; tests/serve/test_app.py has one",
    "tilth sweep": "it trains six runs; tests/cli/test_sweep.py has one",
    "tilth ui": "it serves until Ctrl-C; tests/ui/web/test_pages.py has one",
    "tilth trace capture": "a run that goes on; tests/cli/test_capture.py has one",
    "python3 -m verl.": "verl's own command",
}
"""Beginnings of commands that are not run here, with the reason."""
NO_COMMANDS = {
    "step-000120/": "files of a checkpoint",
    "for batch in run.experience(": "a page of the package, shortened",
    "Accuracy on problems it never trained on (95 % intervals):": "what the demo prints",
}
"""Beginnings of blocks without a language that are no commands."""
COSTLY = (
    *("cluster.backend=local", "cluster.backend=ray", "torchrun", "tilth doctor", "flaws-judge", "rollout.serve=true"),
)
"""Parts of commands that take several processes, or seconds, and so are only parsed, but in make test-all."""
CODES = {"tilth ckpt verify runs/mine --all": 1, "tilth ckpt diff runs/mine@120 runs/mine": 1}
"""Exit codes of commands that find something."""

SHAPE = ["model.hidden=16", "model.layers=2", "model.heads=2", "model.kv_heads=2"]
SMALL = ["supervised.steps=3", "supervised.batch=8", "supervised.check_every=3", "rollout.prompts=4", "rollout.group=2",
         "rollout.max_tokens=8", "run.eval_prompts=8", "run.save_every=1", "run.keep=99", "run.keep_every=1",
         "train.threads=1"]  # fmt: skip
PER = 50
"""Steps of a page that are one here, so that 200 steps are fewer than 250 still."""
STEPS = {"algorithm.steps": 250 // PER, "critic.steps": 50 // PER}
TALKER = [
    "tilth run sft data.source=train.jsonl data.columns.prompt=question data.template=chatml data.tokenizer=bpe:1000 "
    "run.name=talker",
    "tilth export runs/talker DIR",
]
MINE = ["tilth run addition-grpo run.name=mine"]
SETUP = {
    "docs/guide.md": [*TALKER, "tilth export runs/talker MODEL", *MINE],
    "docs/checkpoints.md": MINE,
}
"""Commands that make what a page takes to be there."""

DATA = Path(os.environ.get("TILTH_DATA", ROOT / ".." / "shared" / "data")) / "gsm8k"


def records(name, count):
    """Of GSM8K where it is there, or else sums of the same form."""
    if (DATA / name).is_file():
        return (DATA / name).read_text().splitlines()[:count]
    return [
        json.dumps({"question": f"How many are {a} and {b}?", "answer": f"It is {a}+{b}={a + b}.\n#### {a + b}"})
        for a in range(count // 10) for b in range(10)
    ]  # fmt: skip


def transcripts(text, folder, count):
    """Those that a file of a page makes."""
    told = {"__name__": "shop"}
    exec(text.replace("tilth.Environment", "tilth.Environment, declares=False"), told)
    draw = random.Random(0)
    lines = [json.dumps(told["transcript"](draw)) + "\n" for _ in range(count)]
    (folder / "transcripts.jsonl").write_text("".join(lines))


def furnish(folder):
    """The files that pages take to be there."""
    for name, count in (("train.jsonl", 300), ("test.jsonl", 40)):
        (folder / name).write_text("\n".join(records(name, count)))
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    for name in ("my.jsonl", "sums.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, sums)))
    (reward,) = (block for block in blocks("docs/guide.md") if block.first == "# my_reward.py")
    (folder / "my_reward.py").write_text(reward.text)
    for block in blocks("docs/extending.md"):
        if re.fullmatch(r"# \w+\.py", block.first):
            (folder / block.first[2:]).write_text(block.text)
    (shop,) = (block for block in blocks("docs/agents.md") if block.first == "# shop.py")
    (folder / "shop.py").write_text(shop.text)
    transcripts(shop.text, folder, 100)
    (folder / "my").mkdir()
    (folder / "my" / "recipe.toml").write_text((ROOT / "src/tilth/recipes/addition-grpo.toml").read_text())


def reason(command: Command) -> str:
    """Why a command is not run here; empty for one that is."""
    return next((why for beginning, why in ELSEWHERE.items() if command.text.startswith(beginning)), "")


def fewer(word: str) -> str:
    """A word of a command with its steps made fewer."""
    word = re.sub(r"\b(algorithm\.steps=)(\d+)", lambda m: f"{m[1]}{max(1, int(m[2]) // PER)}", word)
    return re.sub(r"(runs/\w+@)(\d+)", lambda m: f"{m[1]}{max(1, int(m[2]) // PER)}", word)


def scaled(words: list[str]) -> list[str]:
    """A command with the small keys right behind its recipe, where those of the page come after them."""
    words = [fewer("addition-grpo" if word == "RECIPE" else word) for word in words]
    words = ["8" if before == "--limit" else word for before, word in zip(["", *words], words)]
    two = words[:2] in (["data", "show"], ["simulate", "rollout"])
    run = 1 if words[0] in ("run", "layout") else 2 if two else 0
    if not run:
        return words
    begun = any(re.match(r"model\.path=.", word) for word in words)
    recipe = load_recipe(words[run]) if not words[run].startswith("my/") else load_recipe("addition-grpo")
    more = [f"{key}={value}" for key, value in STEPS.items() if key != "critic.steps" or recipe.flow_spec.critic]
    more += {"addition": ["data.digits=1"], "sorting": ["data.length=2"]}.get(recipe.data.source, [])  # not a million
    return [*words[: run + 1], *([] if begun else SHAPE), *SMALL, *more, *words[run + 1 :]]


made = cache(typer.main.get_command)


def parsed(words: list[str]) -> None:
    """Let the command line's own parser take a command, and the schema its recipe and keys."""
    command, context, name = made(app), None, "tilth"
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            break
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    if "overrides" in context.params:
        overrides = context.params["overrides"] or []
        if name == "sweep":
            plan_sweep(context.params["name"], overrides, context.params["seeds"])
        else:
            load_recipe(context.params["name"], overrides)
        check_allowed(context.params.get("allow") or [])


def called(command: Command, folder: Path) -> None:
    """Run a command in this process, in the folder where this is."""
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, scaled(command.own), catch_exceptions=False)
    assert result.exit_code == CODES.get(command.text, 0), f"{command.text}\n{result.output}"


def spawned(command: Command, folder: Path) -> None:
    """Run a command as a shell does."""
    at = len(command.words) - len(command.own)
    line = " ".join([*command.text.split()[:at], *map(shlex.quote, scaled(command.own))])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, env=os.environ | {"PATH": path}
    )
    assert ran.returncode == CODES.get(command.text, 0), f"{line}\n{ran.stdout}\n{ran.stderr}"


def commands(page: str) -> list[Command]:
    return [command for block in blocks(page) for command in block.commands]


@contextmanager
def damaged(folder: Path):
    """The newest checkpoint with a bit that flipped, as the page on checkpoints shows one, for a moment."""
    newest = sorted((folder / "runs/mine/checkpoints").glob("step-*"))[-1]
    file = min(newest.glob("model*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    yield
    file.write_bytes(data)


def is_costly(command: Command) -> bool:
    """Whether it takes several processes, or seconds of measuring."""
    return command.own[:1] != ["layout"] and any(part in command.text for part in COSTLY)


def follow(page: str, folder: Path, *, costly: bool) -> None:
    """Do all that a page says."""
    furnish(folder)
    for line in SETUP.get(page, ()):
        called(Command(page, line), folder)
    for command in commands(page):
        if reason(command):
            continue
        with damaged(folder) if command.text.startswith("tilth ckpt verify") else nullcontext():
            if not is_costly(command):
                called(command, folder)
            elif costly:
                spawned(command, folder)


WITH_COMMANDS = [page for page in PAGES if commands(page)]


LONG = (
    *("README.md", "docs/checkpoints.md", "docs/recipes.md", "docs/extending.md", "docs/packages/flows.md"),
    *("docs/guide.md", "docs/algorithms.md", "docs/packages/plan.md", "docs/agents.md"),
)
"""Pages whose commands do what tests of recipes, checkpoints, plugins, flows, episodes, algorithms, plans and commands
do too."""


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * (p in LONG)) for p in WITH_COMMANDS])
def test_the_commands_of_a_page_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    follow(page, tmp_path, costly=False)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if any(map(is_costly, commands(page)))])
def test_those_that_take_several_processes_too(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    follow(page, tmp_path, costly=True)


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    furnish(folder := tmp_path_factory.mktemp("furnished"))
    return folder


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_command_line_takes_every_command_as_it_stands(page, furnished, monkeypatch):
    monkeypatch.chdir(furnished)
    monkeypatch.setattr("tilth.cli.main._is_nowhere", lambda ctx, spec: False)  # no run was made here
    for command in commands(page):
        if command.own:
            parsed(["addition-grpo" if word == "RECIPE" else word for word in command.own])
        else:
            assert reason(command), f"{page}: nobody runs {command.text!r}"


def test_what_is_not_run_is_there_and_why():
    everything = [command for page in PAGES for command in commands(page)]
    for beginning in ELSEWHERE:
        assert any(command.text.startswith(beginning) for command in everything), beginning
    for text in CODES:
        assert any(command.text == text for command in everything), text
    for command in everything:
        if command.words[0] == "python" and command.words[1] != "-m":
            assert (ROOT / command.words[1]).is_file()
        if command.words[0] == "make":
            assert re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.M)


def _of_a_room(block: Block) -> bool:
    """Whether tests/test_docs.py runs it, and compares what it prints."""
    return block.language == "python" and block.page.startswith("docs/packages/")


def handled(block: Block) -> bool:
    """Whether some test does what a block says."""
    if block.language == "python":
        return _of_a_room(block) or block.first.startswith(tuple(PYTHON))
    if block.language == "toml":
        # tests/cli/test_from_trl_and_verl.py and tests/config/test_load.py load them
        return block.page in ("docs/from-trl-and-verl.md", "docs/packages/data.md", "docs/algorithms.md")
    if block.language == "text":
        return not any(line.startswith("$ ") for line in block.text.splitlines())  # a picture
    return bool(block.commands) or (not block.language and block.text.startswith(tuple(NO_COMMANDS)))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_handled(page):
    assert not [block.first for block in blocks(page) if not handled(block)]
    fences = re.findall(r"^ *```", (ROOT / page).read_text(), re.M)
    assert len(fences) == 2 * len(blocks(page))  # none is indented, none is left open
    assert not re.search(r"^    (\$ )?tilth ", (ROOT / page).read_text(), re.M)  # nor is one without fences


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("tilth run x  # why\n", True),
        ("$ tilth run x\nits output\n", True),
        ("cargo build\n", False),
        ("a picture\n", False),
    ],
)
def test_a_new_block_that_nobody_handles_is_seen(text, fine):
    assert handled(Block("README.md", "", text)) == fine
    assert not handled(Block("README.md", "python", text)) and not handled(Block("README.md", "sh", text))


# -- Python ------------------------------------------------------------------------------------------------------------


def eight_lines(text, monkeypatch):
    """Those of the README, with a small model and few steps."""
    import tilth.api

    def small(wanted):
        mine = {"model": {"hidden": 16, "layers": 1, "heads": 2}, "rollout": {"prompts": 4, "group": 2},
                "supervised": {"steps": 3, "batch": 8}, "algorithm": {"steps": 2}, "run": {"eval_prompts": 8},
                "train": {"threads": 1}}  # fmt: skip
        return load({**wanted, **{name: {**wanted.get(name, {}), **keys} for name, keys in mine.items()}})

    load = tilth.api.from_dict
    monkeypatch.setattr(tilth.api, "from_dict", small)
    told = {}
    exec(compile(text, "README.md", "exec"), told)
    assert 0 <= told["result"].accuracy <= 1 and told["result"].directory.is_dir()


def a_reward(text, monkeypatch):
    """The guide's: right and wrong."""
    told = {}
    exec(text, told)
    assert told["score"]("1+1=", " 2\n", {"answer": "2"}) == 1.0 and told["score"]("1+1=", "3", {"answer": "2"}) == 0.0


def a_shop(text, monkeypatch):
    """An environment that gives 1 for what its transcripts do right, and its transcripts."""
    told = {"__name__": "shop"}
    exec(text.replace("tilth.Environment", "tilth.Environment, declares=False"), told)
    shop, record = told["Shop"](), told["transcript"](random.Random(1))
    shop.reset(record)
    assert shop.look(record["wanted"]) == record["shelves"][record["wanted"]] and shop.reward() == 0.0
    shop.take(record["shelves"][record["wanted"]])
    assert shop.reward() == 1.0


def a_reward_of_verl(text, monkeypatch):
    """A function of verl behind ours."""
    told = {"compute_score": lambda source, solution, truth, extra: float(solution == truth and source == "s")}
    exec(text, told)
    assert told["score"]("?", "2", {"answer": "2", "data_source": "s"}) == 1.0


def a_plugin(text, monkeypatch):
    """A file that is imported; its estimator is RLOO."""
    path = write(Path.cwd(), text)
    (module,) = load_plugins([str(path)])
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 2.0]).double(), torch.tensor([0, 0, 1, 1])
    assert module.leave_one_out(rewards, groups, scale=2.0).tolist() == [2, -2, -4, 4]


def a_family(text, monkeypatch):
    """Arcee's, as transformers has it: config, logits, and the way back."""
    load_plugins([str(write(Path.cwd(), text, "arcee_of_mine.py"))])
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    theirs = transformers.ArceeForCausalLM(
        transformers.ArceeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, mlp_bias=True)
    )
    theirs.save_pretrained("theirs")
    config, tensors = load_pretrained("theirs")
    model = Decoder(config)
    load_weights(model, tensors)
    ids = torch.arange(9)
    wanted = theirs(ids[None]).logits[0]
    torch.testing.assert_close(model.logits(model(ids, PackedContext([9]))), wanted, atol=2e-5, rtol=1e-4)
    save_pretrained("ours", config, model.state_dict())
    again = transformers.AutoModelForCausalLM.from_pretrained("ours")
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert new_config(from_dict({"model": {"family": "arcee"}}).model, 9).to_hf()["hidden_act"] == "relu2"


def a_role(text, monkeypatch):
    """A role, and a flow that calls it."""
    load_plugins([str(write(Path.cwd(), text, "novelty.py"))])
    assert "novelty" in roles_of(from_dict({"flow": "curious"}))


def what_it_declares(text, monkeypatch):
    """A file that is imported, and declares something; the commands of its page use it."""
    before = {kind: set(known) for kind, known in plugins._DECLARED.items()}
    load_plugins([str(write(Path.cwd(), text))])
    assert any(set(known) - before[kind] for kind, known in plugins._DECLARED.items())


def a_backend(text, monkeypatch):
    """A backend; tests/cluster/test_backend_declared.py runs the conformance suite on it."""
    assert text == BACKEND
    load_plugins([str(write(Path.cwd(), text))])
    assert "pipes" in declared("backend")


def an_engine(text, monkeypatch):
    """An engine; tests/engines/test_engine_conformance.py does with it what is done with every engine."""
    assert text == ENGINE
    load_plugins([str(write(Path.cwd(), text))])
    assert "slow" in declared("engine")


def an_axis(text, monkeypatch):
    """A new axis, in a process of its own: recipes have its key if it is declared before they are imported."""
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ran.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", text, re.M), ran.stderr


def of_trl(text, monkeypatch):
    """Theirs, not ours: it must be Python."""
    compile(text, "from-trl-and-verl.md", "exec")


PYTHON = {
    "import tilth": eight_lines,
    "# my_reward.py": a_reward,
    "# shop.py": a_shop,
    "# mine.py": a_plugin,
    "# arcee.py": a_family,
    "# novelty.py": a_role,
    "# seeing.py": what_it_declares,
    "# mirror.py": what_it_declares,
    "# ternary.py": what_it_declares,
    "# second_chance.py": what_it_declares,
    "# watch.py": what_it_declares,
    "# more.py": what_it_declares,
    "# slow.py": an_engine,
    "# pipes.py": a_backend,
    "# an axis": an_axis,
    "def score(": a_reward_of_verl,
    "dataset = load_dataset(": of_trl,
}
"""Beginning of a block of Python outside the rooms -> what is done with it."""
OUTSIDE = [block for page in PAGES for block in blocks(page) if block.language == "python" and not _of_a_room(block)]


@pytest.mark.parametrize("block", OUTSIDE, ids=lambda block: block.page)
def test_python_of_a_page(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    does = next(does for beginning, does in PYTHON.items() if block.first.startswith(beginning))
    does(block.text, monkeypatch)
