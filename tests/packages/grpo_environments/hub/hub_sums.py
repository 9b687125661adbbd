"""A taskset with a tool in a process of its own, for verifiers from 0.4 on."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
  answer: str


class Adder(vf.Toolset[vf.ToolsetConfig]):
  TOOL_PREFIX = None

  @vf.tool
  async def add(self, a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


class SumTask(vf.Task[SumData]):
  @classmethod
  def toolsets(cls, config):
    return [Adder(vf.ToolsetConfig())]

  @vf.reward
  async def right(self, trace: vf.Trace) -> float:
    return float(trace.last_reply == self.data.answer)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
  def load(self):
    yield SumTask(SumData(prompt="30 + 4?", answer="34"))


__all__ = ["Sums"]

if __name__ == "__main__":
  Adder.run()
