"""Agents of an unmodified OpenAI client, for processes of environments."""

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai

import tilth
from tests.serve.game import TURNS, answer, first, score

INPUT_TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


class Plays(tilth.Agent):
    """The game by the client of Python's threads."""

    def run(self, info, base_url, api_key, model):
        self.said, messages = [], first(info)
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        for _ in range(TURNS):
            found = client.chat.completions.create(model=model, messages=messages, temperature=1.0)
            self.said.append(found.choices[0].message.content)
            messages += [found.choices[0].message, answer(self.said[-1])]

    def reward(self):
        return score(self.said)


class Speaks(Plays):
    """The game by the client of threads, or by the interface that ``info["by"]`` names."""

    def run(self, info, base_url, api_key, model):
        by = getattr(self, info["by"]) if "by" in info else super().run
        return by(info, base_url, api_key, model)

    async def streams(self, info, base_url, api_key, model):
        """By the asynchronous client and its streams."""
        self.said, messages = [], first(info)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(TURNS):
                stream = await client.chat.completions.create(model=model, messages=messages, stream=True)
                parts = [choice.delta.content or "" async for piece in stream for choice in piece.choices]
                self.said.append("".join(parts))
                messages += [{"role": "assistant", "content": self.said[-1]}, answer(self.said[-1])]

    def responses(self, info, base_url, api_key, model):
        """By OpenAI's responses, every second one a stream."""
        self.said, items = [], first(info)
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        for turn in range(TURNS):
            found = client.responses.create(model=model, input=items, stream=turn % 2 == 1)
            found = [*found][-1].response if turn % 2 else found
            self.said.append(found.output_text)
            items += [*found.output, answer(self.said[-1])]

    def messages(self, info, base_url, api_key, model):
        """By Anthropic's client, every second message a stream."""
        import anthropic

        system, *messages = first(info)
        self.said, asked = [], {"model": model, "max_tokens": 1000, "system": system["content"]}
        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        for turn in range(TURNS):
            if turn % 2:
                with client.messages.stream(**asked, messages=messages) as stream:
                    found = stream.get_final_message()
            else:
                found = client.messages.create(**asked, messages=messages, extra_body={"temperature": 1.0})
            self.said.append("".join(block.text for block in found.content))
            messages += [{"role": "assistant", "content": found.content}, answer(self.said[-1])]


class Messages(Speaks):
    """The game by Anthropic's client alone."""

    def run(self, info, base_url, api_key, model):
        return self.messages(info, base_url, api_key, model)


class Teams(tilth.Agent):
    """Games of three turns by one client, each a conversation of its own: of the first three two begin with the same
    messages. Turn by turn, or side by side where ``info["beside"]`` says so."""

    conversations = 4

    async def run(self, info, base_url, api_key, model):
        prompts = [info["prompt"], f"{info['prompt']} Help!", *[info["prompt"]] * 3]
        games = [first({"prompt": prompt}) for prompt in prompts[: info.get("games", 3)]]
        self.said = []
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(TURNS):
                turns = [self.turn(client, messages, model) for messages in games]
                for wait in [asyncio.gather(*turns)] if info.get("beside") else turns:
                    await wait

    async def turn(self, client, messages, model):
        found = await client.chat.completions.create(model=model, messages=messages)
        self.said.append(found.choices[0].message.content)
        messages += [found.choices[0].message, answer(self.said[-1])]

    def reward(self):
        return score(self.said)


