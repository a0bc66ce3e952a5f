"""What one process imports: torch takes a fifth of the start of a run to import FSDP and DTensor."""

import subprocess
import sys

CODE = """
import sys
import tilth.launch.workers, tilth.roles.policy, tilth.roles.rollout, tilth.training.engine
print(sorted(name for name in sys.modules if name.startswith(("torch.distributed.fsdp", "torch.distributed.tensor"))))
"""


def test_one_process_does_not_import_fsdp():
    assert subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout == "[]\n"
