"""Task folders of Harbor (instruction.md, task.toml, environment/, tests/), run in the sandbox: ``harbor:FOLDER``."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shlex
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any, ClassVar

from tilth.core.errors import PluginError
from tilth.envs.environment import Environment, EnvironmentFault, Message, tool
from tilth.sandbox.run import Sandbox, SandboxLimits

SHELL = r"""
import base64, io, json, os, subprocess, sys, tarfile
given, out, found = json.load(sys.stdin), io.BytesIO(), {}
tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)
for number, data in enumerate(given["files"]):
    for name in ("tests", "logs") if number else ():
        if os.path.lexists(name): os.rename(name, f".left-{number}-{name}-{os.getpid()}")
    tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))).extractall(".")
for name in ("app", "workspace", "logs/verifier", "logs/agent"): os.makedirs(name, exist_ok=True)
done = subprocess.run(["/bin/bash", "-c", given["command"]], env=given["env"], cwd="/app",
                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
    if given["keep"]: tar.add(".")
for name in ("reward.json", "reward.txt"):
    if os.path.isfile(f"logs/verifier/{name}"): found[name] = open(f"logs/verifier/{name}").read()
kept = base64.b64encode(out.getvalue()).decode()
print(json.dumps([done.returncode, done.stdout.decode(errors="replace"), kept, found]))
"""
"""Program of the sandbox: unpacks files, runs a command, packs the files again. What is unpacked second are the tests,
in place of whatever an episode put there."""
BUILD = r"""set -eE +B; shopt -s dotglob; trap 'echo "in: $BASH_COMMAND"' ERR
put() { local here=$PWD to=${!#} count=0 one IFS=; [[ $to == /* ]] || to=$here/$to
  if [[ $to == */ || $to == */. ]]; then mkdir -p "$to"; else mkdir -p "$(dirname "$to")"; fi
  cd /work/environment; while [ $# -gt 1 ]; do for one in ./$1; do count=$((count + 1))
    [ $count -lt 2 ] || [ -d "$to" ] || { echo "$to: several files need a folder; end it with /"; return 1; }
    if [ -d "$one" ]; then mkdir -p "$to"; cp -r "$one/." "$to"; else cp "$one" "$to"; fi; done; shift; done
  cd "$here"; }
add() { (IFS=; cd /work/environment; while [ $# -gt 1 ]; do for one in ./$1; do
    if tar -tf "$one" 2> /dev/null | grep -q .; then echo "ADD $one: nothing is unpacked; COPY its files"; exit 1; fi
  done; shift; done); put "$@"; }
"""
"""Functions for COPY and ADD. Without a word's separators the one thing that happens to its text is that it is a
pattern, of hidden files too, and a leading slash is of the folder that is copied from."""
IGNORED = {"USER", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "MAINTAINER"}
"""Instructions of a Dockerfile that are left out: there is no image, one user, and nothing starts by itself."""
QUOTE = r"""(?<!\\)["']"""
"""Quotes that Docker takes away."""
MARKS = r"""[`\\"']|\$(?![A-Za-z_]|\{[A-Za-z_])"""
"""What a word may not have: it would mean another thing to a shell."""
ARCHIVE = r"(?i)\S+(://|\.(tar|t[agblx]z2?|tzst)\b)\S*"
"""What ADD would fetch or unpack."""
READONLY = {"UID", "EUID", "PPID", "BASHOPTS", "BASH_VERSINFO", "SHELLOPTS"}
"""Variables of bash that cannot be set."""
WORD = r"""(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'\\])+"""
"""Word of a line, with what is in quotes."""
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}
BYTES = 64 << 20
"""Most bytes of an episode's files."""
TASK = "environment.harbor.task"
LIMITS = {
    ("environment", "build_timeout_sec"): 600.0, ("agent", "timeout_sec"): 120.0, ("verifier", "timeout_sec"): 600.0,
}  # fmt: skip
"""Section and key of each limit of a task -> its default: Harbor's, but for that of a command, which has none there."""
UNKNOWN = {
    "environment": ("env", "workdir", "mcp_servers", "healthcheck", "gpus", "tpu"),
    "verifier": ("env", "environment", "collect"),
}
"""Section -> keys that change what a task is, and are not followed."""
CANARY = re.compile(r"(?i)\s*(?:<!--.*canary.*-->|#.*canary.*)\s*")
"""Whole first lines of an instruction that mark it as a part of a benchmark; Harbor shows them to no agent."""
_sandbox = cache(Sandbox)


def packed(folder: Path, name: str) -> str:
    """Return a folder under a name as base64 of a tar file; an empty one if there is none."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.add(folder, name) if folder.is_dir() else None
    return base64.b64encode(out.getvalue()).decode()


def run(command: str, files: Sequence[str], seconds: float, *, keep: bool = True) -> tuple[int, str, str, Any]:
    """Return exit code, output, packed files and rewards of a command; code -1 if it broke a limit, which it names."""
    given = {"command": command, "files": files, "env": VARIABLES, "keep": keep}
    limits = SandboxLimits(seconds, seconds, 2 << 30, 128, BYTES, 2 * BYTES)
    found = _sandbox().run(SHELL, stdin=json.dumps(given), limits=limits)
    return json.loads(found.stdout) if found.state == "ok" else (-1, found.limit or found.stderr[-500:], "", {})


@cache
def built(task: Path) -> tuple[str, str]:
    """Return the packed files of a task's container, its Dockerfile followed in the sandbox without an image or a
    network, and commands for the variables and the folder that it ends with. PluginError: a line of it fails there, or
    asks for what the sandbox has not."""
    file = task / "environment" / "Dockerfile"
    kept = 'cd "$PWD"; export -p > /work/.begin; printf "cd %q\\n" "$PWD" >> /work/.begin; rm -r /work/environment'
    try:
        steps = steps_of(file.read_text()) if file.is_file() else []
        ignores = [name for name in (".dockerignore", "Dockerfile.dockerignore") if (file.parent / name).exists()]
        if ignores and any(step.startswith(("put ", "add ")) for step in steps):
            raise ValueError(f"COPY beside a {ignores[0]}, which is not followed; take it away, and what it names")
    except ValueError as error:
        raise PluginError(f"{file}: {error}", key="environment.harbor.Dockerfile") from None
    command = "\n".join([BUILD, "mkdir -p /work/environment", *steps, kept])
    files = packed(task / "environment", "environment")
    code, said, state, _ = run(command, [files], _limit(task, "environment", "build_timeout_sec"))
    if code:
        raise PluginError(
            f"{file} cannot be followed in the sandbox: {said.strip()[-300:]}", key="environment.harbor.Dockerfile"
        )
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(state))) as tar:
        begin = tar.extractfile("./.begin")
        assert begin is not None  # a file of that name is a file
        return state, begin.read().decode()


def steps_of(dockerfile: str) -> list[str]:
    """Return commands of bash that do what the instructions of a Dockerfile do. ValueError: one cannot be done so."""
    if found := re.match(r"(?i)(?:#\s*\w+\s*=.*\n)*(#\s*escape\s*=\s*`.*)", dockerfile):
        raise ValueError(f"{found[1]}: a line goes on behind a \\ alone; leave it out")
    told = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    text = "\n".join(told)  # a line goes on behind comments and empty lines
    lines = [line.strip() for line in re.sub(r"\\[ \t]*\n", "", text).splitlines() if line.strip()]
    if sum(line.split()[0].upper() == "FROM" for line in lines) > 1:
        raise ValueError("has several stages (FROM), of which the sandbox builds none; write one")
    steps, env, arg, outside = list[str](), {*VARIABLES}, set[str](), set[str]()
    for line in lines:
        word, *rest = re.split(r"\s+", line, maxsplit=1)
        if (name := word.upper()) == "FROM":  # what is before it is seen behind it where it is named again
            outside, arg = arg, set()
            steps += [f'outside_{one}="${one}"; unset {one}' for one in sorted(outside)]
        elif name in ("ENV", "ARG"):  # an ENV wins over an ARG, which is there while building only
            given = {key: text for key, text in _assigned(name, *rest).items() if name == "ENV" or key not in env}
            again = {key: f'{key}="$outside_{key}"' for key, text in given.items() if key == text and key in outside}
            steps += [f"export {' '.join((given | again).values())}"] if given else []
            (env if name == "ENV" else arg).update(given)
        else:
            steps += _steps(name, *rest)
    return [*steps, *(f"unset {one}" for one in sorted(arg - env))]


def _assigned(name: str, rest: str = "") -> dict[str, str]:
    """Return the variables of an ENV or ARG, each with what a shell exports. ValueError: a shell reads it otherwise."""
    key, *value = re.split(r"\s+", rest, maxsplit=1)
    plain = name == "ENV" and "=" not in key  # ENV KEY VALUE
    bare = "" if plain else re.sub(r""""[^"]*"|'[^']*'""", "", rest)
    if found := re.search(r"`|\$\(", rest) or re.search(r"[&;|<>()~]", bare):
        raise ValueError(f"{name} {rest[:60]}: {found[0]!r} means another thing to a shell; put it into quotes")
    if plain:
        return {key: f'{key}="{re.sub(QUOTE, "", "".join(value))}"'}
    if not rest or (left := re.sub(WORD, "", rest).strip()):
        raise ValueError(f"{name} {rest[:60]}: {left if rest else 'nothing'!r} is no variable; write {name} KEY=VALUE")
    given = {one.partition("=")[0]: one for one in re.findall(WORD, rest)}
    if own := READONLY & given.keys():
        raise ValueError(f"{name} {min(own)}: bash keeps this variable for itself; use another name")
    return given


def _exact(rest: str) -> list[str] | None:
    """Return the words of an instruction in its form of a list; None: it has the form of a shell."""
    try:
        found = json.loads(rest) if rest.startswith("[") else None
    except ValueError:  # RUN [ -f a ]
        return None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None


def _steps(name: str, rest: str = "") -> list[str]:
    if name in IGNORED:
        return []
    flags = re.match(r"(--[a-z-]+(?:=\S*)?\s+)*", rest)
    assert flags is not None  # it matches nothing too
    if other := re.sub(r"--(chown=\S*|link(=\S*)?)(?=\s)", "", flags[0]).strip():
        raise ValueError(f"{name} {other}: the sandbox has no such option; leave it out")
    if "<<" in rest and name in ("RUN", "COPY", "ADD"):
        raise ValueError(f"{name} {rest[:60]}: here-documents are not followed; write a file and COPY it")
    rest = rest[flags.end() :]
    exact = _exact(rest)
    if name in ("COPY", "ADD"):
        if found := re.search(ARCHIVE, rest if name == "ADD" else ""):
            raise ValueError(f"ADD {found[0]}: nothing is fetched or unpacked; COPY what it would be")
        words = [_word(name, one) for one in exact or rest.split()]
        if len(words) < 2:
            raise ValueError(f"{name} {rest[:60]}: what to copy or where to is missing; write {name} FILE FOLDER/")
        if any(".." in one.strip('"').split("/") for one in words[:-1]):
            raise ValueError(f"{name} {rest[:60]}: nothing outside of the Dockerfile's folder is copied; leave out ..")
        return [" ".join(["put" if name == "COPY" else "add", *words])]
    if name == "RUN":
        return [shlex.join(exact or ["/bin/sh", "-c", rest])]
    if name == "WORKDIR":
        to = _word(name, rest)
        return [f"mkdir -p {to}; cd {to}"]
    raise ValueError(f"{name}: there is no such instruction, or the sandbox cannot follow it")


def _word(name: str, text: str) -> str:
    """Return a word of an instruction for bash, which replaces its variables as Docker does. ValueError."""
    plain = re.sub(r"""^(?:"(.*)"|'([^$]*)')$""", r"\1\2", text)
    if found := re.search(MARKS, plain):
        raise ValueError(f"{name} {text[:60]}: {found[0]!r} means another thing to a shell; use a name without it")
    return f'"{plain}"'


@cache
def _limit(task: Path, section: str, key: str = "timeout_sec") -> float:
    """Return a limit of a task in seconds. PluginError: its task.toml says none, or asks for what is not followed."""
    file = task / "task.toml"
    try:
        given = tomllib.loads(file.read_text())
        for name in (name for name in UNKNOWN.get(section, ()) if given.get(section, {}).get(name)):
            raise PluginError(f"{file}: {section}.{name} is not followed in the sandbox; leave it out", key=TASK)
        image = given.get("environment", {}).get("docker_image")
        if image and not (task / "environment/Dockerfile").is_file():
            message = f"{file}: environment.docker_image = {image!r} is not followed; write environment/Dockerfile"
            raise PluginError(message, key=TASK)
        found = float(given.get(section, {}).get(key, LIMITS[section, key]))
    except (ValueError, TypeError, AttributeError) as error:
        raise PluginError(f"{file}: {error}; {section}.{key} is a number of seconds", key=TASK) from None
    if not 0 < found < math.inf:
        raise PluginError(f"{file}: {section}.{key} = {found} is no number of seconds above 0", key=TASK)
    return found


class HarborEnvironment(Environment, declares=False):
    """Asks a task's instruction; each command runs on the files that the last one left; the tests give the reward."""

    id: ClassVar[str] = ""

    @classmethod
    def prepare(cls) -> None:
        """Check that there are tasks, and the limits of each. PluginError."""
        if not (tasks := cls._tasks()):
            message = f"harbor:{cls.id}: no folder there has task.toml, instruction.md and tests/test.sh"
            raise PluginError(message, key="environment.harbor.folder")
        for task in tasks:
            for place in LIMITS:
                _limit(task, *place)

    @classmethod
    def records(cls, count: int) -> Iterator[dict[str, Any]]:
        """Yield a record for each task."""
        for task in cls._tasks()[: count or None]:
            asked = dropwhile(CANARY.fullmatch, (task / "instruction.md").read_text().split("\n"))
            yield {"prompt": "\n".join(asked).strip(), "task": str(task)}

    @classmethod
    @cache
    def _tasks(cls) -> list[Path]:
        found = sorted(path.parent.resolve() for path in Path(cls.id).glob("**/task.toml"))
        return [task for task in found if (task / "instruction.md").is_file() and (task / "tests/test.sh").is_file()]

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Begin with the files of the record's ``task``. EnvironmentFault: it names none."""
        if (named := info.get("task")) is None or Path(str(named)) not in self._tasks():
            message = (
                f"task = {named!r}: the record names no task of harbor:{self.id}; "
                f"write records by: tilth env records harbor:{self.id} FILE.jsonl"
            )
            raise EnvironmentFault(message, key=TASK)
        self._task = Path(str(named))
        self._state, self._begin = built(self._task)
        return [{"role": "user", "content": info["prompt"]}]

    @tool
    def bash(self, command: str) -> str:
        """Run a command in the folder of the task."""
        code, said, state, _ = run(f"{self._begin}{command}", [self._state], _limit(self._task, "agent"))
        self._state = state or self._state
        return said if code == 0 else f"{said}\nexit code {code}" if code > 0 else f"error: {said}; nothing was kept"

    def reward(self) -> dict[str, float]:
        """Return what the tests write to /logs/verifier. EnvironmentFault: they write nothing of the kind."""
        tests = packed(self._task / "tests", "tests")
        code, said, _, found = run(
            f"{self._begin}/bin/bash /tests/test.sh", [self._state, tests], _limit(self._task, "verifier"), keep=False
        )
        try:
            parts = json.loads(found["reward.json"]) if "reward.json" in found else {"reward": found["reward.txt"]}
            paid = {name: float(value) for name, value in parts.items()}
            if all(map(math.isfinite, paid.values())):
                return paid | {"reward": paid["reward"]}
            raise ValueError
        except (KeyError, ValueError, TypeError, AttributeError):
            message = (
                f"{self._task.name}: tests/test.sh (exit code {code}) left no reward in /logs/verifier: {said[-300:]}"
            )
            raise EnvironmentFault(message, key="environment.harbor.reward") from None