class Odd(Speaks):
    """An agent that does what ``info["how"]`` says, or plays."""

    def run(self, info, base_url, api_key, model):
        self.parts, self.how = {}, info.get("how")
        if self.how is None:
            return super().run(info, base_url, api_key, model)
        self.client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        self.messages = [{"role": "user", "content": info["prompt"]}]
        self.model = model
        getattr(self, info["how"])()

    def step(self, message):
        """Who leaves does so before the answer, however fast the policy is."""
        if self.how == "leaves":
            self._thread.join()
        while self.how in ("comes_back", "comes_back_at_once") and not self._conversations.left:
            time.sleep(0.001)
        return super().step(message)

    def reward(self):
        if self.how is None:
            return super().reward()
        if self.how == "too_late":
            self.go_on()
            self.parts = {"late": float(self.refused().status_code), "torch": float("torch" in sys.modules)}
        return {"reward": 1.0, **self.parts}

    def ask(self, **more):
        messages = more.pop("messages", self.messages)
        found = self.client.chat.completions.create(**{"model": self.model, "messages": messages, **more})
        self.messages = [*messages, found.choices[0].message.model_dump(exclude_none=True)]
        return found

    def go_on(self, text="go on"):
        self.messages = [*self.messages, {"role": "user", "content": text}]

    def refused(self, **more):
        """A call that is refused, which the agent does not mind."""
        try:
            self.ask(**more)
        except openai.APIStatusError as error:
            return error
        raise AssertionError("it was answered")

    def well(self):
        found = self.ask(logprobs=True, stop="e", max_tokens=5)
        (choice,) = found.choices
        self.parts = {
            "prompt": found.usage.prompt_tokens,
            "new": found.usage.completion_tokens,
            "logprob": sum(one.logprob for one in choice.logprobs.content),
            "stops": float(choice.finish_reason == "stop"),
            "stopped": float(getattr(choice, "stop_reason", None) == "e"),
        }
        self.go_on()
        self.ask(n=1, frequency_penalty=0, top_p=1, max_completion_tokens=1000)
        assert [one.id for one in self.client.models.list()] == [self.model]

    def raises(self):
        self.ask()
        raise ValueError("as asked")

    def hangs(self):
        self.ask()
        time.sleep(60)

    def silent(self):
        pass

    def cools(self):
        self.refused(temperature=0.5)

    def seeds(self):
        self.refused(seed=3)

    def forces(self):
        self.refused(response_format={"type": "json_object"})

    def rewrites(self):
        self.ask()
        self.messages[0] = {"role": "user", "content": "another question"}
        self.go_on()
        assert self.refused().param == "messages.0"

    def drops(self):
        self.ask()
        self.messages = self.messages[1:]
        self.go_on()
        self.refused()

    def edits(self):
        self.ask()
        self.messages[-1]["content"] += "!"
        self.go_on()
        assert self.refused().param == "messages.1"

    def asks_again(self):
        messages = self.messages
        self.ask()
        self.refused(messages=messages)

    def branches(self):
        threads = [threading.Thread(target=self.refused_or_not) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    def refused_or_not(self):
        try:
            self.ask()
        except openai.APIError:
            pass

    def changes_tools(self):
        self.ask(tools=[{"type": "function", "function": TOOL}])
        self.go_on()
        self.refused()

    def another_model(self):
        self.refused(model="gpt-5")

    def leaves(self):
        asyncio.run(self.gives_up())

    async def gives_up(self):
        """A call whose client leaves before its answer."""
        async with openai.AsyncOpenAI(base_url=self.client.base_url, api_key=self.client.api_key) as client:
            call = client.chat.completions.create(model=self.model, messages=self.messages)
            task = asyncio.ensure_future(call)
            while self._conversations.turn is None:
                await asyncio.sleep(0.001)
            task.cancel()

    def comes_back(self):
        """The answer was lost, and the same call gets it."""
        asyncio.run(self.gives_up())
        self.ask(extra_headers={"x-stainless-retry-count": "1"})

    def comes_back_at_once(self):
        """By its own code, while the server does not yet know that the client has left."""
        asyncio.run(self.gives_up())
        self.ask()

    def completes(self):
        try:
            self.client.completions.create(model=self.model, prompt="?")
        except openai.NotFoundError:
            self.ask()

    def count(self, **body):
        asked = {"model": self.model, "messages": self.messages, **body}
        return self.client.post("/messages/count_tokens", body=asked, cast_to=object)["input_tokens"]

    def counts(self):
        """Beside calls, and in vain: nothing of it is part of an episode."""
        for wrong in ({"model": "gpt-5"}, {"messages": []}, {"tool_choice": {"type": "none"}, "tools": [INPUT_TOOL]}):
            try:
                self.count(**wrong)
            except (openai.BadRequestError, openai.NotFoundError):
                continue
            raise AssertionError("it was counted")
        several = [self.count(), self.count(messages=[*self.messages, *self.messages])]
        assert several[0] < several[1]
        for _ in range(2):
            before = self.count()
            with ThreadPoolExecutor() as pool:
                beside = [pool.submit(self.count) for _ in range(3)]
                found = self.ask()
            assert before == found.usage.prompt_tokens and all(one.result() > 0 for one in beside)
            self.go_on()

    def counts_by_anthropic(self):
        import anthropic

        address = str(self.client.base_url).rstrip("/").removesuffix("/v1")
        client = anthropic.Anthropic(base_url=address, api_key=self.client.api_key, max_retries=0)
        asked = {"model": self.model, "tools": [INPUT_TOOL], "system": "Say a number."}
        for turn in range(3):
            counted = client.messages.count_tokens(**asked, messages=self.messages)
            found = client.messages.create(**asked, messages=self.messages, max_tokens=12)
            self.parts[f"turn{turn}"] = float(counted.input_tokens == found.usage.input_tokens)
            self.messages = [*self.messages, {"role": "assistant", "content": found.content}]
            self.go_on()
        self.parts["fresh"] = float(client.messages.count_tokens(**asked, messages=self.messages[:1]).input_tokens)
        self.parts["last"] = float(client.messages.count_tokens(**asked, messages=self.messages).input_tokens)

    def only_counts(self):
        self.count()

    def doubles(self):
        try:
            self.client.post("/v1/messages", body={}, cast_to=object)
        except openai.NotFoundError:
            self.ask()

    def long(self):
        self.ask()
        self.go_on("much " * 400)
        error = self.refused()
        assert (error.status_code, error.code) == (400, "context_length_exceeded")

    def long_and_raises(self):
        self.ask()
        self.go_on("much " * 400)
        self.ask()

    def many(self):
        for _ in range(9):
            self.ask()
            self.go_on()

    def wrong_token(self):
        self.client.api_key = "sk-wrong"
        self.ask()

    def too_late(self):
        self.ask()
