"""Environments for tests, imported by path in processes of their own."""

import asyncio
import os
import time

import tilth


class Talker(tilth.Environment):
    """Does what the policy says."""

    made = 0

    def reset(self, info):
        Talker.made += 1
        self.heard = []
        if info.get("fail"):
            raise ValueError("no such record")
        return [{"role": "user", "content": info["prompt"]}]

    async def step(self, message):
        said = message["content"]
        self.heard.append(said)
        if said == "print":
            print("heard")
        if said == "hang":
            time.sleep(60)
        if said == "spin":
            sum(1 for _ in iter(int, 1))
        if said == "gil":
            import re

            re.match(r"(a+)+$", "a" * 64 + "b")
        if said == "exit":
            os._exit(3)
        if said == "kill":
            os.kill(os.getpid(), 9)
        if said == "raise":
            raise RuntimeError("as asked")
        if said == "bytes":
            return [b"no"], False
        if said.startswith("slow"):
            await asyncio.sleep(1.0)
        if said == "stop":
            os.kill(os.getpid(), 19)
        if said == "object":
            return [{"role": "user", "content": "", "extra": object()}], False
        if said == "mute":
            raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})
        if said == "much":
            return [{"role": "user", "content": "x" * 300_000}], False
        if said == "order":
            return [], 0.5, True
        if said == "tools":
            return self.call_tools({"tool_calls": [{"name": "wait", "arguments": {}}]}), False
        if said == "new":
            return [{"role": "user", "content": str(time.monotonic_ns())}], False
        await asyncio.sleep(0.001)
        return [{"role": "user", "content": f"{len(self.heard)} {said}"}], said == "bye"

    @tilth.tool
    async def wait(self) -> str:
        """Wait."""
        return "waited"

    def reward(self):
        return {"reward": len(self.heard), "first": len(self.heard[0])}


class Forks(tilth.Environment):
    """Forks in each step, and lets the fork come back."""

    def step(self, message):
        os.fork()
        return [{"role": "user", "content": "again"}], False

    def reward(self):
        return 0.0


class Closes(tilth.Environment):
    """Writes to a file at its end."""

    def reset(self, info):
        self.path = info["path"]
        return [{"role": "user", "content": "go"}]

    def step(self, message):
        raise RuntimeError("as asked")

    def reward(self):
        return 0.0

    async def close(self):
        with open(self.path, "a") as file:
            file.write("closed\n")


class Wide(tilth.Environment):
    """Tools that misbehave."""

    @tilth.tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two
        integers.

        Not shown.
        """
        return a + b

    @tilth.tool
    async def late(self) -> bytes:
        """Come late."""
        await asyncio.sleep(0)
        return b"caf\xc3\xa9 \xff"

    @tilth.tool
    def much(self) -> str:
        """Say much."""
        return "x" * 3_000_000

    @tilth.tool
    def loop(self) -> list:
        """Return what is no JSON."""
        found = []
        found.append(found)
        return found

    @tilth.tool
    def fall(self) -> dict:
        """Raise."""
        raise KeyError("k")


class Sums(tilth.Environment):
    """Asks three sums in turn, each after another time."""

    def reset(self, info):
        self.said = []
        return [{"role": "user", "content": info["prompt"]}]

    def step(self, message):
        time.sleep(0.01 * (len(message["content"]) % 3))
        self.said.append(message["content"])
        return [{"role": "user", "content": f"{len(self.said)}+1="}], len(self.said) > 2

    def reward(self):
        return sum(len(said) for said in self.said) % 3
