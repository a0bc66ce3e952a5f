"""Task folders of Harbor, in its own format: built, worked on and judged in the sandbox."""

import inspect
import json
import tarfile
from pathlib import Path

import pytest

from tests.errors import raises
from tilth.core.errors import PluginError
from tilth.envs.adapters import adapted
from tilth.envs.environment import EnvironmentFault
from tilth.envs.harbor import LIMITS, _limit, built
from tilth.sandbox.kernel import SandboxError
from tilth.sandbox.run import Sandbox

CONFIG = """schema_version = "1.1"

[task]
name = "tilth/reverse"
description = "Reverse the lines of a file"
authors = [{ name = "A. Nonymous", email = "a@example.com" }]
keywords = ["trivial"]

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 2048
"""
DOCKERFILE = """FROM ubuntu:24.04
WORKDIR /app
COPY data/ ./data
COPY notes.txt /app/
ENV GREETING="hello there"
RUN mkdir -p out && \\
    echo ready > out/state
CMD ["bash"]
"""
TEST = """#!/bin/bash
if diff -q /app/out/reversed.txt /tests/expected.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


@pytest.fixture(scope="module", autouse=True)
def a_sandbox():
    try:
        Sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


def make(folder, dockerfile=DOCKERFILE, test=TEST):
    task = folder / "reverse"
    for name in ("environment/data", "tests", "solution"):
        (task / name).mkdir(parents=True)
    (task / "task.toml").write_text(CONFIG)
    (task / "instruction.md").write_text(
        "# Reverse\n\nWrite the lines of `data/in.txt` in reverse to `out/reversed.txt`.\n"
    )
    (task / "environment/Dockerfile").write_text(dockerfile)
    (task / "environment/data/in.txt").write_text("a\nb\nc\n")
    (task / "environment/notes.txt").write_text("none")
    (task / "tests/test.sh").write_text(test)
    (task / "tests/expected.txt").write_text("c\nb\na\n")
    (task / "solution/solve.sh").write_text("#!/bin/bash\ntac /app/data/in.txt > /app/out/reversed.txt\n")
    return task


def episode(folder):
    kind = adapted("harbor", str(folder))
    kind.prepare()
    (record,) = kind.records(0)
    made = kind()
    return made, made.reset(json.loads(json.dumps(record)))


def call(made, command):
    (said,), over = made.step(
        {"role": "assistant", "content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
    )
    assert not over
    return said["content"]


def test_commands_work_on_the_files_that_the_last_one_left_and_the_tests_judge_them(tmp_path):
    task = make(tmp_path)
    made, (asked,) = episode(tmp_path)
    assert asked["content"].startswith("# Reverse") and list(made.tools()) == ["bash"]
    seen = call(made, 'pwd; ls; cat out/state; echo "$GREETING"').split()
    assert seen == ["/app", "data", "notes.txt", "out", "ready", "hello", "there"]
    assert "exit code 1" in call(made, "cat /tests/expected.txt")
    assert "exit code 3" in call(made, "exit 3")
    assert made.reward() == {"reward": 0.0}
    call(made, (task / "solution/solve.sh").read_text())
    assert made.reward() == {"reward": 1.0}
    assert made.step({"role": "assistant", "content": "done"})[1]


def test_another_episode_sees_nothing_of_it_and_tests_that_were_written_by_one_are_replaced(tmp_path):
    make(tmp_path)
    made, _ = episode(tmp_path)
    call(
        made,
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh; touch x",
    )
    call(
        made,
        "rm -rf /work/logs; mkdir -p l/verifier; "
        "echo '{\"reward\": 9}' > l/verifier/reward.json; ln -s /work/app/l /work/logs",
    )
    assert made.reward() == {"reward": 0.0}
    call(made, "rm -rf /work/logs /work/tests; echo x > /work/logs; echo x > /work/tests")
    assert made.reward() == {"reward": 0.0}
    call(made, "echo 'echo 1 > /logs/verifier/reward.txt; exit' > /work/.begin")
    assert made.reward() == {"reward": 0.0}
    other, _ = episode(tmp_path)
    assert "x" not in call(other, "ls").split()


def test_a_reward_of_several_parts(tmp_path):
    test = 'echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json'
    make(tmp_path, test=test)
    assert episode(tmp_path)[0].reward() == {"reward": 0.5, "style": 1.0}


@pytest.mark.parametrize(
    "test", ["exit 1", "echo nan > /logs/verifier/reward.txt", "echo nan? > /logs/verifier/reward.txt"]
)
def test_tests_without_a_reward_are_a_missing_one(tmp_path, test):
    make(tmp_path, test=test)
    with raises(EnvironmentFault, "environment.harbor.reward"):
        episode(tmp_path)[0].reward()


FOLLOWED = """FROM ubuntu:24.04 AS base
WORKDIR\t/app
ENV LONG a value = "of words"
ENV A=1 B="two words"
COPY --chown=1:1 [ "notes.txt", "my notes.txt" ]
# a comment
RUN cd /tmp && export C=3; \\
    # and one inside
    false; echo "$A-$B-$C-$LONG" > /app/said  \\
    && exit 0
