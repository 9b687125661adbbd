"""A taskset without end whose environment plays the user, for verifiers from 0.4 on."""

import itertools

import verifiers.v1 as vf


class GuessData(vf.TaskData):
  number: int


class GuessTask(vf.Task[GuessData]):
  pass


class GuessConfig(vf.EnvConfig):
  player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
  async def run(self, task, agents):
    reward = 0.0
    async with agents.player.interaction(task) as interaction:
      segment = await interaction.turn("Guess a number from 1 to 9.")
      for _ in range(3):
        said = segment.last_reply.strip()
        if segment.terminated or said == str(task.data.number):
          reward = float(not segment.terminated)
          break
        segment = await interaction.turn("Higher." if said < str(task.data.number) else "Lower.")
    interaction.trace.record_reward("found", reward)


class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
  INFINITE = True

  def load(self):
    for number in itertools.cycle(range(1, 10)):
      yield GuessTask(GuessData(prompt=None, number=number))


class TwoPlayersConfig(vf.EnvConfig):
  one: vf.AgentConfig = vf.AgentConfig()
  other: vf.AgentConfig = vf.AgentConfig()


__all__ = ["Guess", "GuessEnv"]
