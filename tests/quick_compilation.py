"""The flags with which the suite compiles: nearly all of its time is compilation.

Code that is not optimised, written by the older of XLA's two emitters, compiles ten times as fast.
"""

FLAGS = (
  "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
