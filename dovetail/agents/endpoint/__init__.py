"""A trajectory as an OpenAI-compatible server: agents that know nothing of training run against it unmodified."""

from dovetail.agents.endpoint.loops import black_box, command_agent, data_agent
from dovetail.agents.endpoint.server import Endpoint, OpenSession

__all__ = ["Endpoint", "OpenSession", "black_box", "command_agent", "data_agent"]
