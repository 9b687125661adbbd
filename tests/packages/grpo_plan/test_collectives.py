"""The reader of collectives in compiled programs, on text as XLA writes it."""

import pytest

from grpo_plan import hlo_collectives

PROGRAM = """\
HloModule jit_run, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (carry: (s32[], f32[12,5])) -> (s32[], f32[12,5]) {
  %whole = u16[96,5]{1,0} all-gather(%part), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %part.2 = f32[3,5]{1,0} reduce-scatter(%g), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %tuple = (s32[], f32[12,5]) tuple(%i, %part.2)
}

%condition (carry: (s32[], f32[12,5])) -> pred[] {
  %limit = s32[] constant(28)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (p: f32[12,5]) -> f32[] {
  %loop = (s32[], f32[12,5]) while(%start), condition=%condition, body=%body
  %both = (f32[7]{0}, f32[2]{0}) all-reduce(%a, %b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
to_apply=%add, metadata={op_name="jit(run)/psum"}
  %begun = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%c), replica_groups=mesh['a'=4,'b'=2] {'b'}
  %done = bf16[8]{0} all-gather-done(%begun)
  %alone = f32[9]{0} all-reduce(%d), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %sent = f32[6]{0} collective-permute(%e), source_target_pairs={{0,1},{1,0}}
}
"""


def test_collectives_are_counted_as_often_as_their_loops_run():
  gather, scatter, reduce, begun, sent = hlo_collectives.collectives(PROGRAM, devices=8)
  assert (gather.kind, gather.times, gather.groups) == ("all-gather", 28, (tuple(range(8)),))
  assert gather.nbytes == 28 * 2 * 96 * 5 * 7 / 8
  assert (scatter.kind, scatter.times) == ("reduce-scatter", 28)
  assert scatter.nbytes == 28 * 4 * (4 * 3 * 5) * 3 / 4
  assert [array.shape for array in reduce.arrays] == [(7,), (2,)]
  assert (reduce.nbytes, reduce.source) == (2 * 4 * 9 / 2, "jit(run)/psum")
  assert begun.arrays == (hlo_collectives.Array("bf16", (8,)),)
  assert begun.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
  assert sent.nbytes == 4 * 6


def test_what_a_start_names_twice_is_received_once():
  line = "  %begun = ((bf16[1,8]{1,0}), bf16[1,8]{1,0}) all-reduce-start(%c), channel_id=1\n"
  (begun,) = hlo_collectives.collectives(f"ENTRY %main (p: s32[]) -> s32[] {{\n{line}}}", devices=8)
  assert begun.arrays == (hlo_collectives.Array("bf16", (1, 8)),)
  flat = line.replace("((bf16[1,8]{1,0}), bf16", "(bf16[4]{0}, bf16")  # two arrays, combined.
  (begun,) = hlo_collectives.collectives(f"ENTRY %main (p: s32[]) -> s32[] {{\n{flat}}}", devices=8)
  assert [array.shape for array in begun.arrays] == [(4,), (1, 8)]


def test_a_loop_as_long_as_its_data_say_counts_as_not_run():
  given = PROGRAM.replace("%limit = s32[] constant(28)", "%limit = s32[] get-tuple-element(%carry)")
  found = hlo_collectives.collectives(given, devices=8)
  assert [one.times for one in found] == [0, 0, 1, 1, 1]
  assert sum(one.nbytes for one in found[:2]) == 0


@pytest.mark.parametrize(
  ("groups", "axes"),
  [
    ([(0, 1, 2, 3, 4, 5, 6, 7)], {"data", "fsdp", "tensor"}),
    ([(0, 4), (1, 5)], {"data"}),
    ([(0, 2), (1, 3)], {"fsdp"}),
    ([(0, 1)], {"tensor"}),
    ([(0, 2, 4, 6)], {"data", "fsdp"}),
  ],
)
def test_axes_of_a_mesh_are_those_along_which_a_group_differs(groups, axes):
  sizes = {"data": 2, "fsdp": 2, "tensor": 2}
  assert hlo_collectives.axes_of(groups, sizes) == axes


def test_folded_groups_are_transposed():
  line = "%x = f32[4]{0} all-reduce(%y), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add"
  text = f"ENTRY %main (y: f32[4]) -> f32[4] {{\n  {line}\n}}\n"
  (found,) = hlo_collectives.collectives(text, devices=8)
  assert found.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
