"""Run SGLang's own server for ``tilth.engines.sglang``: ``python sglang_server.py``, where SGLang is installed."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Serve until the process that started this one ends."""
    sys.path.append(str(Path(__file__).parent))
    from link import end_with, receive_settings

    settings = receive_settings()
    end_with(os.getppid(), settings["folder"])
    os.close(settings["listening"])  # SGLang listens on this port itself
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**settings["arguments"], port=settings["port"], api_key=settings["token"]))


if __name__ == "__main__":  # SGLang's own processes run this file again
    main()
