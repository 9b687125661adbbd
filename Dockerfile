# Trainer and SGLang servers for NVIDIA GPUs, each in an environment of its own, and bubblewrap for
# programs that a model writes. CUDA 13: the machine needs a driver of version 580 or newer.
#
#   docker build -t grpo-jax .
#   docker run --rm --gpus all --ipc=host --security-opt seccomp=unconfined \
#     --security-opt apparmor=unconfined -v "$PWD/runs:/work/runs" grpo-jax doctor
#
# docs/installation.md explains the options of `docker run`.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# SGLang compiles kernels when it starts: gcc and ninja; nvcc is in the base image.
RUN apt-get update \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    bubblewrap build-essential ca-certificates libnuma1 ninja-build python3 python3-dev python3-venv \
  && rm -rf /var/lib/apt/lists/*

# The servers' environment comes first: it is the largest layer, and changes least.
WORKDIR /opt/grpo_jax
COPY constraints/sglang_cuda.txt constraints/
COPY scripts/install_sglang.sh scripts/
RUN PIP_NO_CACHE_DIR=1 bash scripts/install_sglang.sh cuda /opt/sglang

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY constraints constraints
COPY configs configs
COPY kernels kernels
COPY packages packages
COPY grpo_jax grpo_jax
RUN python3 -m venv /opt/trainer \
  && /opt/trainer/bin/pip install --no-cache-dir -c constraints/py312.txt ".[cuda13]"

# Where the trainer looks for the servers' Python: engine.sglang.python.
WORKDIR /work
RUN ln -s /opt/sglang .venv-sglang
ENV PATH=/opt/trainer/bin:$PATH
ENTRYPOINT ["grpo-jax"]
CMD ["--help"]
