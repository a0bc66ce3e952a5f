"""A plugin for runs that are updated: ``ASKS`` is a JSON file, step -> arguments of commands to run after it, once.

``END`` is a step after which the run is asked to end.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import tilth


@tilth.callback("asks")
class Asks(tilth.Callback):
    def on_step_end(self, run, step, metrics):
        file = Path(os.environ["ASKS"])
        left = json.loads(file.read_text()) if file.exists() else {}
        commands = left.pop(str(step), [])
        file.write_text(json.dumps(left))
        if os.environ.get("END") == str(step):
            os.kill(os.getpid(), signal.SIGTERM)
        for arguments in commands:
            environment = {name: value for name, value in os.environ.items() if name != "BREAK"}
            command = [sys.executable, "-m", "tilth", "guard", "update", str(run.directory.path), *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            with file.with_name("answers").open("a") as answers:
                answers.write(json.dumps([done.returncode, done.stdout, done.stderr]) + "\n")
