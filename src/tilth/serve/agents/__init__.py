"""Agents: programs of any client of OpenAI or Anthropic, whose calls the policy answers."""
