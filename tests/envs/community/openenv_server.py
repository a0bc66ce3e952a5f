"""Two environments as OpenEnv's template writes them, at two ports: a word is guessed by one text, or by a form of two
fields."""

import sys
from threading import Thread

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    """A guess."""

    word: str


class Form(Action):
    """A guess of two letters."""

    first: str
    second: str = "t"


class Said(Observation):
    answer: str


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.word, self.state_ = ("bat", "cat")[(seed or 0) % 2], State(episode_id="1", step_count=0)
        return Said(answer="say a word")

    def step(self, action, timeout_s=None, **options):
        said = action.word if isinstance(action, Word) else f"{action.first}a{action.second}"
        if said == "boom":
            raise ValueError("as asked")
        self.state_.step_count += 1
        return Said(
            answer="yes" if said == self.word else "no", done=said == self.word, reward=float(said == self.word) - 0.1
        )

    @property
    def state(self):
        return self.state_


def serve(port, action):
    uvicorn.run(create_fastapi_app(Guess, action, Said, max_concurrent_envs=8), port=port, log_level="warning")


if __name__ == "__main__":
    Thread(target=serve, args=(int(sys.argv[2]), Form), daemon=True).start()
    serve(int(sys.argv[1]), Word)
