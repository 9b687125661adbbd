"""The policy as a server of OpenAI's API, for agents that drive their own conversations.

`policy_server.py` is HTTP, `requests.py` and `answers.py` are OpenAI's form, `session.py` keeps
what was sampled for one attempt, `request_scheduling.py` sends requests to the engine.
"""