RUN ["touch", "a b"]
RUN [ -d /tmp ] && echo f > one.x
COPY *.txt ./
run pwd > where
USER nobody
"""


def test_a_dockerfile_means_what_it_means_to_docker(tmp_path):
    make(tmp_path, FOLLOWED)
    made, _ = episode(tmp_path)
    said = call(made, "cat said where; ls").split("\n")
    assert said[:5] == ["1-two words-3-a value = of words", "/app", "a b", "my notes.txt", "notes.txt"]
    assert call(made, 'echo "$C$LONG"').strip() == "a value = of words"


BUILT = """ARG TAG=24.04 SIDE=out
FROM ubuntu:$TAG
ARG A=1
ENV B=env
ARG B=arg C="two words" EMPTY
RUN echo "$A-$B-$C-$EMPTY$TAG-$SIDE" > said
ARG SIDE
ARG A=2
ARG D=$A
RUN echo "$A-$D-$SIDE" >> said
ENV A=kept LAST=$C
ARG A=late
RUN echo "$A" \\

# between lines

  >> said
"""


def test_an_arg_is_there_while_building_behind_its_line_and_an_env_wins(tmp_path):
    make(tmp_path, BUILT)
    made, _ = episode(tmp_path)
    assert call(made, "cat said").split("\n")[:3] == ["1-env-two words--", "2-2-out", "kept"]
    assert call(made, 'echo "$A-$B-$LAST-$C$D$SIDE$TAG"; env').startswith("kept-env-two words-\n")
    assert not {"C", "D", "SIDE", "TAG", "EMPTY", "outside_SIDE"} & {
        line.partition("=")[0] for line in call(made, "env").split("\n")
    }


@pytest.mark.parametrize(
    "line",
    [
        "FROM scratch",
        "ARG",
        "ARG UID=1000",
        'ENV A="x',
        "RUN --mount=type=cache,target=/x make",
        "COPY --from=build /a /b",
        "ADD https://example.com/x /x",
        "ADD x.tar.gz /x",
        "COPY <<EOF /x",
        "COPY --chmod=755 a /b",
        "COPY --parents a/b /c",
        "COPY --exclude=b a /c",
        "COPY --linked a /b",
        "COPY notes.txt",
        'COPY ["notes.txt"]',
        "COPY ../notes.txt /x",
        'COPY ["data/../../notes.txt", "/x"]',
        'COPY "../notes.txt" /x',
        'COPY "my notes.txt" /x',
        "COPY my\\ notes.txt /x",
        "COPY a'b /c",
        "COPY a$(touch b) /c",
        'COPY ["a$(touch b)", "/c"]',
        "COPY `ls` /c",
        "COPY $1 /c",
        "COPY ${!A} /c",
        "COPY '$A' /c",
        "ADD --checksum=sha256:0 a /b",
        "ADD x.tbz2 /x",
        'ADD ["X.TAR", "/x"]',
        'WORKDIR /a"b',
        "WORKDIR $(ls)",
        "ENV URL=http://h/?x=1&y=2",
        "ENV A=~/x",
        "ENV A $(ls)",
        'SHELL ["/bin/bash", "-c"]',
        "RUM make",
    ],
)
def test_a_line_that_cannot_be_followed_is_refused_unrun(tmp_path, line):
    task = make(tmp_path, f"FROM ubuntu:24.04\n{line}\n")
    with raises(PluginError, "environment.harbor.Dockerfile") as caught:
        built(task)
    assert str(task) in str(caught.value) and line.split()[0] in str(caught.value)


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile.dockerignore"])
@pytest.mark.parametrize("word", ["COPY", "add"])
def test_copies_beside_a_dockerignore_are_refused(tmp_path, name, word):
    task = make(tmp_path, f"FROM ubuntu:24.04\n{word} notes.txt .\n")
    (task / "environment" / name).write_text("notes.txt")
    with raises(PluginError, "environment.harbor.Dockerfile"):
        built(task)


def read_by_harbor():
    """Harbor's own package, which needs Python 3.12, as its parser of tasks reads a folder."""
    reason = "harbor is not installed, or this is Python 3.11 (pip install harbor)"
    return pytest.importorskip("harbor.models.task.task", reason=reason, exc_type=ImportError).Task


