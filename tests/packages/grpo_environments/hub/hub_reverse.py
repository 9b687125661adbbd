"""A taskset of one turn, as packages of verifiers from 0.4 on have them."""

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
  answer: str


class ReverseTask(vf.Task[ReverseData]):
  @vf.reward(weight=0.75)
  async def exact(self, trace: vf.Trace) -> float:
    return float(trace.last_reply == self.data.answer)

  @vf.reward(weight=0.25)
  async def short(self, trace: vf.Trace) -> float:
    return float(len(trace.last_reply) <= len(self.data.answer))

  @vf.metric
  async def length(self, trace: vf.Trace) -> float:
    return float(len(trace.last_reply))


class ReverseConfig(vf.TasksetConfig):
  words: list[str] = ["abc", "hello", "world"]


class Reverse(vf.Taskset[ReverseTask, ReverseConfig]):
  def load(self):
    for word in self.config.words:
      prompt, answer = f"Reverse {word}", word[::-1]
      yield ReverseTask(ReverseData(prompt=prompt, system_prompt="Be brief.", answer=answer))


__all__ = ["Reverse"]
