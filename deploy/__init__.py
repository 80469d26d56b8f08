"""From here to the nodes: the command line, the plan, SSH, sync, the agent and the supervisor."""