CANARY = "<!-- harbor-canary GUID 1 -->\n# CANARY: not to be trained on\n\n"


@pytest.mark.parametrize("config", [CONFIG, "", "[verifier]\ntimeout_sec = 7"])
def test_a_task_is_read_as_by_harbor(tmp_path, config):
    harbor, task = read_by_harbor(), make(tmp_path)
    (task / "task.toml").write_text(config)
    (task / "instruction.md").write_text(f"{CANARY}# Reverse\n\n# canary birds sing\n")
    assert_alike(harbor, tmp_path)


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (CANARY, "# Reverse\n\n# canary birds sing"),
        ("\n", "# canary of a list"),
        ("", "<!-- harbor-canary GUID 1 --> Fix the server in /app."),
        ("", "<!-- canary\n of two lines -->\nFix it."),
    ],
)
def test_lines_that_mark_a_benchmark_are_left_out_and_no_instruction_is(tmp_path, marks, prompt):
    (make(tmp_path) / "instruction.md").write_text(f"{marks}{prompt}\n")
    (record,) = adapted("harbor", str(tmp_path)).records(0)
    assert record["prompt"] == prompt


def test_unmodified_tasks_of_harbor_s_package_are_read_as_by_harbor():
    harbor = read_by_harbor()
    tasks = assert_alike(harbor, Path(inspect.getfile(harbor)).parents[2])
    (template,) = (task for task in tasks if task.name == "template-task")  # as `harbor task init` copies it
    made = adapted("harbor", str(template))()
    (record,) = made.records(0)
    made.reset(record)
    assert call(made, "pwd") == "/app\n"
    with raises(EnvironmentFault, "environment.harbor.reward"):  # its tests are to be written
        made.reward()


def assert_alike(harbor, folder):
    """Every task that Harbor finds in a folder has its instruction and limits."""
    kind = adapted("harbor", str(folder))
    found = {Path(one["task"]): one["prompt"] for one in kind.records(0)}
    tasks = [one.parent for one in folder.rglob("task.toml") if harbor.is_valid_dir(one.parent)]
    for task in tasks:
        read = harbor(task)
        assert found[task] == read.instruction.strip()
        limits = {section: _limit(task, section, key) for section, key in LIMITS}
        wanted = read.config.environment.build_timeout_sec, read.config.agent.timeout_sec or 120.0
        assert [*limits.values()] == [*wanted, read.config.verifier.timeout_sec]
    return tasks


@pytest.mark.parametrize(
    "config",
    [
        "[environment]\nworkdir = '/srv'",
        "[verifier.env]\nKEY = 'x'",
        "[agent",
        "[verifier]\ntimeout_sec = 'long'",
        "[agent]\ntimeout_sec = 0",
    ],
)
def test_a_bad_task_is_refused_before_the_first_episode(tmp_path, config):
    (make(tmp_path) / "task.toml").write_text(config)
    with raises(PluginError, "environment.harbor.task"):
        adapted("harbor", str(tmp_path)).prepare()


@pytest.mark.parametrize("info", [{}, {"task": "elsewhere"}, {"task": 7}])
def test_a_record_without_a_task_is_named(tmp_path, info):
    make(tmp_path)
    with raises(EnvironmentFault, "environment.harbor.task"):
        adapted("harbor", str(tmp_path))().reset({"prompt": "x", **info})


