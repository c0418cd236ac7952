"""Multi-turn episodes with tools and environments.

`runner.py` runs the episodes of a group. An episode (`episode.py`) alternates between the policy,
whose turns `conversation.py` records as token segments, and an environment. Environments run in
processes of their own: `env_process/` talks to them, and `env_runtime/` is the code inside. With an
agent program, `endpoint/` serves the policy's turns.
"""
