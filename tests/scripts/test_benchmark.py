"""The benchmark's arithmetic on recorded runs, its inputs, and its watch over processes."""

import collections
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.batching import layout, packing
from grpo_jax.learn import optim, token_scores, train_step
from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.rl import objectives
from grpo_jax.types import Batch, Denominators

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "benchmark"
sys.path.append(str(SCRIPTS))

import compare  # noqa: E402
import our_reward  # noqa: E402
import ours  # noqa: E402
import processes  # noqa: E402
import summary  # noqa: E402
import trace_kinds  # noqa: E402
import workload as workloads  # noqa: E402

MODEL = {
  "hidden_size": 4,
  "intermediate_size": 6,
  "num_hidden_layers": 3,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "vocab_size": 10,
}


def make_run(walls, *, peak_mib=100.0, prompt_tokens=6, completion_tokens=20):
  """A record of two prompts with two completions each; a fifth of the time is sampling."""
  steps = [
    {
      "wall_s": wall,
      "generate_s": wall / 5,
      "train_s": wall / 2,
      "prompt_tokens": prompt_tokens,
      "completion_tokens": completion_tokens,
      "trained_tokens": prompt_tokens + completion_tokens,
      "reward_mean": 0.5,
    }
    for wall in walls
  ]
  return {
    "workload": {"prompts": 2, "group": 2, "dtype": "float32"},
    "steps": steps,
    "process": {"wall_s": 10 * sum(walls), "peak_mib": peak_mib, "load_average_before": 0.5},
  }


def make_result(rounds):
  """A result on a machine whose best float32 product runs at 200 GFLOP/s."""
  return {
    "machine": {"processor": "a processor", "cores": 2},
    "model": MODEL,
    "ceilings": [
      {"numpy_float32": 150.0, "jax_float32": 180.0, "jax_bfloat16": 400.0},
      {"numpy_float32": 200.0, "jax_float32": 170.0, "jax_bfloat16": 390.0},
    ],
    "rounds": rounds,
  }


def test_medians_leave_out_the_first_step_which_compiles():
  assert summary.median_of_steps(make_run([99.0, 1.0, 5.0, 2.0]), "wall_s") == 2.0


def test_medians_use_the_first_step_when_there_is_no_other():
  assert summary.median_of_steps(make_run([7.0]), "wall_s") == 7.0


def test_ratios_pair_the_runs_of_one_round():
  rounds = [
    {"ours": make_run([9, 1.0]), "trl": make_run([9, 4.0])},  # 4
    {"ours": make_run([9, 2.0]), "trl": make_run([9, 6.0])},  # 3
    {"ours": make_run([9, 4.0]), "trl": make_run([9, 8.0])},  # 2
  ]
  found = summary.ratios(rounds, lambda run: summary.median_of_steps(run, "wall_s"), "trl")
  assert found == summary.Spread(low=2.0, median=3.0, high=4.0)


def test_ratio_rows_name_every_peer_and_put_ours_below_the_line():
  fast = make_run([9, 2.0], peak_mib=100.0, completion_tokens=20)
  slow = make_run([9, 8.0], peak_mib=250.0, completion_tokens=10)
  programs = {"ours": fast, "ours-all": slow, "trl": slow, "tunix": slow}
  rows = summary.ratio_rows(make_result([programs]))
  assert {peer for peer, *_ in rows} == {"trl", "tunix"}
  assert {row[4] for row in rows if row[1] == "ours-all"} == {"1.00"}
  by_name = {(peer, name): median for peer, ours, name, _, median, _ in rows if ours == "ours"}
  assert by_name["trl", "step"] == "4.00"
  assert by_name["trl", "step, per completion token"] == "8.00"  # 8/10 against 2/20.
  assert by_name["trl", "peak memory"] == "2.50"
  assert by_name["trl", "whole process"] == "1.55"  # 170 s against 110 s.