@pytest.mark.parametrize("line", ["RUN apt-get install -y nothing-of-the-kind", "COPY missing.txt .", "WORKDIR /srv/x"])
def test_a_dockerfile_that_needs_an_image_is_named_with_its_line(tmp_path, line):
    task = make(tmp_path, f"FROM ubuntu:24.04\n{line}\n")
    with raises(PluginError, "environment.harbor.Dockerfile") as caught:
        built(task)
    assert str(task) in str(caught.value) and line.split()[-1] in str(caught.value)


COPIES = """# syntax=docker/dockerfile:1
# one that is no directive: escape=`
# escape=`
FROM ubuntu:24.04
WORKDIR "/app"
ENV FILE="my notes.txt" NAME=notes SET={a,b}
COPY $FILE one.txt
COPY ["my notes.txt", "two.txt"]
COPY ${NAME}.txt 'three.txt'
COPY /notes.txt four.txt
COPY --link --chown=1:1 data/* many/
COPY [mn]*.txt ./texts/
ADD data/in.txt five.txt
COPY data notes.txt all/.
COPY data ${NONE:-/app/whole}
"""


def test_copies_are_those_of_docker(tmp_path):
    """Variables are no several words, patterns take hidden files too, and a slash is the Dockerfile's folder."""
    task = make(tmp_path, COPIES)
    for name in ("my notes.txt", "data/.hidden"):
        (task / "environment" / name).write_text(name)
    made, _ = episode(tmp_path)
    assert call(made, "ls -A; cat one.txt two.txt").split() == [
        *("all", "five.txt", "four.txt", "many", "one.txt", "texts", "three.txt", "two.txt", "whole"),
        *("my", "notes.txtmy", "notes.txt"),
    ]
    found = [call(made, f"cd {name}; ls -A").split("\n")[:-1] for name in ("many", "texts", "all", "whole")]
    assert found[:2] == [[".hidden", "in.txt"], ["my notes.txt", "notes.txt"]]
    assert found[2:] == [[".hidden", "in.txt", "notes.txt"], [".hidden", "in.txt"]]
    assert call(made, 'echo "$SET"; cat three.txt').split() == ["{a,b}", "none"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("COPY notes.txt data/in.txt both", "several files"),
        ("COPY data/* both", "several files"),
        ("ADD packed .", "nothing is unpacked"),
    ],
)
def test_copies_that_docker_refuses_or_unpacks_are_refused(tmp_path, line, named):
    task = make(tmp_path, f"FROM ubuntu:24.04\n{line}\n")
    (task / "environment/data/more.txt").write_text("more")
    with tarfile.open(task / "environment/packed", "w:gz") as tar:
        tar.add(task / "environment/notes.txt", "notes.txt")
    with raises(PluginError, "environment.harbor.Dockerfile") as caught:
        built(task)
    assert named in str(caught.value)


def test_an_image_alone_is_refused_before_the_first_episode(tmp_path):
    task = make(tmp_path)
    (task / "task.toml").write_text("[environment]\ndocker_image = 'org/image:1'")
    adapted("harbor", str(tmp_path)).prepare()  # its Dockerfile is followed
    _limit.cache_clear()
    (task / "environment/Dockerfile").unlink()
    with raises(PluginError, "environment.harbor.task") as caught:
        adapted("harbor", str(tmp_path)).prepare()
    assert "org/image:1" in str(caught.value)


def test_another_mark_of_long_lines_is_refused(tmp_path):
    task = make(tmp_path, "# syntax=docker/dockerfile:1\n# Escape = `\nFROM ubuntu:24.04\nRUN true `\n && true\n")
    with raises(PluginError, "environment.harbor.Dockerfile") as caught:
        built(task)
    assert "# Escape = `" in str(caught.value)


def test_a_folder_without_tasks_ends_before_the_run(tmp_path):
    with raises(PluginError, "environment.harbor.folder"):
        adapted("harbor", str(tmp_path)).prepare()


def test_a_command_beyond_its_limit_keeps_the_files_as_they_were(tmp_path):
    task = make(tmp_path)
    (task / "task.toml").write_text(CONFIG.replace("[agent]\ntimeout_sec = 60.0", "[agent]\ntimeout_sec = 1.0"))
    made, _ = episode(tmp_path)
    assert "nothing was kept" in call(made, "touch x; sleep 5") and "x" not in call(made, "ls").split()
