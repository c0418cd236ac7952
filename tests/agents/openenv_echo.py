"""Environments written for OpenEnv."""

from openenv.core.env_server.interfaces import Action, Environment, Observation


class Message(Action):
    """Say something."""

    message: str
    loud: bool = False


class Said(Observation):
    said: str = ""


class First(Said):
    seed: int
    where: str


class Count:
    def __init__(self):
        self.step_count = 0

    def model_dump(self, mode):
        return {"step_count": self.step_count}


class Echo(Environment):
    def __init__(self):
        self.state = Count()

    def reset(self, seed=None, episode_id=None, **more):
        return First(said="ready", seed=seed, where=f"{more['split']} {more['index']}")

    def step(self, action: Message) -> Said:
        self.state.step_count += 1
        if action.message == "raise":
            raise ValueError("no such word")
        said = action.message.upper() if action.loud else action.message
        over = action.message == "bye"
        return Said(said=said, done=over, reward=1 if over else 0.5, metadata={"not": "shown"})

    def close(self): ...