def test_useful_work_equals_a_count_token_by_token():
  run = make_run([1.0], prompt_tokens=2 * 3, completion_tokens=4 * 5)
  # A layer: query 4x4, key 4x2, value 4x2, output 4x4, three products of 4x6.
  layer = 16 + 8 + 8 + 16 + 3 * 24
  total = 0.0
  for _ in range(2):  # prompts of 3 tokens: position i attends to i + 1/2 keys on average.
    for i in range(3):
      total += 3 * (2 * layer + 4 * 4 * (i + 0.5))
    for _ in range(2):  # completions of 5 tokens.
      for i in range(5):
        total += 3 * (2 * layer + 4 * 4 * (3 + i + 0.5)) + 2 * 4 * 10
  work = summary.useful_work(run["steps"][0], run, MODEL)
  assert work.sampling == pytest.approx(total / 1e9, rel=1e-12)
  assert work.update == pytest.approx(3 * total / 1e9, rel=1e-12)


def test_rates_divide_work_by_the_time_of_its_own_phase():
  run = make_run([50.0, 1.0, 3.0])
  work = summary.useful_work(run["steps"][1], run, MODEL)
  reached = summary.rates(run, MODEL)
  assert reached.sampling == pytest.approx(2 * work.sampling / (4.0 / 5))
  assert reached.update == pytest.approx(2 * work.update / (4.0 / 2))


def test_ceiling_is_the_best_of_any_library_at_any_time():
  result = make_result([{"ours": make_run([1.0])}])
  assert summary.ceiling_of(result, "float32") == 200.0
  assert summary.ceiling_of(result, "bfloat16") == 400.0


def cells_of(runs, result=None):
  row = summary.program_row(result or make_result([]), "ours", runs)
  return dict(zip(summary.PROGRAM_COLUMNS, row, strict=True))


def test_program_row_holds_medians_over_rounds_and_their_spread():
  cells = cells_of([make_run([3.0, wall], peak_mib=mib) for wall, mib in [(1, 7), (5, 9), (2, 8)]])
  assert (cells["step s"], cells["sample s"]) == ("2.00 (1.00 to 5.00)", "0.40 (0.20 to 1.00)")
  assert cells["update s"] == "1.00 (0.50 to 2.50)"
  # Processes of 40, 80 and 50 s, with steps of 4, 8 and 5 s in all.
  assert (cells["first step s"], cells["outside steps s"]) == ("3.00", "45.00 (36.00 to 72.00)")
  assert cells["peak MiB"] == "8 (7 to 9)"


def test_program_row_holds_the_share_of_the_ceiling_of_sampling_and_of_the_update():
  fast, slow = make_run([9.0, 1e-9]), make_run([9.0, 2e-9])
  work = summary.useful_work(fast["steps"][1], fast, MODEL)
  shares = [work.sampling / 0.2e-9 / 200, work.sampling / 0.4e-9 / 200]  # of 200 GFLOP/s.
  cells = cells_of([fast, slow])
  assert cells["sample of ceiling"] == (
    f"{sum(shares) / 2:.0%} ({min(shares):.0%} to {max(shares):.0%})"
  )
  assert cells_of([fast])["update of ceiling"] == f"{work.update / 0.5e-9 / 200:.0%}"


def test_text_shows_the_runs_that_compiled_apart_from_the_rounds():
  rounds = [{"ours": make_run([3, 1.0]), "trl": make_run([3, 4.0])}]
  result = make_result(rounds) | {"cold": {"ours": make_run([99, 50.0])}}
  cold, _, counted = summary.text(result).partition("Compiled before:")
  assert "Nothing compiled before, not counted below:" in cold and "50.00" in cold
  assert "trl" not in cold
  assert "50.00" not in counted and "1.00" in counted
  assert "ompiled before" not in summary.text(make_result(rounds) | {"cold": {}})


