"""One rank of the plain loop of ``faults.py`` under torchrun: an all-reduce and a line of JSON a step."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        for step in range(1_000_000):
            dist.all_reduce(torch.ones(1))
            line = {"rank": dist.get_rank(), "step": step, "time": time.monotonic(), "pid": os.getpid()}
            file.write(json.dumps(line) + "\n")
            file.flush()
            time.sleep(0.05)


if __name__ == "__main__":
    main()
