"""Settings of the whole suite: eight CPU devices, exact matmuls, no silent broadcasting."""

import atexit
import os
import shutil
import tempfile

# Nearly all time of the suite is compilation: unoptimised code compiles three times as fast.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# What one test compiled, others do not compile again.
CACHE = tempfile.mkdtemp(prefix="xla-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