def test_text_warns_when_programs_had_other_prompts():
  equal = make_result([{"ours": make_run([1, 2.0]), "trl": make_run([1, 4.0])}])
  assert "NOT EQUAL WORK" not in summary.text(equal)
  other = make_result([{"ours": make_run([1, 2.0]), "trl": make_run([1, 4.0], prompt_tokens=7)}])
  assert "NOT EQUAL WORK: round 0" in summary.text(other)


def test_text_of_peers_alone_has_no_ratios():
  shown = summary.text(make_result([{"trl": make_run([1, 2.0]), "tunix": make_run([1, 3.0])}]))
  assert "peer ÷ ours" not in shown
  assert "| tunix" in shown


def test_show_prints_an_earlier_result(tmp_path, capsys, monkeypatch):
  path = tmp_path / "result.json"
  path.write_text(json.dumps(make_result([{"ours": make_run([1, 2.0])}])))
  monkeypatch.setattr(sys, "argv", ["compare.py", "--show", str(path)])
  compare.main()
  assert "a processor, 2 cores; 1 round;" in capsys.readouterr().out


@pytest.mark.parametrize("is_warm", [True, False])
def test_what_compiles_runs_once_before_the_rounds_of_a_warm_benchmark(
  tmp_path, monkeypatch, capsys, is_warm
):
  ran = []

  def run_program(program, python, workload, folder, compiled):
    ran.append(program)
    return make_run([9.0, float(len(ran))])

  monkeypatch.setattr(compare, "run_program", run_program)
  monkeypatch.setattr(compare, "measure_ceiling", lambda *_: {"numpy_float32": 1.0})
  monkeypatch.setattr(workloads, "write_problems", lambda path: None)
  (tmp_path / "config.json").write_text("{}")
  given = ["--model", str(tmp_path), "--json", "j", "--rounds", "2"]
  given += ["--trl-python", "a", "--tunix-python", "b"] + ["--warm"] * is_warm
  result = compare.compare(compare.parse(given), tmp_path)
  before = ["ours", "ours-all", "tunix"] if is_warm else []
  everyone = ["ours", "ours-all", "trl", "tunix"]
  assert ran == [*before, *everyone, *everyone]
  assert list(result["cold"]) == before
  steps = [run["steps"][1]["wall_s"] for turn in result["rounds"] for run in turn.values()]
  assert steps == [float(i + 1) for i in range(len(before), len(ran))]
  said = capsys.readouterr().out
  assert "round 1 trl: step" in said and ("cold ours: step 1.00 s" in said) == is_warm


def test_compiled_programs_are_kept_for_each_program_and_never_come_from_the_user(tmp_path):
  variable = "JAX_COMPILATION_CACHE_DIR"
  found = {name: compare.environment_of(name, tmp_path).get(variable) for name in compare.SCRIPTS}
  assert found.pop("trl") is None  # it compiles nothing.
  assert {name: pathlib.Path(path).parent for name, path in found.items()} == dict.fromkeys(
    ("ours", "ours-all", "tunix"), tmp_path
  )
  assert len(set(found.values())) == 3


def test_only_programs_with_an_interpreter_run_and_ours_first():
  base = ["--model", "m", "--json", "j"]
  assert list(compare.interpreters(compare.parse(base))) == ["ours", "ours-all"]
  both = compare.parse([*base, "--tunix-python", "b", "--trl-python", "a"])
  ours_twice = {"ours": sys.executable, "ours-all": sys.executable}
  assert compare.interpreters(both) == ours_twice | {"trl": "a", "tunix": "b"}


