"""Agents: programs of any OpenAI client, whose calls the policy answers."""
