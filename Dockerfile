# Pipetune on a CUDA toolkit, which DeepSpeed and flash-attn compile their kernels with. The toolkit has to be of the same
# major release as torch's own CUDA libraries, and the machine's driver as new (580 for CUDA 13).
#
#   docker build -t pipetune .             # --build-arg GPU_EXTRAS=1 adds flash-attn and torchao
#   docker run --gpus all --ipc host -v "$PWD":/repo/pipetune -v "$PWD/../llm":/repo/llm -w /repo/pipetune \
#     pipetune train --config configs/ds_config_pp.yml
#
# The first folder holds configs and records, the second one is where the configs have models and runs: ../llm.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

# ssh and pdsh for several machines, git for the revision that run.json notes. Hosts that ssh has to reach need
# openssh-server as well (docs/cluster.md#docker).
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git openssh-client pdsh python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/pipetune/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/pipetune

# What changes seldom comes first: a change of the code installs the code alone.
WORKDIR /opt/source
COPY requirements.txt constraints.txt requirements-gpu.txt ./
RUN pip install -r requirements.txt -c constraints.txt
ARG GPU_EXTRAS=0
RUN if [ "$GPU_EXTRAS" = 1 ]; then pip install -r requirements-gpu.txt --no-build-isolation; fi
COPY . .
RUN pip install --no-deps .

WORKDIR /work
ENTRYPOINT ["pipetune"]
CMD ["--help"]