def test_workloads_of_programs_differ_only_where_the_options_say(tmp_path):
  options = compare.parse(
    ["--model", "m", "--json", "j", "--workload", "w2", "--steps", "5", "--dtype", "bfloat16"]
    + ["--override", "filters.drop_no_signal=True"]
  )
  given = {
    program: compare.workload_for(program, options, model=tmp_path, problems=tmp_path)
    for program in compare.SCRIPTS
  }
  assert given["trl"] == given["tunix"]
  assert (given["ours"].dtype, given["trl"].dtype) == ("bfloat16", "float32")
  assert (given["ours"].steps, given["ours"].completion, given["ours"].group) == (5, 64, 8)
  given["ours"].write(tmp_path / "workload.json")
  assert workloads.read(tmp_path / "workload.json") == given["ours"]
  assert given["trl"].overrides == ()
  everything = "batching.skip_zero_advantage=False"
  assert set(given["ours-all"].overrides) - set(given["ours"].overrides) == {everything}


def make_workload(**changes):
  fields = {"prompts": 2, "group": 3, "completion": 5, "steps": 1} | changes
  return workloads.Workload(model="model", problems="problems.jsonl", **fields)


def test_our_configuration_is_the_workload_with_overrides_on_top():
  overrides = ("optim.learning_rate=2e-5", "loss.loss=gspo", "batching.skip_zero_advantage=False")
  config = ours.make_config(make_workload(overrides=overrides))
  assert (config.rollout.prompts_per_step, config.rollout.group_size) == (2, 3)
  assert config.sampling.max_tokens == 5
  assert (config.optim.learning_rate, config.loss.loss) == (2e-5, "gspo")
  assert config.batching.skip_zero_advantage is False
  assert ours.make_config(make_workload()).batching.skip_zero_advantage is True


def test_our_configuration_measures_nothing_that_the_peers_do_not():
  learn = ours.make_config(make_workload()).learn
  assert (learn.report_all_every_steps, learn.report_kl_every_steps) == (0, 0)


def test_our_configuration_refuses_an_override_of_no_field():
  with pytest.raises(KeyError, match="learning_rat"):
    ours.make_config(make_workload(overrides=("optim.learning_rat=2e-5",)))


def test_our_step_counts_the_tokens_that_were_packed():
  row = {
    "rollout/prompt_tokens_mean": 10.5,
    "rollout/completion_tokens_mean": 4.5,
    "rollout/reward_mean": 0.25,
    "batch/rows": 2.0,
    "batch/row_tokens": 32.0,
    "batch/packing_efficiency": 0.75,
    "time/step_s": 3.0,
    "time/sample_s": 1.0,
  }
  step = ours.step_of(row, make_workload())
  assert (step.prompt_tokens, step.completion_tokens, step.trained_tokens) == (21, 27, 48)
  assert (step.wall_s, step.generate_s, step.train_s) == (3.0, 1.0, 2.0)
  nothing = row | {"batch/rows": 0.0, "batch/row_tokens": 0.0, "batch/packing_efficiency": None}
  assert ours.step_of(nothing, make_workload()).trained_tokens == 0


def test_our_reward_is_the_peers_reward():
  assert our_reward.score("the prompt", "it is 12", {"expected_answer": "12"}) == 0.5


@pytest.mark.parametrize(
  ("completion", "expected"),
  [(" 12\n", 1.0), ("It is 12 .", 0.5), ("It is 12.", 0.0), ("112", 0.0), ("", 0.0)],
)
def test_reward_of_a_completion(completion, expected):
  assert workloads.reward(completion, "12") == expected


def test_problems_are_the_same_each_time_and_read_back_in_order(tmp_path):
  workloads.write_problems(tmp_path / "a.jsonl")
  workloads.write_problems(tmp_path / "b.jsonl")
  assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
  rows = workloads.read_problems(tmp_path / "a.jsonl")
  assert len(rows) == 512
  for row in rows[:8]:
    left, sign, right = row["question"].split(":")[1].removesuffix("=").split()
    total = int(left) + int(right) if sign == "+" else int(left) - int(right)
    assert row["answer"] == str(total)


