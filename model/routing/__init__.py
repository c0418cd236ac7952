"""Keep Routing: the trainer replays the experts that the rollout engine recorded."""

from keel.model.routing.replay import replay_routes

__all__ = ["replay_routes"]