def make_model_folder(folder, tokens):
  folder.mkdir()
  added = [{"id": i, "content": token, "special": True} for i, token in enumerate(tokens)]
  files = {
    "tokenizer.json": {"added_tokens": added},
    "tokenizer_config.json": {"eos_token": "<end>", "pad_token": "<pad>", "other": "<spare>"},
    "config.json": {"eos_token_id": 0, "hidden_size": 4},
    "generation_config.json": {"eos_token_id": [0, 1], "top_p": 0.5},
  }
  for name, content in files.items():
    (folder / name).write_text(json.dumps(content))
  (folder / "chat_template.jinja").write_text("{{ '<turn>' }}")
  (folder / "model.safetensors").write_bytes(b"weights")
  return folder


def test_endless_model_ends_at_a_token_in_no_other_use(tmp_path):
  source = make_model_folder(tmp_path / "source", ["<end>", "<pad>", "<spare>", "<turn>"])
  target = tmp_path / "endless"
  assert workloads.write_endless_model(source, target) == "<spare>"
  read = lambda name: json.loads((target / name).read_text())
  assert read("config.json") == {"eos_token_id": 2, "hidden_size": 4}
  assert read("generation_config.json") == {"eos_token_id": 2, "top_p": 0.5}
  assert read("tokenizer_config.json")["eos_token"] == "<spare>"
  assert (target / "model.safetensors").read_bytes() == b"weights"
  assert json.loads((source / "config.json").read_text())["eos_token_id"] == 0


def test_endless_model_needs_a_token_to_spare(tmp_path):
  source = make_model_folder(tmp_path / "source", ["<end>", "<pad>", "<turn>"])
  with pytest.raises(ValueError, match="no unused special token"):
    workloads.write_endless_model(source, tmp_path / "endless")


@pytest.mark.long
def test_memory_of_a_process_includes_its_children(tmp_path):
  hold = "import time; held = bytearray(60 << 20); time.sleep(1.0)"
  start_another = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {hold!r}])"
  both = f"{start_another}; {hold}; c.wait()"
  alone = processes.run([sys.executable, "-c", hold], log=tmp_path / "alone.txt")
  family = processes.run([sys.executable, "-c", both], log=tmp_path / "both.txt")
  assert 60 < alone.peak_mib < 110
  assert 120 < family.peak_mib < 220
  assert (alone.peak_processes, family.peak_processes) == (1, 2)
  assert alone.wall_s >= 1.0


def test_a_failed_program_is_reported_with_the_end_of_its_output(tmp_path):
  with pytest.raises(RuntimeError, match=r"status 3:(.|\n)*what went wrong"):
    processes.run(
      [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"],
      log=tmp_path / "log.txt",
    )


@pytest.mark.long
@pytest.mark.parametrize(
  ("remat", "recomputed", "backward"), [("full", 8, 18), ("dots", 0, 19), ("none", 0, 19)]
)
def test_a_profile_distinguishes_the_parts_of_an_update(remat, recomputed, backward):
  """A layer has 9 products, and 18 in its backward pass, which computes the scores once more.

  "full" computes all but the last again, and the scores of these are the ones that it needs.
  """
  config = ModelConfig("llama", 101, 24, 40, 2, 4, 2, 6, tie_embeddings=True)
  logprobs = token_scores.make_logprobs(config, implementation="xla_chunked", remat=remat)
  objective = objectives.make(kl_coef=0.0)
  update = train_step.make_update(logprobs, optim.make(10)[0], objective, report_entropy=False)
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
  blank = layout.blank(packing.Shape(2, 64, 16))
  batch = Batch(**{name: jnp.asarray(array) for name, array in blank.items()})
  sums = jax.eval_shape(update.start, params)
  compiled = update.differentiate.lower(params, sums, batch, Denominators(1.0, 1.0)).compile()
  program = trace_kinds.read(compiled.as_text())
  products = (name for name, text in program.definitions.items() if " dot(" in text)
  found = collections.Counter(map(program.phase, products))
  wanted = {"forward": 9, "recomputed": recomputed, "backward": backward}
  assert {part: found[part] for part in wanted} == wanted
  assert found["head"] > 0 and found["other"] == 0
